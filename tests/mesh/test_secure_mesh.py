"""A whole mesh over mutual TLS with API keys: it recites, survives a kill, and refuses everybody else."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from support.certificates import make_certificates, tls_of, tls_settings
from support.http import http_address
from support.jobs import recitations
from support.mesh import SERVICES, Mesh, running_mesh
from support.node import node_or_skip, run_node

from radixmesh.client import AsyncClient, AuthenticationError, RadixMeshError, UnavailableError
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.router.requests.intake.tenancy import tenant_salt
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY_TOO, BOB, NO_TENANT = "alice-too-0123456789", "bob-key-0123456789ab", "nobodys-key-0123456789"
KEY, ADMIN = "alice-key-0123456789", "admin-key-0123456789"
JOBS = sorted(recitations(with_sampled=False), key=lambda job: -len(job.answers[0].ids))[8:12]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("mesh") / "tls")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(certificates: Path) -> AsyncIterator[Mesh]:
    settings = {name: tls_settings(tls_of(certificates, name, asks_clients=True)) for name in SERVICES}
    (certificates / "keys").write_text(f"{KEY} alice\n{KEY_TOO} alice\n{BOB} bob\n{NO_TENANT}\n")
    (certificates / "admin-keys").write_text(ADMIN)
    settings["router"] |= {"api_keys_file": certificates / "keys", "admin_keys_file": certificates / "admin-keys"}
    async with running_mesh("cpu", api_key=KEY, tls=tls_of(certificates, "client"), **settings) as mesh:  # type: ignore[arg-type]
        yield mesh
        assert mesh.bugs == []


def http_client(mesh: Mesh, tls: TlsFiles | None, key: str = "") -> httpx.AsyncClient:
    scheme, verify = ("https", tls.client_context()) if tls is not None else ("http", True)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    base = f"{scheme}://{http_address(mesh)}"
    return httpx.AsyncClient(base_url=base, headers=headers, verify=verify, timeout=30, trust_env=False)


OTHERS = [pytest.param(service, marks=pytest.mark.full) for service in SERVICES if service != "scheduler"]


@pytest.mark.parametrize("service", ["scheduler", *OTHERS])
async def test_it_recites_and_a_kill_goes_unseen(mesh: Mesh, service: str) -> None:
    restarts = mesh.cluster.status(service).restarts

    def is_back(status: ProcessStatus) -> bool:
        return status.restarts > restarts and status.state is ProcessState.HEALTHY

    running = [asyncio.ensure_future(job.run(mesh.client)) for job in JOBS]
    await asyncio.sleep(0.15)
    assert mesh.cluster.kill(service, 1, signal.SIGKILL)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*running)
        await mesh.cluster.wait_until(service, is_back)
    assert answers == [job.answers for job in JOBS]


INNER = ("tokenizer", "detokenizer", "scheduler", "worker")
GARBAGE = b"\xff\xff\xff"


def rpcs_of(service: str) -> list[MethodDescriptor]:
    """Every rpc that a daemon's contract has, and health: a new one is among them by itself."""
    file = importlib.import_module(f"radixmesh.{service}.v1.{service}_pb2").DESCRIPTOR
    services = [*file.services_by_name.values(), health_pb2.DESCRIPTOR.services_by_name["Health"]]
    return [method for each in services for method in each.methods]


