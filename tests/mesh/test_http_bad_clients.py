"""Bad HTTP clients: each is told its mistake, costs little, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio
from support.http import events_of, http_address, http_client, iterate_events, openai_client, post, raw_connection
from support.invariants import observed_mesh, settled
from support.jobs import simulated_jobs
from support.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
STALL_S = 1.5
IDLE_S = 4.0
BODY_S = 1.0
MAX_BODY = 4 << 20
JSON = {"content-type": "application/json"}
ENDLESS = {"prompt": "The Tyger", "max_tokens": 100_000, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    router = {
        "client_stall_s": STALL_S,
        "http_idle_s": IDLE_S,
        "http_head_s": IDLE_S,
        "http_body_s": BODY_S,
        "http_body_bytes": MAX_BODY,
        "journal_bytes": 4 << 20,
    }
    # Slow steps: no request of this file runs to its context's end before its client has done what it does.
    async with observed_mesh(router=router, worker={"simulated_base_us": 10_000}) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def invariants_hold(mesh: Mesh) -> AsyncIterator[None]:
    """After each test: nothing runs, waits or is kept, and the next answer is right."""
    yield
    await settled(mesh)
    job = simulated_jobs(2, num_tokens=8)[1]
    async with http_client(mesh) as client:
        answer = await client.post("/v1/completions", json={"prompt": job.prompt, **job.options})
    assert answer.json()["choices"][0]["text"] == job.answers[0].text


async def num_running(mesh: Mesh) -> int:
    return (await mesh.scheduler_state()).load.num_running


async def until_running(mesh: Mesh, number: int) -> None:
    async with asyncio.timeout(60):
        while await num_running(mesh) != number:
            await asyncio.sleep(0.02)


COMPLETIONS, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"
USER = [{"role": "user", "content": "hello"}]
BARD = [{"role": "bard", "content": "x"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
STOP_IDS = "stop_token_ids"
REGEX = "sampling_params.regex"
ANY_JSON = {"type": "json_object"}
BIASES = {str(i): 1 for i in range(2000)}


def deep(levels: int) -> dict:  # type: ignore[type-arg]
    return {"x": deep(levels - 1)} if levels > 1 else {}


def function(parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def called(arguments: str) -> dict:  # type: ignore[type-arg]
    """A message with a tool call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


