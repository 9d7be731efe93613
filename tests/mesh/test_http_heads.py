"""Heads of HTTP requests without end, bound or haste, sent to a router process: refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
from support.http_process import DEADLINE_S, HEALTH, HttpProcess, http_process

from radixmesh.daemons.router.http.server.connection import MAX_PIPELINED
from radixmesh.daemons.router.http.server.head_limits import MAX_HEAD_BYTES, MAX_HEADERS, MAX_REQUEST_LINE_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")
HEAD_S = 1.5
START = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpProcess]:
    flags = ("--http-head-s", str(HEAD_S), "--http-idle-s", "30", "--http-connections", "64")
    # With keys: what comes before a key must be bounded without one.
    folder = tmp_path_factory.mktemp("router")
    (folder / "keys").write_text("key-0123456789abcdef\n")
    async with http_process(folder, *flags, "--api-keys-file", str(folder / "keys")) as router:
        yield router


@pytest.mark.parametrize(
    ("request_head", "code"),
    [
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES, b"HEAD_TOO_LARGE"),
        (START + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", b"HEAD_TOO_LARGE"),
        (START + b"X: " + b"a" * (2 << 20), b"HEAD_TOO_LARGE"),
        (START + b"a" * (2 << 20), b"HEAD_TOO_LARGE"),
        (START + b"X: a\r\n" * MAX_HEADERS + b"\r\n", b"HEAD_TOO_LARGE"),
        (b"GET /" + b"a" * MAX_REQUEST_LINE_BYTES + b" HTTP/1.1\r\n\r\n", b"HEAD_TOO_LARGE"),
        (b"GET /" + b"a" * (2 << 20), b"HEAD_TOO_LARGE"),
        (b"\r\n" * (MAX_HEAD_BYTES // 2 + 8192), b"HEAD_TOO_LARGE"),
    ],
    ids=["unfinished", "finished", "endless value", "endless name", "headers", "line", "endless line", "empty lines"],
)
async def test_a_head_beyond_the_bounds_is_refused(router: HttpProcess, request_head: bytes, code: bytes) -> None:
    answer = await router.answer(request_head)
    assert answer.startswith(b"HTTP/1.1 431 ") and code in answer and b"connection: close" in answer


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["first", "second"])
@pytest.mark.parametrize(
    "start",
    [b"GET http://localhost:port:port/", b"GET http://localhost", b"GET /\xff", b"CONNECT localhost:80"],
    ids=["no URL", "no path", "no text", "connect"],
)
async def test_a_target_that_is_no_path_is_refused(router: HttpProcess, start: bytes, first: bytes) -> None:
    """As a request that cannot be read, whatever came before it on its connection."""
    async with asyncio.timeout(DEADLINE_S), router.connection() as (reader, writer):
        if first:
            writer.write(first)
            await reader.readuntil(b"\r\n\r\n")
        writer.write(start + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
    assert b"HTTP/1.1 400 " in answer and b"MALFORMED_MESSAGE" in answer and b"connection: close" in answer
    assert await router.health_s() < DEADLINE_S


async def test_the_largest_legal_head_is_served(router: HttpProcess) -> None:
    line = b"GET /health?" + b"a" * (MAX_REQUEST_LINE_BYTES - 100) + b" HTTP/1.1\r\nConnection: close\r\n"
    rest = MAX_HEAD_BYTES - len(line) - (MAX_HEADERS - 1) * 8
    head = line + b"X: a\r\n" * (MAX_HEADERS - 2) + b"Y: " + b"a" * (rest - 200) + b"\r\n\r\n"
    assert (await router.answer(head)).startswith(b"HTTP/1.1 200 ")


async def test_endless_heads_hold_up_nobody(router: HttpProcess) -> None:
    """Unbounded, 70 MiB of one header made the event loop silent for 7 s, and the router's supervisor killed it."""
    before = router.memory_bytes()

    async def attack() -> int:
        sent = 0
        async with router.connection() as (_, writer):
            writer.write(START + b"X: ")
            with suppress(ConnectionError):
                for _ in range(512):
                    writer.write(b"a" * 65536)
                    await writer.drain()
                    sent += 65536
        return sent

    attacks = asyncio.gather(*(attack() for _ in range(16)))
    slowest = 0.0
    while not attacks.done():
        slowest = max(slowest, await router.health_s())
    assert max(await attacks) < 16 << 20, "the router goes on reading"
    assert slowest < 2.0
    assert router.memory_bytes() - before < 64 << 20