async def outcome(channel: grpc.aio.Channel, method: MethodDescriptor, key: str = "") -> str:
    """Answer to a call that sends bytes of no message: it changes nothing, whoever is let in."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    kind = ("stream_" if method.client_streaming else "unary_") + ("stream" if method.server_streaming else "unary")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    call = getattr(channel, kind)(name)
    request = iter([GARBAGE]) if method.client_streaming else GARBAGE
    try:
        running = call(request, timeout=30, metadata=metadata)
        await (running.read() if method.server_streaming else running)
    except grpc.aio.AioRpcError as error:
        is_typed = any(name == "grpc-status-details-bin" for name, _ in error.trailing_metadata() or ())
        return mesh_error_from_rpc(error).reason_name if is_typed else error.code().name
    return "OK"


async def outcomes(address: str, service: str, tls: TlsFiles | None, key: str = "") -> dict[str, str]:
    async with open_channel(address, tls) as channel:
        methods = rpcs_of(service)
        told = await asyncio.gather(*(outcome(channel, method, key) for method in methods))
        return {method.full_name: each for method, each in zip(methods, told, strict=True)}


async def test_every_rpc_of_inner_daemons_is_for_daemons(mesh: Mesh, certificates: Path, tmp_path: Path) -> None:
    """A client's certificate opens the router alone; in the handshake, so that no rpc can be forgotten."""
    theirs = make_certificates(tmp_path / "theirs")
    daemon = tls_of(certificates, "router")
    outside = {
        "plain": None,
        "no certificate": replace(daemon, cert_file=None, key_file=None),
        "a client": tls_of(certificates, "client"),
        "a client of another authority": replace(tls_of(theirs, "client"), ca_file=daemon.ca_file),
        "a daemon of another authority": replace(tls_of(theirs, "router"), ca_file=daemon.ca_file),
    }
    for service in INNER:
        address = mesh.cluster.address(service)
        for who, tls in outside.items():
            told = await outcomes(address, service, tls)
            assert set(told.values()) == {"UNAVAILABLE"}, (service, who, told)
        for name in SERVICES:
            told = await outcomes(address, service, tls_of(certificates, name))
            assert set(told.values()) == {"MALFORMED_MESSAGE"}, (service, name, told)


async def test_every_rpc_of_the_router_needs_a_certificate_and_a_key(
    mesh: Mesh, certificates: Path, tmp_path: Path
) -> None:
    address, theirs = mesh.routers[0], make_certificates(tmp_path / "theirs")
    client = tls_of(certificates, "client")
    for tls in (
        None,
        replace(client, cert_file=None, key_file=None),
        replace(tls_of(theirs, "client"), ca_file=client.ca_file),
    ):
        told = await outcomes(address, "router", tls, ADMIN)
        assert set(told.values()) == {"UNAVAILABLE"}, told
    for key, plain, admin in (
        ("", "UNAUTHENTICATED", "UNAUTHENTICATED"),
        ("wrong-key-0123456789", "UNAUTHENTICATED", "UNAUTHENTICATED"),
        (KEY, "MALFORMED_MESSAGE", "PERMISSION_DENIED"),
        (ADMIN, "MALFORMED_MESSAGE", "MALFORMED_MESSAGE"),
    ):
        for name in ("client", "worker"):
            for rpc, told_this in (await outcomes(address, "router", tls_of(certificates, name), key)).items():
                if rpc.startswith("grpc.health"):
                    expected = "MALFORMED_MESSAGE"
                else:
                    expected = admin if rpc.startswith("radixmesh.router.v1.RouterAdminService.") else plain
                assert told_this == expected, (key, name, rpc)


async def test_tenants_do_not_see_in_the_cache_what_others_sent(mesh: Mesh, certificates: Path) -> None:
    """Counted, not timed: a second key of the same tenant shows how much there was to see."""
    prompt = [5 + index % 90 for index in range(300)]
    tls = tls_of(certificates, "client")

    async def num_cached(key: str, **claims: str) -> int:
        async with AsyncClient(mesh.routers, api_key=key, tls=tls) as client:
            completion = await client.complete(prompt, max_tokens=2, temperature=0, **claims)  # type: ignore[arg-type]
            return completion.outputs[0].finish.usage.cached_tokens

    assert await num_cached(KEY) == 0
    # The last token is always computed: its logits are wanted.
    assert await num_cached(KEY_TOO) >= len(prompt) - 16
    alices = tenant_salt("alice", "")
    for key in (BOB, NO_TENANT):
        # Each claim has a salt of its own: none meets what the one before it left.
        for number, claim in enumerate(
            ({"tenant": "alice"}, {"cache_salt": alices}, {"tenant": "alice", "cache_salt": alices + "x"})
        ):
            assert await num_cached(key, **claim) == 0, (key, number)