BAD: list[tuple[str, str, object, int, str, str | None]] = [
    ("no JSON", COMPLETIONS, b"{", 400, "MALFORMED_MESSAGE", None),
    ("empty", COMPLETIONS, b"", 400, "MALFORMED_MESSAGE", None),
    ("a list", COMPLETIONS, [], 400, "MALFORMED_MESSAGE", None),
    ("no UTF-8", COMPLETIONS, b'{"prompt": "\xff"}', 400, "MALFORMED_MESSAGE", None),
    ("half a surrogate pair", COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "MALFORMED_MESSAGE", None),
    ("nested too deep", COMPLETIONS, b'{"prompt":' + b"[" * 100_000, 400, "MALFORMED_MESSAGE", None),
    ("no prompt", COMPLETIONS, {}, 400, "MISSING_FIELD", "prompt"),
    ("prompt is null", COMPLETIONS, {"prompt": None}, 400, "INVALID_ARGUMENT", "prompt"),
    ("prompt is a number", COMPLETIONS, {"prompt": 5}, 400, "INVALID_ARGUMENT", "prompt"),
    ("prompt of mixed forms", COMPLETIONS, {"prompt": ["a", 5]}, 400, "INVALID_ARGUMENT", "prompt"),
    ("empty list", COMPLETIONS, {"prompt": []}, 400, "EMPTY_PROMPT", None),
    ("empty list in a list", COMPLETIONS, {"prompt": [[]]}, 400, "EMPTY_PROMPT", None),
    ("2,000 prompts", COMPLETIONS, {"prompt": ["a"] * 2000}, 400, "INVALID_ARGUMENT", "prompt"),
    ("id below 0", COMPLETIONS, {"prompt": [-1]}, 400, "TOKEN_OUT_OF_VOCABULARY", None),
    ("id beyond int32", COMPLETIONS, {"prompt": [2**31]}, 400, "INVALID_ARGUMENT", "prompt"),
    ("prompt too long", COMPLETIONS, {"prompt": [7] * 200_000}, 400, "context_length_exceeded", "prompt"),
    ("text for a number", COMPLETIONS, {"prompt": "x", "n": "2"}, 400, "INVALID_ARGUMENT", "n"),
    ("true for a number", COMPLETIONS, {"prompt": "x", "n": True}, 400, "INVALID_ARGUMENT", "n"),
    ("n of 0", COMPLETIONS, {"prompt": "x", "n": 0}, 400, "INVALID_ARGUMENT", "n"),
    ("n of 1000", COMPLETIONS, {"prompt": "x", "n": 1000}, 400, "INVALID_ARGUMENT", "n"),
    ("n below 0", COMPLETIONS, {"prompt": "x", "n": -1}, 400, "INVALID_ARGUMENT", "n"),
    ("max_tokens of 0", COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "INVALID_ARGUMENT", "max_tokens"),
    ("temperature", COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "INVALID_ARGUMENT", "temperature"),
    ("NaN", COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400, "MALFORMED_MESSAGE", None),
    ("top_k", COMPLETIONS, {"prompt": "x", "top_k": -2}, 400, "INVALID_ARGUMENT", "top_k"),
    ("seed too large", COMPLETIONS, {"prompt": "x", "seed": 2**64}, 400, "INVALID_ARGUMENT", "seed"),
    ("empty stop", COMPLETIONS, {"prompt": "x", "stop": [""]}, 400, "INVALID_ARGUMENT", "stop"),
    ("65 stops", COMPLETIONS, {"prompt": "x", "stop": ["a"] * 65}, 400, "TOO_MANY_STOPS", None),
    ("bias of words", COMPLETIONS, {"prompt": "x", "logit_bias": {"the": 1}}, 400, "INVALID_ARGUMENT", "logit_bias"),
    ("bias outside", COMPLETIONS, {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "TOKEN_OUT_OF_VOCABULARY", None),
    ("suffix", COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "UNSUPPORTED", "suffix"),
    ("best_of", COMPLETIONS, {"prompt": "x", "best_of": 3}, 400, "UNSUPPORTED", "best_of"),
    ("id of two lines", COMPLETIONS, {"prompt": "x", "request_id": "a\nb"}, 400, "INVALID_ARGUMENT", "request_id"),
    ("unknown model", COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "model_not_found", None),
    ("deadline over", COMPLETIONS, {"prompt": "x", "deadline_ms": 0}, 408, "DEADLINE_EXCEEDED", None),
    ("unknown model, stream", COMPLETIONS, {"prompt": "x", "model": "o", "stream": True}, 404, "model_not_found", None),
    ("no messages", CHAT, {}, 400, "MISSING_FIELD", "messages"),
    ("empty chat", CHAT, {"messages": []}, 400, "INVALID_CHAT", "messages"),
    ("no role", CHAT, {"messages": [{"content": "x"}]}, 400, "MISSING_FIELD", "messages.0.role"),
    ("unknown role", CHAT, {"messages": BARD}, 400, "INVALID_CHAT", None),
    ("unknown role, streamed", CHAT, {"messages": BARD, "stream": True}, 400, "INVALID_CHAT", None),
    ("an image", CHAT, {"messages": IMAGE}, 400, "UNSUPPORTED", "messages.0.content"),
    ("alternatives of nothing", CHAT, {"messages": USER, "top_logprobs": 2}, 400, "INVALID_ARGUMENT", "top_logprobs"),
    ("two", CHAT, {"messages": USER, "response_format": ANY_JSON, "regex": "a"}, 400, "INVALID_ARGUMENT", "regex"),
    ("a misspelt field", COMPLETIONS, {"prompt": "x", "temprature": 0}, 400, "UNSUPPORTED", "temprature"),
    ("a key of 200 KB", COMPLETIONS, {"prompt": "x", "y" * 200_000: 1}, 400, "UNSUPPORTED", None),
    ("65 levels", CHAT, {"messages": USER, "tools": [deep(65)]}, 400, "MALFORMED_MESSAGE", None),
    ("300 fields", COMPLETIONS, {"prompt": "x", **{f"f{i}": 1 for i in range(300)}}, 413, "TOO_LARGE", None),
    ("5,000 messages", CHAT, {"messages": USER * 5000}, 413, "TOO_LARGE", "messages"),
    ("100,000 values", CHAT, {"messages": USER, "tools": [function({"x": [1] * 100_000})]}, 413, "TOO_LARGE", None),
    ("300 stop ids", COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 300}, 400, "TOO_MANY_STOPS", STOP_IDS),
    ("2,000 biases", COMPLETIONS, {"prompt": "x", "logit_bias": BIASES}, 400, "INVALID_ARGUMENT", "logit_bias"),
    ("a stop id outside", COMPLETIONS, {"prompt": "x", STOP_IDS: [99999]}, 400, "TOKEN_OUT_OF_VOCABULARY", STOP_IDS),
    ("a number of 5,000 digits", COMPLETIONS, b'{"prompt":"x","n":' + b"9" * 5000 + b"}", 400, "INVALID_ARGUMENT", "n"),
    ("a number beyond floats", COMPLETIONS, b'{"prompt":"x","top_p":1e999}', 400, "INVALID_ARGUMENT", "top_p"),
    ("Infinity", COMPLETIONS, b'{"prompt":"x","top_p":Infinity}', 400, "MALFORMED_MESSAGE", None),
    ("a broken key", COMPLETIONS, b'{"prompt":"x","\xff":1}', 400, "MALFORMED_MESSAGE", None),
    ("a low surrogate", CHAT, b'{"messages":[{"role":"user","content":"\\udc00"}]}', 400, "MALFORMED_MESSAGE", None),
    ("arguments of 100,000", CHAT, {"messages": [called("[" + "1," * 100_000 + "1]")]}, 413, "TOO_LARGE", None),
    ("4,097 texts", "/tokenize", {"prompt": ["a"] * 4097}, 413, "TOO_LARGE", "prompt"),
    ("2 million ids", "/detokenize", {"tokens": [[7] * 1_000] * 2_000}, 413, "TOO_LARGE", None),
    ("top_k in full", COMPLETIONS, {"prompt": "x", "top_k": 2**31}, 400, "INVALID_ARGUMENT", "top_k"),
    ("an inner name", NATIVE, {"text": "x", "sampling_params": {"n": 0}}, 400, "INVALID_ARGUMENT", "sampling_params.n"),
    ("neither text nor ids", NATIVE, {}, 400, "MISSING_FIELD", "text"),
    ("text and ids", NATIVE, {"text": "x", "input_ids": [1]}, 400, "MISSING_FIELD", "text"),
    ("2 params", NATIVE, {"text": "x", "sampling_params": [{}, {}]}, 400, "INVALID_ARGUMENT", "sampling_params"),
    ("a regex", NATIVE, {"text": "x", "sampling_params": {"regex": "a"}}, 400, "UNSUPPORTED", REGEX),
    ("nothing to encode", "/tokenize", {}, 400, "MISSING_FIELD", "prompt"),
    ("ids outside", "/detokenize", {"tokens": [99999]}, 400, "TOKEN_OUT_OF_VOCABULARY", None),
    ("dimensions", "/v1/embeddings", {"input": "x", "dimensions": "2"}, 400, "INVALID_ARGUMENT", "dimensions"),
    ("a task not offered", "/v1/embeddings", {"input": "x"}, 400, "UNSUPPORTED", "model"),
    ("unknown path", "/v1/edits", {}, 404, "UNKNOWN_PATH", None),
    ("wrong method", "/v1/models", {}, 405, "WRONG_METHOD", None),
]  # fmt: skip


