"""Every HTTP route under the largest legal and the smallest illegal of each of its fields, beside streams of others."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import pytest
import pytest_asyncio
from hostile.http_bodies import ROUTES, HostileBody, bodies, fields_of, has_edge
from support.http import events_of, http_address, http_client
from support.invariants import known_job, observed_mesh
from support.mesh import Mesh

from radixmesh.daemons.router.http.openapi import OPERATIONS, NoBody

pytestmark = pytest.mark.asyncio(loop_scope="module")
# A quiet machine needs a twentieth of it; before bodies were counted, bodies of 1 MiB alone took 5 s, three at once 15.
SILENCE_S = 4.0
# Of all bodies at once: large ones take three quarters of it.
BODIES = 8 << 20
JSON = {"content-type": "application/json"}
# Refusals of a legal body that are not its fault: room in the model, the journal or the queue, or a task not offered.
NO_FAULT = {"UNSUPPORTED", "JOURNAL_FULL", "OVERLOADED", "context_length_exceeded", "INVALID_CHAT", "NEVER_FITS"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with observed_mesh(router={"http_bodies_bytes": BODIES, "http_body_bytes": BODIES * 3 // 4}) as mesh:
        yield mesh


async def test_every_field_of_every_route_has_an_edge() -> None:
    missing = {(path, field) for path in ROUTES for field in fields_of(path) if not has_edge(path, field)}
    kinds = {operation.body for operation in OPERATIONS.values()} - {None, NoBody}
    assert kinds == set(ROUTES.values()), "each body has a route in tests/hostile/http_bodies.py"
    assert not missing, f"say in tests/hostile/http_bodies.py what the largest legal of these fields is: {missing}"


@contextmanager
def watched(address: str) -> Iterator[list[float]]:
    """[the longest answer time of /health], in seconds; asked by a thread, whatever this process does."""
    longest, is_over = [0.0], threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        while not is_over.wait(0.01):
            begun = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            longest[0] = max(longest[0], time.monotonic() - begun)
        connection.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield longest
    finally:
        is_over.set()
        thread.join()


async def bystand(mesh: Mesh, is_over: asyncio.Event) -> int:
    """Streams with a known answer, one after the other; how many were right."""
    job = known_job()
    num = 0
    async with http_client(mesh) as client:
        while not is_over.is_set() or not num:
            body = {"prompt": job.prompt, "stream": True, **job.options}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                events = await events_of(response)
            text = "".join(event["choices"][0]["text"] for event in events if event)
            assert text == job.answers[0].text, events
            num += 1
    return num


async def attack(client: httpx.AsyncClient, body: HostileBody, at_once: int) -> None:
    """Every answer is typed: served, refused for its own reason, or told to come again."""
    sent = [client.post(body.path, content=body.data, headers=JSON) for _ in range(at_once)]
    for answer in await asyncio.gather(*sent):
        if answer.status_code == 200:
            assert not body.code, (body.name, answer.text[:200])
            continue
        whole = answer.json()
        # Ollama's errors are texts, with the details beside them.
        is_text = body.path.startswith("/api/")
        error = {**whole, "message": whole["error"], "type": "any"} if is_text else whole["error"]
        assert error["code"] != "INTERNAL" and error["message"] and error["type"], (body.name, error)
        if answer.status_code == 503:
            assert at_once > 1 and int(answer.headers["retry-after"]) >= 1, (body.name, error)
        elif body.code == "any":
            assert answer.status_code in (400, 413), (body.name, error)
        else:
            assert error["code"] == body.code if body.code else error["code"] in NO_FAULT, (body.name, error)


async def attack_all(mesh: Mesh, size: int, at_once: tuple[int, ...]) -> None:
    all_bodies = list(bodies(size))
    is_over = asyncio.Event()
    bystanders = [asyncio.ensure_future(bystand(mesh, is_over)) for _ in range(2)]
    async with http_client(mesh) as client:
        client.timeout = httpx.Timeout(120.0)
        with watched(http_address(mesh)) as longest:
            for body in all_bodies:
                for num in at_once:
                    longest[0] = 0.0
                    await attack(client, body, num)
                    assert longest[0] < SILENCE_S, f"{body.name}, {num} at once: silent for {longest[0]:.2f} s"
            is_over.set()
            assert all(await asyncio.gather(*bystanders))
    assert not mesh.bugs


async def test_fields_at_their_edges_beside_streams(mesh: Mesh) -> None:
    await attack_all(mesh, 100 << 10, (1,))


async def test_some_large_bodies_at_once(mesh: Mesh) -> None:
    """1 MiB of wrong kinds, three of each at once: before they were counted, the router was silent for 15 s."""
    is_over = asyncio.Event()
    bystander = asyncio.ensure_future(bystand(mesh, is_over))
    chosen = ("messages", "stop_token_ids", "sampling_params", "prompt")
    async with http_client(mesh) as client:
        client.timeout = httpx.Timeout(120.0)
        with watched(http_address(mesh)) as longest:
            for body in bodies(1 << 20):
                if body.name.endswith("wrong") and body.name.split()[1] in chosen:
                    await attack(client, body, 3)
            assert longest[0] < SILENCE_S, f"silent for {longest[0]:.2f} s"
        is_over.set()
        assert await bystander


async def test_bodies_together_are_bounded(mesh: Mesh) -> None:
    """Bodies that lack a byte hold what they sent: further large ones are told to come again, small ones are served."""
    host, _, port = http_address(mesh).rpartition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    held = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection(host, int(port))
        size = BODIES // 4
        writer.write(f"{head}Content-Length: {size + 1}\r\n\r\n".encode() + b" " * size)
        await writer.drain()
        held.append((reader, writer))
    large, job = b'{"prompt":"' + b"x" * (BODIES * 3 // 8) + b'"}', known_job()
    small = json.dumps({"prompt": job.prompt, **job.options}).encode()
    async with http_client(mesh) as client, asyncio.timeout(120):
        # Until what was written is read.
        while (answer := await client.post("/v1/completions", content=large, headers=JSON)).status_code != 503:
            await asyncio.sleep(0.05)
        assert answer.json()["error"]["code"] == "NOT_SERVING" and int(answer.headers["retry-after"]) >= 1
        served = await client.post("/v1/completions", content=small, headers=JSON)
        assert served.json()["choices"][0]["text"] == job.answers[0].text
        for _, writer in held:
            writer.transport.abort()
        while (await client.post("/v1/completions", content=large, headers=JSON)).status_code == 503:
            await asyncio.sleep(0.05)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_fields_at_their_edges_alone_and_eight_at_once() -> None:
    async with observed_mesh() as mesh:
        await attack_all(mesh, 15 << 20, (1, 8))