async def test_who_has_no_certificate_reaches_no_daemon(mesh: Mesh, certificates: Path, tmp_path: Path) -> None:
    client = tls_of(certificates, "client")
    theirs = make_certificates(tmp_path / "theirs")
    wrong = (
        None,
        replace(client, cert_file=None, key_file=None),
        replace(tls_of(theirs, "client"), ca_file=client.ca_file),
    )
    asked = [
        check_health(mesh.cluster.address(service), 20.0, tls=tls)
        for service in SERVICES
        for tls in (tls_of(certificates, "router"), *wrong)
    ]
    assert await asyncio.gather(*asked) == ["SERVING", *["UNREACHABLE"] * 3] * len(SERVICES)
    for tls in wrong:
        async with AsyncClient(mesh.routers, api_key=KEY, tls=tls) as stranger:
            with pytest.raises(UnavailableError):
                await stranger.models()
        with pytest.raises(httpx.TransportError):
            async with http_client(mesh, tls if tls is not None and tls.cert_file else None, KEY) as http:
                await http.get("/v1/models")


@pytest.mark.parametrize("key", ["", "wrong-key-0123456789", KEY + "x"])
async def test_who_has_no_key_is_told_so(mesh: Mesh, certificates: Path, key: str) -> None:
    tls = tls_of(certificates, "client")
    async with AsyncClient(mesh.routers, api_key=key, tls=tls) as client:
        calls = [client.complete("x", max_tokens=1), client.models(), client.tokenize("x"), client.abort("x")]
        for refused in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(refused, AuthenticationError) and refused.reason == "UNAUTHENTICATED"
    async with http_client(mesh, tls, key) as http:
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("POST", "/no")):
            answer = await http.request(method, path, content=b"x" * 100_000 if method == "POST" else None)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (
                401,
                "UNAUTHENTICATED",
                "authentication_error",
            )
            assert answer.headers["www-authenticate"] == "Bearer" and {"message", "param"} <= error.keys()
        assert (await http.get("/health")).status_code == 200
        sdk = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key or "none", http_client=http, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await sdk.completions.create(model="tiny-llama", prompt="x", max_tokens=1)


async def test_who_has_both_gets_answers_over_http(mesh: Mesh, certificates: Path) -> None:
    job = next(job for job in JOBS if job.prompt)
    async with http_client(mesh, tls_of(certificates, "client"), KEY) as http:
        sdk = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, http_client=http, max_retries=0)
        assert isinstance(job.prompt, str)
        whole = await sdk.completions.create(model="tiny-llama", prompt=job.prompt, temperature=0, max_tokens=2000)
        assert whole.choices[0].text == job.answers[0].text
        assert "UNAUTHENTICATED" in (await http.get("/metrics")).text