async def test_every_bad_request_gets_its_own_reason(http: httpx.AsyncClient) -> None:
    for name, path, body, status, code, param in BAD:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await http.post(path, content=content, headers=JSON)
        assert answer.status_code == status, (name, answer.text)
        error = answer.json()["error"]
        assert error["code"] == code, (name, error)
        assert error["message"] and error["type"], name
        assert param is None or error["param"] == param, (name, error)


async def test_the_sdk_raises_what_the_router_says(mesh: Mesh) -> None:
    async with openai_client(mesh) as sdk:
        with pytest.raises(openai.NotFoundError) as unknown:
            await sdk.chat.completions.create(model="other", messages=USER)  # type: ignore[arg-type]
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await sdk.completions.create(model="tiny-llama", prompt="x", temperature=-1)
        assert (wrong.value.code, wrong.value.param) == ("INVALID_ARGUMENT", "temperature")
        with pytest.raises(openai.APIError) as late:
            options = {**ENDLESS, "model": "tiny-llama"}
            options["extra_body"] = {"ignore_eos": options.pop("ignore_eos"), "deadline_ms": 700}
            async for _ in await sdk.completions.create(stream=True, **options):
                pass
        assert late.value.code == "DEADLINE_EXCEEDED"


async def test_an_error_in_mid_stream_is_an_event_and_no_done_follows(mesh: Mesh, http: httpx.AsyncClient) -> None:
    body = {**ENDLESS, "stream": True, "request_id": "to-abort", "n": 2}
    async with http.stream("POST", COMPLETIONS, json=body) as response:
        events = []
        async for event in iterate_events(response):
            events.append(event)
            if len(events) == 3:
                assert await mesh.client.abort("to-abort") == "found"
    assert events[-1]["error"]["code"] == "ABORTED" and events[-1]["error"]["type"] == "request_cancelled"
    assert all("error" not in event for event in events[:-1])


