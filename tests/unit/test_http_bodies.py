"""Bodies counted in their bytes, decoded field by field, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.http.answers.request_group import RequestGroup
from radixmesh.daemons.router.http.bodies import json_shape
from radixmesh.daemons.router.http.bodies.body import Body, parse, parse_whole
from radixmesh.daemons.router.http.bodies.body_budget import BodyBudget
from radixmesh.daemons.router.http.bodies.json_shape import bound_of_values, shape_of
from radixmesh.daemons.router.http.bodies.parser_pool import ParserPool
from radixmesh.daemons.router.http.errors import error_body
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.embedding_request import EmbeddingRequest
from radixmesh.daemons.router.http.request_types.native_request import NativeRequest
from radixmesh.daemons.router.http.request_types.prompts import MAX_TEXT_BYTES, ids_of
from radixmesh.daemons.router.http.request_types.text_requests import DetokenizeRequest, TokenizeRequest
from radixmesh.daemons.router.http.translated.anthropic_request import MessagesRequest
from radixmesh.daemons.router.requests.updates import Update
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2

USER = {"role": "user", "content": "hello"}
MINIMAL: dict[type[Body], dict[str, object]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [USER]},
    NativeRequest: {"text": "x"},
    EmbeddingRequest: {"input": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a",[]{}\\:é', max_size=6),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text('k",\\', max_size=3), values, max_size=4),
    max_leaves=20,
)


def refused(kind: type[Body], body: object, contexts: dict[str, int] | None = None) -> MeshError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(MeshError) as raised:
        parse_whole(data, kind, contexts or {})
    return raised.value


def counted(text: str) -> tuple[int, int, int]:
    """The definition of Shape, a character at a time."""
    depth, deepest, num_entries, num_values = 0, 0, 1, 1
    in_string = is_escaped = False
    for char in text:
        if in_string:
            in_string, is_escaped = char != '"' or is_escaped, char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth, num_values = depth + 1, num_values + 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
        elif char == ",":
            num_values += 1
            num_entries += depth == 1
    return deepest, num_entries, num_values


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Strings and runs of backslashes that cross from block to block are common."""
    monkeypatch.setattr(json_shape, "BLOCK_BYTES", 5)
    yield


@pytest.mark.usefixtures("small_blocks")
def test_structure_is_counted_exactly_outside_of_strings() -> None:
    @given(JSON)
    def check(value: object) -> None:
        text = json.dumps(value)
        assert tuple(shape_of(text.encode())) == counted(text)
        assert bound_of_values(text.encode()) >= counted(text)[2]

    check()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), st.sampled_from([None, 1]))
