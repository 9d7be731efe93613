"""Servers and channels of the runtime under TLS, mutual TLS and API keys: who gets in, and what the others are told."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from support.certificates import make_certificates, tls_of
from support.runtime_servicers import serving

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.server.connection import ConnectionLimits
from radixmesh.daemons.router.http.server.server import HttpServer
from radixmesh.daemons.router.http.server.tls import FollowedContext
from radixmesh.daemons.router.peers.grpc_peers import GrpcTokenizer
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.security.api_keys import ApiKeys
from radixmesh.daemons.runtime.security.key_guard import KeyGuard
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.detokenizer.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

KEY = "key-0123456789abcdef"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "theirs")


async def answer(address: str, tls: TlsFiles | None, *, key: str = "") -> str:
    """OK, or the status and reason that a unary call gets."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with open_channel(address, tls) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        try:
            # Not one of the verbs that are retried: a refused handshake is told at once.
            request = tokenizer_pb2.EncodeRequest()
            await stub.Encode(request, timeout=60, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            reason = mesh_error_from_rpc(error).reason_name
            # EMPTY_PROMPT: the handler was reached.
            return "OK" if reason == "EMPTY_PROMPT" else error.code().name
    return "OK"


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix"])
async def test_mutual_tls_lets_in_who_has_our_certificate_alone(
    ours: Path, theirs: Path, tmp_path: Path, listen: str
) -> None:
    listen = f"unix:{tmp_path}/s" if listen == "unix" else listen
    client = tls_of(ours, "router")
    async with serving(listen, tls=tls_of(ours, "tokenizer", asks_clients=True)) as bench:
        assert await answer(bench.address, client) == "OK"
        assert await answer(bench.address, tls_of(ours, "scheduler")) == "OK"
        assert await check_health(bench.address, tls=client) == "SERVING"
        assert await answer(bench.address, replace(client, peer_name="tokenizer")) == "OK"
        refused = {
            "plain": None,
            "no certificate": replace(client, cert_file=None, key_file=None),
            "a client's certificate": tls_of(ours, "client"),
            "another authority's certificate": replace(tls_of(theirs, "router"), ca_file=client.ca_file),
            "believes another authority": replace(client, ca_file=theirs / "ca.pem"),
            "another name": replace(client, peer_name="worker"),
        }
        for what, tls in refused.items():
            assert await answer(bench.address, tls) == "UNAVAILABLE", what
            assert await check_health(bench.address, tls=tls) == "UNREACHABLE", what
    assert bench.errors == [] or {error.reason_name for error in bench.errors} == {"EMPTY_PROMPT"}


async def test_a_clients_certificate_serves_as_nothing(ours: Path) -> None:
    """Neither as a daemon, nor with daemons that believe the authority of clients."""
    async with serving(tls=tls_of(ours, "client")) as bench:
        for ca in ("ca.pem", "clients-ca.pem", "router-clients.pem"):
            for name in ("client", "localhost"):
                tls = replace(tls_of(ours, "router"), ca_file=ours / ca, peer_name=name)
                assert await answer(bench.address, tls) == "UNAVAILABLE"


async def test_the_router_lets_in_daemons_and_clients(ours: Path, theirs: Path) -> None:
    async with serving(tls=tls_of(ours, "router", asks_clients=True)) as bench:
        assert await answer(bench.address, tls_of(ours, "client")) == "OK"
        assert await check_health(bench.address, tls=tls_of(ours, "router")) == "SERVING"
        wrong = replace(tls_of(theirs, "client"), ca_file=ours / "ca.pem")
        assert await answer(bench.address, wrong) == "UNAVAILABLE"


async def test_certificates_that_are_there_stay(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "tls")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "worker.pem").unlink()
    script = Path(__file__).parents[2] / "compose" / "make_certificates.sh"

    def run(*clients: str) -> int:
        return subprocess.run(
            [str(script), str(folder), *clients], capture_output=True, timeout=30, check=False
        ).returncode

    assert run("alice") == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() - before.keys() == {"alice.pem", "alice.key"}
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"worker.pem", "worker.key", "ca.srl", "clients-ca.srl"} and "worker.pem" in changed
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    for name in ("worker", "ca", "../x", "-x", "a b", ""):
        assert run(name) == 2, name