async def test_a_full_journal_says_when_to_come_again(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", COMPLETIONS, json={**ENDLESS, "n": 128, "stream": True}) as first:
        await anext(first.aiter_lines())
        bodies = [{**ENDLESS, "n": 128, "deadline_ms": 3000}] * 8
        answers = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))
        full = [answer for answer in answers if answer.status_code == 429]
        assert full and {answer.status_code for answer in answers} <= {429, 408}
        assert full[0].json()["error"]["code"] == "JOURNAL_FULL" and int(full[0].headers["retry-after"]) >= 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_who_leaves_ends_the_request(mesh: Mesh, is_stream: bool) -> None:
    async with raw_connection(mesh) as (reader, writer):
        writer.write(post(COMPLETIONS, {**ENDLESS, "stream": is_stream, "prompt": ["a", "b"]}))
        await until_running(mesh, 2)
        if is_stream:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await until_running(mesh, 0)


async def test_half_a_connection_counts_as_none(mesh: Mesh) -> None:
    async with raw_connection(mesh) as (reader, writer):
        writer.write(post(COMPLETIONS, {**ENDLESS, "stream": True}))
        await until_running(mesh, 1)
        writer.write_eof()
        await until_running(mesh, 0)
        async with asyncio.timeout(60):
            assert b"[DONE]" not in await reader.read()


async def test_who_reads_nothing_is_bounded_and_dropped(mesh: Mesh) -> None:
    """The journal keeps what is pending, the connection some KB: then the request ends and the socket is cut."""
    async with raw_connection(mesh) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        # Events of all output so far: the socket's buffers are full within a second or two.
        params = {"max_new_tokens": 100_000, "ignore_eos": True}
        body = {"text": ["The Tyger"] * 8, "stream": True, "return_logprob": True, "top_logprobs_num": 5}
        writer.write(post(NATIVE, {**body, "sampling_params": params, "rid": "stalled"}))
        await until_running(mesh, 8)
        async with asyncio.timeout(STALL_S + 60):
            while await num_running(mesh):
                await asyncio.sleep(0.1)
        said = [json.loads(line) for line in mesh.cluster.recent_lines("router") if "client_stalled" in line]
        assert [line for line in said if line.get("request_id", "").startswith("stalled-")]
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(STALL_S + 60):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                while True:
                    await reader.readexactly(1 << 16)


