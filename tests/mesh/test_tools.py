"""Tool calls and reasoning through every daemon: guided calls are valid whatever the model, killed and resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.http import http_client, iterate_events, openai_client
from support.mesh import Mesh, running_mesh
from support.tool_folder import tool_folder

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME = "tiny-llama"
USER = [{"role": "user", "content": "Turn, please"}]


def tool(name: str, properties: dict[str, Any], **more: object) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


TOOLS = [
    tool("turn", {"side": {"enum": ["left", "right"]}, "steps": {"enum": [1, 2, 3]}}),
    tool("halt", {"now": {"type": "boolean"}}),
]
LONG = [tool("recite", {"text": {"type": "string", "pattern": "^[a-f]{60}$"}})]
BODY: dict[str, Any] = {"model": NAME, "messages": USER, "tools": TOOLS, "max_tokens": 300}
# Without a word of it this model may begin a thought, and never ends one.
ASK: dict[str, Any] = {**BODY, "extra_body": {"enable_thinking": False}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    folder = tool_folder(tmp_path_factory.mktemp("models"))
    async with running_mesh("cpu", model=NAME, folder=folder) as mesh:
        yield mesh
        assert mesh.bugs == []


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "turn":
        assert value["side"] in ("left", "right") and value["steps"] in (1, 2, 3) and len(value) == 2
    else:
        assert name == "halt" and isinstance(value["now"], bool) and len(value) == 1


async def streamed(sdk: AsyncOpenAI, **ask: Any) -> tuple[list[tuple[str, str, str]], str, str]:
    """(id, name, arguments) of each call, content, and why it ended; checks the order of its chunks."""
    calls: list[list[str]] = []
    content, ending = "", ""
    async for chunk in await sdk.chat.completions.create(**ask, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        ending = choice.finish_reason or ending
        for part in choice.delta.tool_calls or []:
            assert part.function is not None
            if part.index == len(calls):
                assert part.id and part.type == "function" and part.function.name and not part.function.arguments
                calls.append([part.id, part.function.name, ""])
            else:
                assert part.index == len(calls) - 1 and part.id is None and part.function.name is None
                calls[-1][2] += part.function.arguments or ""
    return [(call[0], call[1], call[2]) for call in calls], content, ending


async def test_required_calls_are_valid_and_streamed_as_they_are_whole(sdk: AsyncOpenAI) -> None:
    for seed in range(2):
        ask = {**ASK, "tool_choice": "required", "seed": seed, "n": 1, "parallel_tool_calls": seed > 0}
        ask["extra_body"] = {**ASK["extra_body"], "request_id": f"required-{seed}"}
        whole = (await sdk.chat.completions.create(**ask)).choices[0]
        # This model may go on calling until its context is full.
        ending = whole.finish_reason
        assert ending == "tool_calls" or (ending == "length" and seed > 0)
        assert not whole.message.content
        calls = [(call.id, call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
        assert calls and (seed > 0 or len(calls) == 1)
        for _, name, arguments in calls if ending == "tool_calls" else calls[:-1]:
            check(name, arguments)
        assert (await streamed(sdk, **ask))[::2] == (calls, ending)


async def test_a_named_call_and_several_outputs(sdk: AsyncOpenAI) -> None:
    choice = {"type": "function", "function": {"name": "halt"}}
    answer = await sdk.chat.completions.create(**ASK, tool_choice=choice, n=3, seed=2, temperature=1.5)  # type: ignore[call-overload]
    ids = set()
    for one in answer.choices:
        (call,) = one.message.tool_calls
        assert call.function.name == "halt" and one.finish_reason == "tool_calls"
        check("halt", call.function.arguments)
        ids.add(call.id)
    assert len(ids) == 3


async def test_auto_and_none_are_text(sdk: AsyncOpenAI) -> None:
    for choice in ("auto", "none"):
        answer = await sdk.chat.completions.create(**{**ASK, "max_tokens": 20}, tool_choice=choice, temperature=0)
        assert answer.choices[0].finish_reason in ("stop", "length") and not answer.choices[0].message.tool_calls
        assert answer.choices[0].message.content
        assert (await streamed(sdk, **{**ASK, "max_tokens": 20}, tool_choice=choice, temperature=0))[1]


async def test_a_call_that_is_cut_off_ends_by_its_length(sdk: AsyncOpenAI) -> None:
    ask = {**ASK, "tools": LONG, "tool_choice": "required", "max_tokens": 40, "seed": 1, "logprobs": True}
    calls, _, ending = await streamed(sdk, **ask)
    assert ending == "length" and calls[0][1] == "recite" and calls[0][2].startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(calls[0][2])


async def test_reasoning_comes_apart(http: httpx.AsyncClient) -> None:
    """The template opens the thought; this model never closes it."""
    ask = {"model": NAME, "messages": USER, "max_tokens": 12, "temperature": 0}
    thinks = (await http.post("/v1/chat/completions", json={**ask, "enable_thinking": True})).json()["choices"][0]
    assert thinks["message"]["content"] == "" and thinks["message"]["reasoning_content"]
    for fields in ({"include_reasoning": False}, {"separate_reasoning": False}):
        answer = await http.post("/v1/chat/completions", json={**ask, "enable_thinking": True, **fields})
        message = answer.json()["choices"][0]["message"]
        assert "reasoning_content" not in message and bool(message["content"]) == ("separate_reasoning" in fields)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for fields in (off, {"reasoning_effort": "none"}, {}):
        message = (await http.post("/v1/chat/completions", json={**ask, **fields})).json()["choices"][0]["message"]
        assert message["content"] and "reasoning_content" not in message
    async with http.stream(
        "POST", "/v1/chat/completions", json={**ask, "enable_thinking": True, "stream": True}
    ) as got:
        lines = [line[6:] async for line in got.aiter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thinks["message"]["reasoning_content"]


async def test_tokens_of_thoughts_are_counted(http: httpx.AsyncClient) -> None:
    """Those whose bytes are part of reasoning_content, over all outputs, streamed and whole."""
    ask: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 24, "seed": 3, "n": 3, "temperature": 1.5}
    ask |= {"enable_thinking": True, "return_token_ids": True, "logprobs": True}
    ask |= {"stream_options": {"include_usage": True}}
    whole = (await http.post("/v1/chat/completions", json=ask)).json()
    expected = 0
    for choice in whole["choices"]:
        thought = choice["message"]["reasoning_content"]
        data = [bytes(entry["bytes"] or ()) for entry in choice["logprobs"]["content"]]
        start = b"".join(data).decode(errors="replace").index(thought)
        expected += num_touching(data, start, start + len(thought))
    usage = whole["usage"]
    assert 0 < expected <= usage["completion_tokens"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
    async with http.stream("POST", "/v1/chat/completions", json={**ask, "stream": True}) as got:
        lines = [line[6:] async for line in got.aiter_lines() if line.startswith("data: {")]
    assert of_output(json.loads(lines[-1])["usage"]) == of_output(usage)
    for fields in ({"include_reasoning": False}, {"logprobs": False, "return_token_ids": False}):
        again = (await http.post("/v1/chat/completions", json={**ask, **fields})).json()
        assert of_output(again["usage"]) == of_output(usage), fields
    off = (await http.post("/v1/chat/completions", json={**ask, "enable_thinking": False})).json()
    assert off["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    unread = (await http.post("/v1/chat/completions", json={**ask, "separate_reasoning": False})).json()
    assert "completion_tokens_details" not in unread["usage"]


async def test_a_response_counts_its_thought(http: httpx.AsyncClient) -> None:
    ask: dict[str, Any] = {"model": NAME, "max_tokens": 24, "seed": 3, "enable_thinking": True, "messages": USER}
    chat = (await http.post("/v1/chat/completions", json=ask)).json()["usage"]
    ask = {"model": NAME, "max_output_tokens": 24, "seed": 3, "input": USER}
    ask |= {"chat_template_kwargs": {"enable_thinking": True}}
    whole = (await http.post("/v1/responses", json=ask)).json()
    assert whole["usage"]["output_tokens_details"] == chat["completion_tokens_details"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    async with http.stream("POST", "/v1/responses", json={**ask, "stream": True}) as got:
        events = [json.loads(line[6:]) async for line in got.aiter_lines() if line.startswith("data: {")]
    assert events[-1]["response"]["usage"] == whole["usage"]
    assert (await http.get(f"/v1/responses/{whole['id']}")).json()["usage"] == whole["usage"]


@pytest.mark.full
async def test_kills_change_no_count_of_a_thought(mesh: Mesh) -> None:
    """Three outputs that go on after the scheduler, the worker and the detokenizer died."""
    ask: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 400, "seed": 3, "n": 3, "ignore_eos": True}
    ask |= {"enable_thinking": True, "stream": True, "stream_options": {"include_usage": True}}

    async def usage_after(service: str) -> dict[str, Any]:
        is_killed = not service
        async with http_client(mesh) as http, http.stream("POST", "/v1/chat/completions", json=ask) as got:
            last: dict[str, Any] = {}
            num_events = 0
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    last, num_events = json.loads(line[6:]), num_events + 1
                if num_events == 40 and not is_killed:
                    is_killed = mesh.cluster.kill(service)
            assert is_killed
            return dict(last["usage"])

    expected = await usage_after("")
    assert 0 < expected["completion_tokens_details"]["reasoning_tokens"] <= 1200 == expected["completion_tokens"]
    for service in ("scheduler", "worker", "detokenizer"):
        async with asyncio.timeout(120):
            told = await usage_after(service)
        assert of_output(told) == of_output(expected), service
        await mesh.cluster.wait_healthy(60)


def of_output(usage: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Without what depends on the cache."""
    return usage["completion_tokens"], usage["completion_tokens_details"]