async def test_a_head_in_the_smallest_pieces_costs_no_more_than_its_bytes(router: HttpProcess) -> None:
    async with router.connection() as (reader, writer):
        writer.write(START + b"X: ")
        start = time.monotonic()
        for _ in range(1000):
            writer.write(b"a")
            await writer.drain()
        writer.write(b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200"), time.monotonic() - start


@pytest.mark.parametrize("start", [b"GET /", START, b"\r\n", HEALTH + START], ids=["byte", "half", "noise", "second"])
async def test_a_head_has_to_end_in_time(router: HttpProcess, start: bytes) -> None:
    """Bytes that come now and then do not put it off (slowloris)."""
    async with asyncio.timeout(DEADLINE_S), router.connection() as (reader, writer):
        writer.write(start)
        reading = asyncio.ensure_future(reader.read())
        while not reading.done():
            with suppress(ConnectionError):
                writer.write(b"\r\n" if start == b"\r\n" else b"X")
            await asyncio.wait((reading,), timeout=HEAD_S / 5)
        answer = reading.result()
    assert answer.count(b"HTTP/1.1 200") == start.count(HEALTH)
    assert answer.count(b"HTTP/1.1 408") == 1 and b"HEAD_TOO_SLOW" in answer


async def test_trailers_and_chunk_extensions_are_bounded_too(router: HttpProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for junk in (b"1;" + b"a" * (2 << 20), b"0\r\n" + b"X: a\r\n" * 200_000, b"0\r\nX: " + b"a" * (2 << 20)):
        async with asyncio.timeout(DEADLINE_S), router.connection() as (reader, writer):
            writer.write(head)
            with suppress(ConnectionError):
                for offset in range(0, len(junk), 1 << 16):
                    writer.write(junk[offset : offset + (1 << 16)])
                    await writer.drain()
            with suppress(ConnectionError):
                await reader.read()  # Ends, whatever is said before.


async def test_a_trailer_is_no_header(router: HttpProcess) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    trailer = b"Authorization: Bearer key-0123456789abcdef\r\n\r\n"
    assert (await router.answer(head + b"1\r\n{\r\n0\r\n" + trailer)).startswith(b"HTTP/1.1 401")


async def test_requests_that_do_not_wait_for_answers_are_bounded(router: HttpProcess) -> None:
    async with asyncio.timeout(DEADLINE_S), router.connection() as (reader, writer):
        writer.write(HEALTH * 5000)
        answers = await reader.read()
    assert 1 <= answers.count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1
    assert answers.count(b"HTTP/1.1") == answers.count(b"HTTP/1.1 200")


async def test_an_answered_request_whose_body_never_ends_is_cut(router: HttpProcess) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    async with asyncio.timeout(DEADLINE_S), router.connection() as (reader, writer):
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        with suppress(ConnectionError):
            await reader.read()


async def test_connections_without_a_request_give_way(router: HttpProcess) -> None:
    """More than --http-connections of them keep nobody out."""
    idle = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(200)]
    try:
        assert await router.health_s() < DEADLINE_S
        async with asyncio.timeout(DEADLINE_S):
            first = await asyncio.gather(*(reader.read() for reader, _ in idle[:100]), return_exceptions=True)
        assert len(first) == 100
        idle[-1][1].write(HEALTH)
        assert (await idle[-1][0].readline()).startswith(b"HTTP/1.1 200"), "the youngest stay"
    finally:
        for _, writer in idle:
            writer.transport.abort()