def test_ids_decode_a_slice_at_a_time_to_the_same(ids: list[int], indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixmesh.daemons.router.http.request_types.prompts._SLICE_BYTES", 64)
        assert ids_of(json.dumps(ids, indent=indent).encode(), "prompt").tolist() == ids


def test_a_prompt_that_no_context_holds_is_counted_and_never_decoded() -> None:
    error = refused(CompletionRequest, {"prompt": [7] * 512}, {"m": 512})
    assert error.metadata == {"prompt_tokens": "512", "max_total_len": "512"}
    told = error_body(error, "/v1/completions")["error"]
    assert isinstance(told, dict)
    # Code and words by which litellm and LangChain know that a conversation has to be cut.
    assert (told["code"], told["param"], told["type"]) == ("context_length_exceeded", "prompt", "invalid_request_error")
    assert "maximum context length is 512 tokens" in told["message"]
    assert parse_whole(json.dumps({"prompt": [7] * 511}).encode(), CompletionRequest, {"m": 512}).messages


CONSTRAINTS = {
    "grammar": "g", "stop_regex": "a",
    "chat_template": "t", "lora_path": "l", "use_beam_search": True,
    "bad_words": ["a"], "allowed_token_ids": [1], "logits_processors": ["p"],
    "no_such_field": 1, "temprature": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", MINIMAL)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_what_would_change_the_answer_is_refused_by_its_name(kind: type[Body], name: str) -> None:
    value = CONSTRAINTS[name] or {"type": "object"}
    error = refused(kind, {**MINIMAL[kind], name: value if name != "temprature" else 0})
    assert (error.reason_name, error.metadata["field"]) == ("UNSUPPORTED", name)
    assert name in error.message


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_among_sampling_params_are_refused_too(name: str) -> None:
    error = refused(NativeRequest, {"text": "x", "sampling_params": {name: CONSTRAINTS[name] or [1]}})
    assert (error.reason_name, error.metadata["field"]) == ("UNSUPPORTED", f"sampling_params.{name}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}, "any"])
def test_a_call_that_has_to_be_made_needs_its_tool(choice: object) -> None:
    for tools in ({}, {"tools": [{"type": "function", "function": {"name": "another"}}]}):
        error = refused(ChatRequest, {"messages": [USER], "tool_choice": choice, **tools})
        assert (error.reason_name, error.metadata["field"]) == ("INVALID_ARGUMENT", "tool_choice")
        if not isinstance(choice, dict):
            break


def test_what_asks_for_nothing_is_no_constraint() -> None:
    nothing = {
        "response_format": {"type": "text"}, "guided_json": None, "regex": None, "use_beam_search": False, "best_of": 1,
        "logits_processors": [], "parallel_tool_calls": True, "lora_path": None, "metadata": {}, "user": "u",
        "new": None,
    }  # fmt: skip
    body = parse(json.dumps({"prompt": "x", **nothing}).encode(), CompletionRequest)
    assert body.ignored_headers() == {"x-radixmesh-ignored-fields": "metadata, user, new"}
    assert not parse(json.dumps({"messages": [USER], "parallel_tool_calls": False}).encode(), ChatRequest).ignored


@pytest.mark.parametrize("name", ["a" * 30_000, "名", "é", "x\r\nx-other: 1", "a b"])
def test_the_header_of_ignored_fields_is_a_header_whatever_their_names(name: str) -> None:
    bodies: list[tuple[type[Body], dict[str, object]]] = [
        (CompletionRequest, {"prompt": "x", name: None, "user": "u"}),
        (ChatRequest, {"messages": [{**USER, name: 1}], "user": "u"}),
        (MessagesRequest, {"messages": [{**USER, name: None}], "max_tokens": 1, "metadata": {}}),
    ]
    for kind, body in bodies:
        (value,) = parse(json.dumps(body).encode(), kind).ignored_headers().values()
        assert value in ("user", "metadata"), value


def test_tool_choice_none_shows_no_tools_and_arguments_are_objects() -> None:
    def chat(**more: object) -> router_pb2.GenerateRequest:
        return parse(json.dumps({"messages": [USER], **more}).encode(), ChatRequest).to_generate()

    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(chat(tools=tools).chat.tools_json) == tools
    assert not chat(tools=tools, tool_choice="none").chat.tools_json
    effort = chat(reasoning_effort="low", chat_template_kwargs={"a": 1}).chat.template_args_json
    assert json.loads(effort) == {"reasoning_effort": "low", "a": 1}

    def arguments(sent: object) -> object:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": sent}}
        request = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
        return json.loads(request.chat.messages[1].extra_json)["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"city": "Z\\u00fcrich", "n": [1]}') == {"city": "Zürich", "n": [1]}
    assert arguments({"n": 1}) == {"n": 1}
    assert arguments("") == {}
    # Arguments that a model wrote need not be JSON: they are the conversation all the same.
    assert arguments('{"n": ') == '{"n": '


def test_a_text_that_no_tokenizer_takes_goes_no_further() -> None:
    """Beyond the parser's process its bytes hold the event loop."""
    for body in ({"prompt": "x" * (MAX_TEXT_BYTES + 1)}, {"prompt": ["a", "x" * (MAX_TEXT_BYTES + 1)]}):
        error = refused(CompletionRequest, body)
        assert (error.reason_name, error.metadata["max"]) == ("TOO_LARGE", str(MAX_TEXT_BYTES))
        assert error.metadata["field"] == "prompt"
    assert parse_whole(json.dumps({"prompt": "x" * MAX_TEXT_BYTES}).encode(), CompletionRequest, {}).messages


def test_errors_name_what_the_client_sent() -> None:
    sampling = {"max_new_tokens": 0}
    error = refused(NativeRequest, {"text": "x", "sampling_params": sampling})
    assert error.metadata["field"] == "sampling_params.max_new_tokens" and "max_new_tokens is 0" in error.message
    error = refused(CompletionRequest, {"prompt": "x", "logprobs": 65})
    assert (error.metadata["field"], "num_top" in error.message) == ("logprobs", False)
    error = refused(ChatRequest, {"messages": [USER], "logprobs": True, "top_logprobs": 65})
    assert error.metadata["field"] == "top_logprobs"
    # Bounds in full: 2.14748e+09 is nothing to send back.
    assert "4294967295" in error_text(CompletionRequest, {"prompt": "x", "max_tokens": 2**32 - 1})
    assert "2147483647" in error_text(CompletionRequest, {"prompt": "x", "max_tokens": 2**32 - 1})


def error_text(kind: type[Body], body: object) -> str:
    return refused(kind, body).message


def test_of_two_fields_with_one_name_the_last_counts() -> None:
    assert parse(b'{"prompt":"a","n":1,"n":2}', CompletionRequest).n == 2


def test_what_prompts_share_is_bounded_by_their_number() -> None:
    stops = ["s" * 1000 + str(i) for i in range(60)]
    assert refused(CompletionRequest, {"prompt": ["a"] * 1000, "stop": stops}).reason_name == "TOO_LARGE"


def test_large_bodies_leave_room_for_small_ones() -> None:
    budget = BodyBudget(1 << 20)
    with budget.share() as large, budget.share() as other, budget.share() as small:
        assert large.take(760_000) and not other.take(40_000)
        assert small.take(30_000) and not small.take(30_000)
        assert budget.num_bytes == 790_000
    assert budget.num_bytes == 0


class Pool:
    """A ParserPool for large bodies of any kind."""

    def __init__(self, **settings: float) -> None:
        self.pool = ParserPool(max_body_bytes=1 << 20, **settings)  # type: ignore[arg-type]

    async def parse(self, data: bytes, kind: type[Body]) -> list[object]:
        parts = [data[:100], data[100:]]
        make = kind.message_type().FromString
        fields, messages = await self.pool.parse(parts, len(data), kind.__name__, {"m": 1 << 20}, make)  # type: ignore[arg-type]
        assert not parts and fields["ignored"] == []
        return list(messages)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.pool.idle]


@pytest.mark.parametrize("kind", MINIMAL)
async def test_a_process_makes_the_same_messages(kind: type[Body]) -> None:
    large = {CompletionRequest: "prompt", EmbeddingRequest: "input", TokenizeRequest: "prompt", NativeRequest: "text"}
    body = {**MINIMAL[kind], **({large[kind]: ["é" * 300, "b"] * 400} if kind in large else {})}
    data = json.dumps(body).encode()
    pool = Pool()
    assert await pool.parse(data, kind) == parse_whole(data, kind, {}).messages
    with pytest.raises(MeshError) as raised:
        await pool.parse(b'{"prompt": [' + b" " * 100_000, kind)
    assert raised.value.reason_name == "MALFORMED_MESSAGE"
    assert len(pool.pids) == 1, "the same process did both"
    pool.pool.close()


async def test_a_parser_that_dies_or_hangs_is_replaced() -> None:
    pool = Pool(timeout_s=60.0)
    data = json.dumps({"prompt": "x"}).encode()
    (whole,) = await pool.parse(data, CompletionRequest)
    (waiting,) = pool.pool.idle
    os.kill(pool.pids[0], signal.SIGKILL)
    while waiting.is_alive:
        await asyncio.sleep(0.01)
    assert await pool.parse(data, CompletionRequest) == [whole], "killed while it waited: no body is lost"
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    parsing = asyncio.create_task(pool.parse(data, CompletionRequest))
    while pool.pool.idle:
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(MeshError) as dead:
        await parsing
    assert dead.value.reason_name == "NOT_SERVING"
    assert await pool.parse(data, CompletionRequest) == [whole]
    pool.pool.timeout_s = 0.5
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(MeshError) as hung:
        await pool.parse(data, CompletionRequest)
    assert hung.value.reason_name == "NOT_SERVING" and "0.5 s" in hung.value.message
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}"), "killed, and its end fetched"
    pool.pool.timeout_s = 60.0
    assert await pool.parse(data, CompletionRequest) == [whole]
    pool.pool.close()


async def test_a_parser_without_work_ends() -> None:
    pool = Pool(idle_s=0.1)
    await pool.parse(json.dumps({"prompt": "x"}).encode(), CompletionRequest)
    (pid,) = pool.pids
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not pool.pids and not os.path.exists(f"/proc/{pid}")


async def test_a_group_starts_a_few_of_its_requests_at_once() -> None:
    """A thousand prompts from each of eight clients, all at the tokenizers at once, took the router down."""
    starting, most = 0, 0

    class Stream:
        """Resolves in its first take(), has one message, and ends in its second."""

        on_broken = None
        delivery = SimpleNamespace(stop_writing=lambda: None, start_writing=lambda: None)
        num_taken = 0

        async def take(self) -> Update | None:
            nonlocal starting, most
            self.num_taken += 1
            if self.num_taken > 1:
                return None
            starting += 1
            most = max(most, starting)
            await asyncio.sleep(0)
            starting -= 1
            return Update()

        def close(self) -> None:
            pass

    router = SimpleNamespace(open=lambda request, **_: Stream())
    requests = [router_pb2.GenerateRequest() for _ in range(200)]
    group = RequestGroup(router, requests, lambda: None)  # type: ignore[arg-type]
    indexes = []
    while (item := await group.next()) is not None:
        indexes.append(item[0])
    group.close()
    assert sorted(indexes) == list(range(200)) and most == 16