def num_touching(tokens: list[bytes], start: int, end: int) -> int:
    """Tokens with a part of these characters of their text."""
    text = b"".join(tokens)
    return sum(
        bool(token)
        and len(text[: at - len(token)].decode(errors="ignore")) < end
        and len(text[:at].decode(errors="replace")) > start
        for token, at in zip(tokens, accumulate(map(len, tokens)), strict=True)
    )


async def test_a_constraint_waits_for_the_end_of_the_thought(http: httpx.AsyncClient) -> None:
    ask = {"model": NAME, "messages": USER, "max_tokens": 30, "seed": 1, "regex": "[0-9]{3}"}
    closed = (await http.post("/v1/chat/completions", json={**ask, "enable_thinking": False})).json()["choices"][0]
    assert closed["message"]["content"].isdecimal() and closed["finish_reason"] == "stop"
    opened = (await http.post("/v1/chat/completions", json={**ask, "enable_thinking": True})).json()["choices"][0]
    assert opened["finish_reason"] == "length" and not opened["message"]["reasoning_content"].isdecimal(), opened


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "INVALID_ARGUMENT", "tool_choice"),
        ({"tool_choice": "required", "regex": "a"}, "INVALID_ARGUMENT", "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "INVALID_ARGUMENT", "tool_choice"),
        (
            {"tools": [tool(f"f{i}", {"x": {"enum": ["a" * 20_000]}}) for i in range(60)], "tool_choice": "required"},
            "INVALID_GRAMMAR",
            "tools",
        ),
        (
            {"tools": [tool("f", {"x": {"not": {}}}, strict=True)]},
            "INVALID_GRAMMAR",
            "tools.0.function.parameters",
        ),
        # A format that constrains nothing has brought no grammar.
        (
            {
                "tools": [tool("f", {"x": {"type": "string", "pattern": "(a"}})],
                "tool_choice": "required",
                "response_format": {"type": "text"},
            },
            "INVALID_GRAMMAR",
            "tools",
        ),
    ],
)
async def test_errors_name_the_field(http: httpx.AsyncClient, fields: dict[str, Any], code: str, param: str) -> None:
    answer = await http.post("/v1/chat/completions", json={**BODY, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and (error["code"], error["param"]) == (code, param), error


SIDE = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
SIDE["additionalProperties"] = False


async def test_ids_beside_a_chat_and_its_calls(http: httpx.AsyncClient) -> None:
    body = {**BODY, "tool_choice": "required", "enable_thinking": False, "seed": 5, "return_token_ids": True}
    body["parallel_tool_calls"] = False
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    ids = whole["choices"][0]["token_ids"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    text = (await http.post("/detokenize", json={"tokens": ids})).json()["text"]
    assert json.dumps(whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"]) in text
    streamed_ids: list[int] = []
    prompts = []
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        for event in [event async for event in iterate_events(answer) if event]:
            streamed_ids += event["choices"][0]["token_ids"]
            prompts.append(event.get("prompt_token_ids"))
    assert streamed_ids == ids and prompts == [whole["prompt_token_ids"], *[None] * (len(prompts) - 1)]
    plain = (await http.post("/v1/chat/completions", json={**body, "return_token_ids": False})).json()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


async def test_a_response_repeats_its_request(http: httpx.AsyncClient) -> None:
    own = [{"type": "function", "name": name, "parameters": SIDE} for name in ("turn", "halt")]
    among = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "halt"}]}
    body = {"model": NAME, "input": USER, "instructions": "Walk.", "tools": own, "tool_choice": among}
    body |= {"metadata": {"team": "a"}, "prompt_cache_key": "k", "max_output_tokens": 200}
    body |= {"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}}
    whole = (await http.post("/v1/responses", json=body)).json()
    repeated = ("instructions", "tools", "tool_choice", "metadata", "prompt_cache_key")
    assert {name: whole[name] for name in repeated} == {name: body[name] for name in repeated}
    assert [item["name"] for item in whole["output"]] == ["halt"]
    stored = (await http.get(f"/v1/responses/{whole['id']}")).json()
    assert stored == whole
    large = {**body, "instructions": "Walk. " * 20, "metadata": {"text": "a" * (64 << 10)}}
    told = (await http.post("/v1/responses", json=large)).json()
    assert (told["status"], told["metadata"], told["tools"]) == ("completed", {}, []), told
    wrong = await http.post("/v1/responses", json={**body, "metadata": ["a"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "metadata")
    wrong = await http.post("/v1/responses", json={**body, "tool_choice": {**among, "tools": [{"type": "mcp"}]}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tool_choice.tools.0.type")
    shown = (await http.post("/api/show", json={"model": NAME})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


async def test_calls_in_the_words_of_anthropic(http: httpx.AsyncClient) -> None:
    body = {"model": NAME, "max_tokens": 200, "messages": USER, "tools": [{"name": "turn", "input_schema": SIDE}]}
    body |= {"thinking": {"type": "disabled"}, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = (await http.post("/v1/messages", json=body)).json()
    (block,) = whole["content"]
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "turn", "tool_use"), whole
    assert block["input"]["side"] in ("left", "right")
    async with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
        events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: ")]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(start["type"], start["name"]) for start in starts] == [("tool_use", "turn")]
    deltas = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(deltas))["side"] in ("left", "right")
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    named = await http.post("/v1/messages", json={**body, "tool_choice": {"type": "tool", "name": "fly"}})
    assert (named.status_code, named.json()["error"]["param"]) == (400, "tool_choice"), named.json()


async def test_calls_in_the_words_of_ollama_and_responses(http: httpx.AsyncClient) -> None:
    """Ollama has no word for a call that must be made: the plan is there, and this model's answer is text."""
    tools = [{"type": "function", "function": {"name": "turn", "parameters": SIDE}}]
    body = {"model": NAME, "messages": USER, "tools": tools, "think": False, "stream": False}
    answer = (await http.post("/api/chat", json={**body, "options": {"num_predict": 10}})).json()
    assert answer["done"] and answer["message"]["role"] == "assistant", answer
    own = [{"type": "function", "name": "turn", "parameters": SIDE}]
    body = {"model": NAME, "input": USER, "tools": own, "tool_choice": "required", "max_output_tokens": 200}
    body |= {"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}}
    (item,) = (await http.post("/v1/responses", json=body)).json()["output"]
    assert (item["type"], item["name"]) == ("function_call", "turn") and item["call_id"]
    assert json.loads(item["arguments"])["side"] in ("left", "right")


@pytest.mark.full
async def test_kills_change_no_byte_of_a_streamed_call(mesh: Mesh) -> None:
    """Every daemon dies once while calls are streamed; a router's clients ask again, under the same name and seed."""
    async with openai_client(mesh) as sdk:
        asks = [
            {
                **ASK,
                "tools": LONG,
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "seed": seed,
                "max_tokens": 700,
            }
            | {"extra_body": {**ASK["extra_body"], "request_id": f"recite-{seed}"}}
            for seed in range(3)
        ]
        expected = [await streamed(sdk, **ask) for ask in asks]
        for calls, _, ending in expected:
            assert ending == "tool_calls", (ending, calls)
            assert len(json.loads(calls[0][2])["text"]) == 60
        for service in ("tokenizer", "detokenizer", "scheduler", "worker", "router"):
            running = [asyncio.create_task(retried(sdk, ask, service == "router")) for ask in asks]
            begun = asyncio.create_task(first_arguments(sdk, {**asks[0], "extra_body": ASK["extra_body"]}))
            await asyncio.wait({begun}, timeout=60)
            assert mesh.cluster.kill(service)
            async with asyncio.timeout(120):
                assert await asyncio.gather(*running) == expected, service
            begun.cancel()
            await mesh.cluster.wait_healthy(60)


async def first_arguments(sdk: AsyncOpenAI, ask: dict[str, Any]) -> None:
    """Returns once a call is being streamed."""
    async for chunk in await sdk.chat.completions.create(**ask, stream=True):
        if chunk.choices[0].delta.tool_calls:
            return


async def retried(sdk: AsyncOpenAI, ask: dict[str, Any], may_break: bool) -> object:
    while True:
        try:
            return await streamed(sdk, **ask)
        except (openai.APIConnectionError, openai.InternalServerError, httpx.TransportError):
            assert may_break
            await asyncio.sleep(0.1)


async def test_a_call_that_must_be_made_needs_workers_that_follow_grammars() -> None:
    """Those that are simulated follow none; the same chat without the demand is served."""
    async with running_mesh("simulated") as mesh, http_client(mesh) as http:
        anthropic = {"tools": [{"name": "turn", "input_schema": SIDE}], "tool_choice": {"type": "any"}}
        named = {"type": "function", "function": {"name": "turn"}}
        for path, fields in (
            ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": "required"}),
            ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": named, "stream": True}),
            ("/v1/messages", anthropic),
        ):
            answer = await http.post(path, json={"model": NAME, "messages": USER, "max_tokens": 5, **fields})
            assert answer.status_code == 400, (path, answer.text)
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("UNSUPPORTED", "tool_choice"), error
        served = await http.post(
            "/v1/chat/completions", json={"model": NAME, "messages": USER, "max_tokens": 5, "tools": TOOLS}
        )
        assert served.status_code == 200, served.text
        assert mesh.bugs == []