async def test_only_admins_change_the_mesh(mesh: Mesh, certificates: Path) -> None:
    request = router_pb2.ListSchedulersRequest()
    async with open_channel(mesh.routers[0], tls_of(certificates, "client")) as channel:
        stub = router_pb2_grpc.RouterAdminServiceStub(channel)
        for key, reason in ((KEY, "PERMISSION_DENIED"), ("nobody's-0123456789", "UNAUTHENTICATED")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListSchedulers(request, metadata=(("authorization", f"Bearer {key}"),), timeout=5)
            assert mesh_error_from_rpc(refused.value).reason_name == refused.value.code().name == reason
        answer = await stub.ListSchedulers(request, metadata=(("authorization", f"Bearer {ADMIN}"),), timeout=5)
        assert len(answer.schedulers) == 1


async def test_a_key_that_is_taken_away_opens_nothing(mesh: Mesh, certificates: Path) -> None:
    path, new = certificates / "keys", certificates / "keys.new"
    new.write_text(f"{KEY} alice\nanother-key-0123456789 bob\n")
    new.replace(path)
    async with AsyncClient(
        mesh.routers, api_key="another-key-0123456789", tls=tls_of(certificates, "client")
    ) as client:
        await until_it(client, is_allowed=True)
        new.write_text(f"{KEY} alice\n")
        new.replace(path)
        await until_it(client, is_allowed=False)
    assert await mesh.client.models()


async def until_it(client: AsyncClient, *, is_allowed: bool) -> None:
    async with asyncio.timeout(15):
        while True:
            try:
                await client.models()
            except AuthenticationError:
                if not is_allowed:
                    return
            except RadixMeshError:
                pass
            else:
                if is_allowed:
                    return
            await asyncio.sleep(0.1)


async def test_the_command_gets_in_by_flags_and_by_variables(mesh: Mesh, certificates: Path) -> None:
    tls = tls_of(certificates, "client")
    (certificates / "my-key").write_text(KEY + "\n")
    flags = ["--api-key-file", "my-key", "--tls-ca-file", "ca.pem", "--tls-cert-file", "client.pem", "--tls-key-file"]
    generate = ["generate", "x", "--router", mesh.routers[0], "--max-tokens", "2"]
    variables = {f"RADIXMESH_{name.upper()}": str(path) for name, path in tls_settings(tls).items()}
    by_flags, by_variables, without, health, unhealthy, bench = await asyncio.gather(
        radixmesh(certificates, *generate, *flags, "client.key"),
        radixmesh(certificates, *generate, **variables, RADIXMESH_API_KEY=KEY),
        radixmesh(certificates, *generate, **variables),
        radixmesh(certificates, "health", mesh.cluster.address("router"), **variables),
        radixmesh(certificates, "health", mesh.cluster.address("worker")),
        radixmesh(
            certificates, "bench", "serve", "--target", f"https://{http_address(mesh)}/v1",
            *flags, "client.key", "--num-requests", "2", "--input-len", "4", "--output-len", "4", "--no-progress",
        ),
    )  # fmt: skip
    assert (by_flags[0], by_variables[0]) == (0, 0), (by_flags, by_variables)
    assert without[0] == 1 and "UNAUTHENTICATED" in without[1]
    assert health == (0, "SERVING\n") and unhealthy[0] == 1
    assert bench[0] == 0, bench[1]


async def radixmesh(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code, and what the command wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "radixmesh.cli", *arguments, cwd=folder, env=environment(variables),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def environment(added: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RADIXMESH_")}
    return inherited | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(added)


async def test_the_node_client_gets_in(mesh: Mesh, certificates: Path) -> None:
    node = node_or_skip()
    script = """
        import { readFileSync } from "node:fs";
        import { AuthenticationError, RadixMesh } from "./src/index.js";
        const { routers, folder, key } = JSON.parse(process.env.GIVEN);
        const files = ["ca.pem", "client.pem", "client.key"];
        const [ca, cert, certKey] = files.map((name) => readFileSync(`${folder}/${name}`));
        const tls = { ca, cert, key: certKey };
        const mesh = new RadixMesh({ routers, apiKey: key, tls });
        const { outputs } = await mesh.complete("The", { maxTokens: 2, temperature: 0 });
        const stranger = new RadixMesh({ routers, apiKey: "wrong-key-0123456789", tls });
        const refused = await stranger.complete("x").catch((error) => error);
        const refusedToo = await stranger.models().catch((error) => error);
        const plain = await new RadixMesh({ routers, apiKey: key }).models().catch((error) => error.constructor.name);
        console.log(outputs[0].ids.length, refused instanceof AuthenticationError, refusedToo.reason, plain);
        process.exit(0);
    """
    given = json.dumps({"routers": mesh.routers, "folder": str(certificates), "key": KEY})
    assert (await run_node(node, "--input-type=module", "-e", script, GIVEN=given, NODE_NO_WARNINGS="1")).split() == [
        "2", "true", "UNAUTHENTICATED", "UnavailableError",
    ]  # fmt: skip