@pytest.mark.parametrize("num_prompts", [1, 8])
async def test_who_reads_slowly_and_steadily_is_served(mesh: Mesh, num_prompts: int) -> None:
    """The longest time without a byte read is far below the stall; the connection is never writable for longer."""
    async with raw_connection(mesh) as (reader, writer):
        # Little room in both kernels: what the client has not read holds up the router's writes.
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        params = {"max_new_tokens": 2000, "ignore_eos": True}
        body = {"text": ["The Tyger"] * num_prompts, "stream": True, "return_logprob": True, "top_logprobs_num": 20}
        writer.write(post(NATIVE, {**body, "sampling_params": params, "rid": f"steady-{num_prompts}"}))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        slow_until = time.monotonic() + 4 * STALL_S
        while time.monotonic() < slow_until:
            assert await reader.read(1 << 16), "cut off"
            await asyncio.sleep(STALL_S / 10)
        assert not [line for line in mesh.cluster.recent_lines("router") if f"steady-{num_prompts}" in line]


async def test_a_body_too_large_is_refused_unread(mesh: Mesh) -> None:
    size = 100 << 20
    headers = f"Host: mesh\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\n{headers}".encode()
    async with raw_connection(mesh) as (reader, writer):
        writer.write(head)
        status = await reader.readline()
        assert status.startswith(b"HTTP/1.1 413"), "before a byte of the body has come"
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < size:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        assert sent < size / 2
    async with http_client(mesh) as client:
        answer = await client.post(COMPLETIONS, content=b" " * (MAX_BODY + 1), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")
        assert answer.headers["connection"] == "close"


async def test_a_body_of_unknown_length_is_counted(http: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY // 65536 + 1):
            yield b" " * 65536

    answer = await http.post(COMPLETIONS, content=parts(), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "TOO_LARGE")


async def test_a_body_that_does_not_come_is_given_up(mesh: Mesh) -> None:
    async with raw_connection(mesh) as (reader, writer):
        writer.write(post(COMPLETIONS, {"prompt": "x"})[:-3])
        async with asyncio.timeout(BODY_S + 60):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408") and b"DEADLINE_EXCEEDED" in answer


async def test_a_thousand_connections_that_send_nothing(mesh: Mesh, http: httpx.AsyncClient) -> None:
    host, _, port = http_address(mesh).rpartition(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(1000)]
    try:
        idle[0][1].write(b"POST /v1/completions HTT")  # Half a head is no request either.
        start = time.monotonic()
        job = simulated_jobs(2, num_tokens=16)[1]
        answer = await http.post(COMPLETIONS, json={"prompt": job.prompt, **job.options})
        assert answer.json()["choices"][0]["text"] == job.answers[0].text
        assert time.monotonic() - start < 30.0
        async with asyncio.timeout(IDLE_S + 60):
            ends = await asyncio.gather(*(reader.read() for reader, _ in idle))
        assert b"HEAD_TOO_SLOW" in ends[0] and not any(ends[1:])
    finally:
        for _, writer in idle:
            writer.transport.abort()


async def test_what_is_no_http_is_refused(mesh: Mesh) -> None:
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100):
        async with raw_connection(mesh) as (reader, writer):
            writer.write(junk)
            async with asyncio.timeout(60):
                assert (await reader.read()).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))


async def test_requests_in_a_row_on_one_connection(mesh: Mesh) -> None:
    """Pipelined: answered in order, each whole."""
    async with raw_connection(mesh) as (reader, writer):
        writer.write(post("/tokenize", {"prompt": "a"}) + post("/tokenize", {"prompt": ["a", "b"]}))
        sizes = []
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            sizes.append(json.loads(await reader.readexactly(length))["count"])
    assert sizes[1] > sizes[0] >= 1


async def test_streams_of_the_simulated_worker_are_whole(mesh: Mesh, http: httpx.AsyncClient) -> None:
    async def check(job) -> None:  # type: ignore[no-untyped-def]
        body = {"prompt": job.prompt, "stream": True, **job.options}
        texts = [""] * len(job.answers)
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            for event in await events_of(response):
                if event:
                    texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == [answer.text for answer in job.answers]

    await asyncio.gather(*map(check, simulated_jobs(24, num_tokens=60)))
