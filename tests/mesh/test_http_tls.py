"""HTTP under TLS in a router process: handshakes that do not end, sessions, and whom a client believes."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from support.certificates import make_certificates, tls_of
from support.http_process import DEADLINE_S, HEALTH, HttpProcess, http_process
from support.runtime_servicers import serving

from radixmesh.daemons.router.http.server.handshakes import MAX_HANDSHAKES, MAX_SILENT
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

pytestmark = pytest.mark.asyncio(loop_scope="module")
VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
# The first bytes of a TLS record that says it is longer.
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "theirs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(ours: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpProcess]:
    """Asks for certificates; its files are copies that a test may replace."""
    folder = tmp_path_factory.mktemp("router")
    shutil.copytree(ours, folder / "live")
    files = tls_of(folder / "live", "router", asks_clients=True)
    flags = [
        f"--tls-{name}-file={path}"
        for name, path in (("cert", files.cert_file), ("key", files.key_file), ("client-ca", files.client_ca_file))
    ]
    async with http_process(folder, *flags, tls=client_of(ours)) as router:
        yield router


def client_of(folder: Path) -> ssl.SSLContext:
    return tls_of(folder, "client").client_context()


async def test_handshakes_that_end_after_their_hello_are_bounded(router: HttpProcess, ours: Path) -> None:
    """A whole hello makes the router compute: what then says nothing gives way. Uncounted, 2,048 cost 150 MB."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = client_of(ours).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    said = outgoing.read()
    before = router.memory_bytes()
    half, most = [], 0
    try:
        for number in range(4 * MAX_HANDSHAKES):
            half.append(connection := socket.create_connection(("127.0.0.1", router.port)))
            connection.send(said)
            if number % 64 == 63:
                await router.health_s(client_of(ours))
                most = max(most, router.memory_bytes() - before)
        await router.health_s(client_of(ours))
        assert max(most, router.memory_bytes() - before) < 150_000 * MAX_HANDSHAKES
    finally:
        for connection in half:
            connection.close()
    await router.health_s(client_of(ours))


async def test_handshakes_that_do_not_end_cost_little_and_keep_nobody_out(router: HttpProcess, ours: Path) -> None:
    """Uncounted, 8,000 of six bytes cost 590 MB."""
    before = router.memory_bytes()
    half = []
    try:
        for _ in range(MAX_SILENT + 500):
            connection = socket.create_connection(("127.0.0.1", router.port))
            connection.send(HALF_A_HELLO)
            half.append(connection)
        await router.health_s(client_of(ours))
        await router.health_s(client_of(ours))
        assert router.memory_bytes() - before < 96_000_000
        # Connections are accepted in turn: those before the last health check have made the oldest give way.
        assert sum(map(is_open, half)) <= MAX_SILENT
        # A connection that makes no progress is cut off.
        async with asyncio.timeout(DEADLINE_S):
            while any(is_open(connection) for connection in half):
                await asyncio.sleep(0.2)
    finally:
        for connection in half:
            connection.close()
    await router.health_s(client_of(ours))


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(4096) != b""  # An alert may come first.
    except BlockingIOError:
        return True
    except OSError:
        return False


async def test_what_is_no_tls_ends_nothing(router: HttpProcess, ours: Path) -> None:
    for junk in (b"GET / HTTP/1.1\r\nHost: " + b"a" * 40, b"\x00" * 65536, b"\x16\x03\x01\xff\xff" + b"\xff" * 65536):
        with suppress(ConnectionError):
            assert b"200" not in await router.answer(junk)
        await router.health_s(client_of(ours))


def num_resumed(port: int, context: ssl.SSLContext, said: bytes) -> int:
    """Of three connections, each with the session of the one before."""
    session, resumed = None, 0
    for _ in range(3):
        plain = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        with context.wrap_socket(plain, server_hostname="localhost", session=session) as tls:
            tls.send(said)
            assert tls.recv(4096)  # Bytes that came with the handshake are read by then.
            resumed += bool(tls.session_reused)
            session = tls.session or session
    return resumed


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
async def test_no_session_outlives_a_certificate(router: HttpProcess, ours: Path, version: ssl.TLSVersion) -> None:
    """A client that resumes a session shows no certificate."""
    context = client_of(ours)
    context.minimum_version = context.maximum_version = version
    assert await asyncio.to_thread(num_resumed, router.port, context, HEALTH) == 0


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
async def test_nor_over_grpc(ours: Path, version: ssl.TLSVersion) -> None:
    context = tls_of(ours, "router").client_context()
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    async with serving(tls=tls_of(ours, "tokenizer", asks_clients=True)) as bench:
        port = int(bench.address.rpartition(":")[2])
        assert await asyncio.to_thread(num_resumed, port, context, preface) == 0


async def test_only_the_authority_that_is_named_is_believed(
    router: HttpProcess, ours: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's would sign for whoever is in the way."""
    monkeypatch.setenv("SSL_CERT_FILE", str(ours / "ca.pem"))
    assert ssl.create_default_context().cert_store_stats()["x509_ca"] == 1, "the system believes our authority"
    certificate = tls_of(ours, "client")
    files = TlsFiles(ca_file=theirs / "ca.pem", cert_file=certificate.cert_file, key_file=certificate.key_file)
    with pytest.raises(ssl.SSLCertVerificationError):
        await router.health_s(files.client_context())
    await router.health_s(client_of(ours))
