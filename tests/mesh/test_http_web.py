"""Requests of web pages and slow clients to a router process: types of bodies, names of hosts, origins, pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
import pytest_asyncio
from support.http_process import DEADLINE_S, HttpProcess, http_process

from radixmesh.daemons.router.http.bodies.body_pace import GRACE_S
from radixmesh.daemons.router.http.server.web_guard import is_loopback

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = {"authorization": "Bearer key-0123456789abcdef"}
JSON = {"content-type": "application/json"}
PAGE = "https://app.example.com"
MIN_RATE = 1000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpProcess]:
    """Open, on loopback, as `make run` starts one."""
    flags = ("--http-min-body-rate", str(MIN_RATE))
    async with http_process(tmp_path_factory.mktemp("open"), *flags) as router:
        yield router


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpProcess]:
    """With keys, a page of one origin, and names of its own, on all addresses; it has no page itself."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "keys").write_text("key-0123456789abcdef\n")
    flags = ["--api-keys-file", str(folder / "keys"), "--http-cors-origins", PAGE]
    flags += ["--http-allowed-hosts", "mesh.example.com,*.corp.example.com", "--no-http-page"]
    async with http_process(folder, *flags, host="0.0.0.0") as router:
        yield router


async def ask(
    router: HttpProcess, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
        return await client.request(method, f"http://127.0.0.1:{router.port}{path}", headers=headers, content=body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/nowhere"])
async def test_only_json_is_taken(router: HttpProcess, path: str) -> None:
    """A page may send the other types, and a body without one, to any address without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None):
        answer = await ask(router, "POST", path, {} if kind is None else {"content-type": kind}, b'{"prompt": "x"}')
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "WRONG_CONTENT_TYPE"), kind
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        answer = await ask(router, "POST", path, {"content-type": kind}, b"{")
        assert answer.status_code in (400, 404), (kind, answer.text)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
)
async def test_a_loopback_router_answers_to_no_foreign_name(router: HttpProcess, host: str) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/v1/completions"), ("OPTIONS", "/x")):
        answer = await ask(router, method, path, {"host": host, **JSON})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "UNKNOWN_HOST")


LOCAL = ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5", "router", "a.localhost", "host."]


@pytest.mark.parametrize("host", LOCAL)
async def test_it_answers_to_its_own(router: HttpProcess, host: str) -> None:
    assert (await ask(router, "GET", "/health", {"host": host})).status_code == 200


async def test_names_can_be_added(shared: HttpProcess) -> None:
    for host, status in {
        "mesh.example.com": 200,
        "mesh.example.com:8000": 200,
        "a.corp.example.com": 200,
        "router": 200,
        "corp.example.com": 421,
        "evil.example": 421,
    }.items():
        assert (await ask(shared, "GET", "/health", {"host": host})).status_code == status, host


async def test_other_listeners_answer_to_any_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with http_process(tmp_path_factory.mktemp("any"), host="0.0.0.0") as router:
        assert (await ask(router, "GET", "/health", {"host": "mesh.example.com"})).status_code == 200
    assert is_loopback("127.0.0.1") and is_loopback("127.9.9.9") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("router") and not is_loopback("10.0.0.1")


async def test_pages_may_use_nothing_unless_their_origin_is_named(router: HttpProcess, shared: HttpProcess) -> None:
    question = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = "access-control-allow-origin"
    refused = await ask(router, "OPTIONS", "/v1/completions", {"origin": PAGE, **question})
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "WRONG_METHOD")
    assert allowed not in refused.headers and "--http-cors-origins" in refused.json()["error"]["message"]
    assert allowed not in (await ask(router, "GET", "/version", {"origin": PAGE})).headers
    granted = await ask(shared, "OPTIONS", "/v1/completions", {"origin": PAGE, **question})
    assert (granted.status_code, granted.headers[allowed]) == (200, PAGE), "asked without a key"
    assert "authorization" in granted.headers["access-control-allow-headers"]
    deletes = {"origin": PAGE, "access-control-request-method": "DELETE"}
    assert (await ask(shared, "OPTIONS", "/v1/responses/resp_1", deletes)).status_code == 200
    stranger = await ask(shared, "OPTIONS", "/v1/completions", {"origin": "https://evil.example", **question})
    assert stranger.status_code == 400 and allowed not in stranger.headers
    for headers, status in ((KEY, 400), ({}, 401)):
        answer = await ask(shared, "POST", "/v1/completions", {"origin": PAGE, **JSON, **headers}, b"{")
        assert (answer.status_code, answer.headers[allowed]) == (status, PAGE), "a page reads errors too"


async def test_a_body_that_arrives_too_slowly_is_given_up(router: HttpProcess) -> None:
    """A byte now and then is not enough, whatever its announced length; --http-body-s would allow a minute."""
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    start = time.monotonic()
    async with asyncio.timeout(DEADLINE_S), router.connection() as (reader, writer):
        writer.write(head)
        reading = asyncio.ensure_future(reader.read())
        while not reading.done():
            with suppress(ConnectionError):
                writer.write(b" " * (MIN_RATE // 200))  # A twentieth of the pace.
            await asyncio.wait((reading,), timeout=0.1)
        answer = reading.result()
    assert answer.startswith(b"HTTP/1.1 408 ") and b"DEADLINE_EXCEEDED" in answer
    assert time.monotonic() - start >= GRACE_S


async def test_a_body_in_pieces_that_keeps_the_pace_is_read(router: HttpProcess) -> None:
    size = int(MIN_RATE * (2 * GRACE_S + 4))
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    async with asyncio.timeout(DEADLINE_S), router.connection() as (reader, writer):
        writer.write(head.encode())
        left = size
        while left:
            # Twice the pace: on a busy machine it is less than meant.
            writer.write(b"{" * (sent := min(left, 2 * MIN_RATE)))
            left -= sent
            await asyncio.sleep(0.8)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/chat/completions", "no such path: did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/completions", "no such path: did you mean /v1/completions?"),
        ("POST", "/v1/embedding", "no such path: did you mean /v1/embeddings?"),
        ("GET", "/" + "x" * 1000, "GET /openapi.json lists all"),
        ("GET", "/v1/completions", "this path takes POST: send that"),
    ],
)
async def test_an_unknown_path_or_method_is_told_with_the_right_one(
    router: HttpProcess, method: str, path: str, advice: str
) -> None:
    message = (await ask(router, method, path, {"content-type": "application/json"})).json()["error"]["message"]
    assert message.endswith(advice) and len(message) < 300, message


async def test_a_path_that_is_left_out_is_never_the_one_that_was_meant(shared: HttpProcess) -> None:
    for path in ("/docs", "/doc", "/mesh"):
        answer = await ask(shared, "GET", path, KEY)
        assert answer.status_code == 404
        assert "did you mean /docs" not in answer.text and "did you mean /mesh" not in answer.text