async def test_tls_alone_lets_in_clients_without_certificates(ours: Path) -> None:
    async with serving(tls=tls_of(ours, "tokenizer")) as bench:
        assert await answer(bench.address, TlsFiles(ca_file=ours / "ca.pem")) == "OK"
        assert await answer(bench.address, None) == "UNAVAILABLE"
    async with serving() as bench:
        assert await answer(bench.address, tls_of(ours, "client")) == "UNAVAILABLE", "a plain server is no TLS server"


class Rotating:
    """A folder of certificates whose files are replaced one by one, each change with a time of its own."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder = folder
        self._moment = 1_000_000_000
        shutil.copytree(source, folder)

    def install(self, source: Path, *names: str) -> None:
        for name in names:
            self._moment += 10
            shutil.copy(source / name, self.folder / "new")
            os.utime(self.folder / "new", (self._moment, self._moment))
            (self.folder / "new").replace(self.folder / name)


async def test_certificates_are_renewed_in_place(ours: Path, theirs: Path, tmp_path: Path) -> None:
    live = Rotating(tmp_path / "live", ours)
    async with serving(tls=tls_of(live.folder, "tokenizer", asks_clients=True)) as bench:
        assert await answer(bench.address, tls_of(ours, "router")) == "OK"
        live.install(theirs, "tokenizer.pem")
        assert await answer(bench.address, tls_of(ours, "router")) == "OK", "half replaced: the former ones stay"
        live.install(theirs, "tokenizer.key", "ca.pem")
        assert await answer(bench.address, tls_of(theirs, "router")) == "OK"
        assert await answer(bench.address, tls_of(ours, "router")) == "UNAVAILABLE"


async def test_https_follows_its_files_too(ours: Path, theirs: Path, tmp_path: Path) -> None:
    live = Rotating(tmp_path / "live", ours)

    async def greet(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"in", headers={"connection": "close"})(scope, receive, send)

    async def get(folder: Path) -> bytes:
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=tls_of(folder, "client").client_context()
                )
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                try:
                    return (await reader.read())[-2:]
                finally:
                    writer.close()
        except (ssl.SSLError, ConnectionError):
            return b"out"

    tls = FollowedContext(tls_of(live.folder, "router", asks_clients=True))
    limits = ConnectionLimits(head_s=60, idle_s=60, stall_s=60, max_connections=8)
    server = HttpServer(greet, "127.0.0.1:0", limits=limits, tls=tls)
    port = int(server.bind().rpartition(":")[2])
    serving_http = asyncio.ensure_future(server.serve())
    try:
        assert (await get(ours), await get(theirs)) == (b"in", b"out")
        live.install(theirs, "router.pem")
        assert await get(ours) == b"in"
        live.install(theirs, "router.key", "ca.pem", "router-clients.pem")
        assert (await get(ours), await get(theirs)) == (b"out", b"in")
    finally:
        server.stop()
        await serving_http


async def test_a_lasting_channel_follows_its_files(ours: Path, theirs: Path, tmp_path: Path) -> None:
    live = Rotating(tmp_path / "live", ours)
    tokenizer = GrpcTokenizer(f"unix:{tmp_path}/s", tls_of(live.folder, "router"))

    async def asked() -> str:
        with pytest.raises(MeshError) as told:
            await tokenizer.encode(tokenizer_pb2.EncodeRequest(), 5.0)
        return told.value.reason_name

    async with serving(f"unix:{tmp_path}/s", tls=tls_of(ours, "tokenizer", asks_clients=True)):
        assert await asked() == "EMPTY_PROMPT"
    async with serving(f"unix:{tmp_path}/s", tls=tls_of(theirs, "tokenizer", asks_clients=True)):
        assert await asked() == "NO_REPLICA"
        live.install(theirs, "router.pem")
        assert await asked() == "NO_REPLICA", "half replaced"
        live.install(theirs, "router.key", "ca.pem")
        assert await asked() == "EMPTY_PROMPT"
    await tokenizer.close()


async def test_files_that_cannot_be_used_are_named(ours: Path, theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "rubbish").write_text("no certificate")
    good = tls_of(ours, "tokenizer", asks_clients=True)
    for broken, named in (
        (replace(good, key_file=theirs / "tokenizer.key"), "tokenizer.key"),
        (replace(good, cert_file=tmp_path / "rubbish"), "rubbish"),
        (replace(good, client_ca_file=tmp_path / "nowhere"), "nowhere"),
        (replace(good, ca_file=tmp_path / "rubbish"), "rubbish"),
    ):
        with pytest.raises(MeshError, match=named) as refused:
            broken.check()
        assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT
    with pytest.raises(MeshError, match="rubbish"):
        open_channel("127.0.0.1:1", TlsFiles(ca_file=tmp_path / "rubbish"))
    assert "together" in TlsFiles(cert_file=tmp_path).fault() and "needs" in TlsFiles(client_ca_file=tmp_path).fault()
    assert good.fault() == TlsFiles().fault() == ""


async def test_every_call_but_health_needs_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    async with serving() as bench:
        bench.server.guard(KeyGuard(ApiKeys(tmp_path / "keys"), None))
        assert await answer(bench.address, None, key=KEY) == "OK"
        num_errors = len(bench.errors)
        for wrong in ("", KEY[:-1], "x" * 5000):
            assert await answer(bench.address, None, key=wrong) == "UNAUTHENTICATED"
        assert [e.reason_name for e in bench.errors[num_errors:]] == ["UNAUTHENTICATED"] * 3
        assert await check_health(bench.address) == "SERVING"
        async with open_channel(bench.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
            # Streams, and reflection, the same: nothing of what is sent is looked at.
            stream = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Detokenize(frames(), timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stream.read()
            assert mesh_error_from_rpc(refused.value).reason_name == "UNAUTHENTICATED"
            assert "Bearer" in (refused.value.details() or "") and bench.detokenizer.num_closed == 0
            assert await services(channel, "") == "UNAUTHENTICATED"
            assert "radixmesh.tokenizer.v1.TokenizerService" in await services(channel, KEY)


async def frames() -> AsyncIterator[detokenizer_pb2.DetokenizeRequest]:
    yield detokenizer_pb2.DetokenizeRequest(opens=[detokenizer_pb2.Open(handle=1)])


async def services(channel: grpc.aio.Channel, key: str) -> str:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=60, metadata=metadata
    )
    try:
        return str(await call.read())
    except grpc.aio.AioRpcError as error:
        return error.code().name


async def test_a_refusal_reaches_clients_that_still_write(tmp_path: Path) -> None:
    """A reset that overtakes the status would be an INTERNAL error: what is on its way is let in, within a bound."""
    (tmp_path / "keys").write_text(KEY)
    frame = detokenizer_pb2.DetokenizeRequest(opens=[detokenizer_pb2.Open(handle=1)] * 50)
    large = detokenizer_pb2.DetokenizeRequest(opens=[detokenizer_pb2.Open(handle=1)] * 50_000)

    async def many() -> AsyncIterator[detokenizer_pb2.DetokenizeRequest]:
        for _ in range(100):
            yield frame

    async def endless() -> AsyncIterator[detokenizer_pb2.DetokenizeRequest]:
        while True:
            yield large

    async with serving() as bench, open_channel(bench.address) as channel:
        bench.server.guard(KeyGuard(ApiKeys(tmp_path / "keys"), None))
        detokenizer = detokenizer_pb2_grpc.DetokenizerServiceStub(channel)
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        text = tokenizer_pb2.EncodeRequest(items=[tokenizer_pb2.EncodeItem(text="x" * (1 << 20))])
        told = []
        for _ in range(50):
            for call in (detokenizer.Detokenize(many(), timeout=30).read(), tokenizer.Encode(text, timeout=30)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                told.append(mesh_error_from_rpc(refused.value).reason_name)
        assert told == ["UNAUTHENTICATED"] * 100
        # A client that never stops is cut off all the same.
        async with asyncio.timeout(30):
            with pytest.raises(grpc.aio.AioRpcError):
                await detokenizer.Detokenize(endless()).read()
        assert bench.detokenizer.num_closed == 0
