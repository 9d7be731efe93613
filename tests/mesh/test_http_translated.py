"""Anthropic's messages, Ollama's API and OpenAI's responses: the same outputs as chats, in each API's own words."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError
from support.jobs import recitations
from support.mesh import Mesh

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME = "tiny-llama"
JOB = next(job for job in recitations(with_sampled=False) if job.messages is not None)
MESSAGES: Any = list(JOB.messages or ())
ANSWER = JOB.answers[0].text
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


async def named_events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events whose names are their data's types."""
    events = []
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                events.append(json.loads(line.removeprefix("data: ")))
                assert events[-1]["type"] == name
    return events


async def lines(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.stream("POST", path, json=body) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) async for line in response.aiter_lines()]


async def test_messages_whole_and_streamed(http: httpx.AsyncClient) -> None:
    body = {"model": NAME, "max_tokens": 400, "temperature": 0, "messages": MESSAGES}
    whole = (await http.post("/v1/messages", json=body)).json()
    assert whole["content"] == [{"type": "text", "text": ANSWER}]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "end_turn")
    usage = whole["usage"]
    prompt = (await http.post("/v1/messages/count_tokens", json={"model": NAME, "messages": MESSAGES})).json()
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt["input_tokens"]
    blocks = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    events = await named_events(http, "/v1/messages", {**body, "messages": blocks})
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == ANSWER
    assert events[-2]["delta"]["stop_reason"] == "end_turn" and events[-2]["usage"]["output_tokens"] > 0
    stopped = (await http.post("/v1/messages", json={**body, "stop_sequences": [ANSWER[5:9]]})).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ANSWER[5:9])
    assert (await http.post("/v1/messages", json={**body, "max_tokens": 2})).json()["stop_reason"] == "max_tokens"
    shaped = {**body, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "system": "JSON."}
    shaped["messages"] = [{"role": "user", "content": "A city"}]
    assert json.loads((await http.post("/v1/messages", json=shaped)).json()["content"][0]["text"])["city"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind", "param"),
    [
        ("/v1/messages", {}, 400, "invalid_request_error", "max_tokens"),
        ("/v1/messages", {"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ("/v1/messages", {"max_tokens": 1, "model": "nobody"}, 404, "not_found_error", None),
        ("/v1/messages", {"max_tokens": 1, "temprature": 1}, 400, "invalid_request_error", "temprature"),
        ("/v1/messages", {"max_tokens": 1, "stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0",
        ),
        ("/v1/messages", {"max_tokens": 1, "messages": []}, 400, "invalid_request_error", "messages"),
    ],
)
async def test_anthropics_errors(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    answer = await http.post(path, json={"model": NAME, "messages": MESSAGES, **fields})
    error = answer.json()
    assert answer.status_code == status and error["type"] == "error", error
    assert error["error"]["type"] == kind and error["error"]["message"], error
    assert param is None or error["error"]["param"] == param, error


async def test_ollama_chat_and_generate(http: httpx.AsyncClient) -> None:
    options = {"temperature": 0, "num_ctx": 4096}
    body = {"model": f"{NAME}:latest", "messages": MESSAGES, "options": options}
    response = await http.post("/api/chat", json={**body, "stream": False})
    whole = response.json()
    assert response.headers["x-radixmesh-ignored-fields"] == "options.num_ctx"
    assert whole["message"] == {"role": "assistant", "content": ANSWER} and whole["done_reason"] == "stop"
    assert whole["done"] is True and whole["eval_count"] > 0 and whole["total_duration"] > 0
    # Clients divide by it for their tokens a second.
    assert 0 < whole["eval_duration"] < whole["total_duration"]
    streamed = await lines(http, "/api/chat", body)
    assert "".join(line["message"]["content"] for line in streamed) == ANSWER
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    (prompt,) = [message["content"] for message in MESSAGES if message["role"] == "user"][:1]
    answers = await lines(http, "/api/generate", {"model": NAME, "prompt": prompt, "options": options})
    alone = await http.post(
        "/api/chat", json={**body, "messages": [{"role": "user", "content": prompt}], "stream": False}
    )
    assert "".join(line["response"] for line in answers) == alone.json()["message"]["content"]
    text = next(job for job in recitations(with_sampled=False) if isinstance(job.prompt, str))
    raw = {"model": NAME, "prompt": text.prompt, "raw": True, "stream": False, "options": {"temperature": 0}}
    assert (await http.post("/api/generate", json=raw)).json()["response"] == text.answers[0].text
    cut = {**raw, "options": {"temperature": 0, "num_predict": 3}}
    assert (await http.post("/api/generate", json=cut)).json()["done_reason"] == "length"
    shaped = {"model": NAME, "prompt": "A city", "format": SCHEMA, "stream": False}
    assert json.loads((await http.post("/api/generate", json=shaped)).json()["response"])["city"]
    assert (await http.post("/api/generate", json={"model": NAME})).json()["done_reason"] == "load"


async def test_ollama_names_models(http: httpx.AsyncClient) -> None:
    assert [model["name"] for model in (await http.get("/api/tags")).json()["models"]] == [NAME]
    assert [model["name"] for model in (await http.get("/api/ps")).json()["models"]] == [NAME]
    shown = (await http.post("/api/show", json={"model": NAME})).json()
    assert shown["model_info"]["radixmesh.context_length"] > 0 and shown["capabilities"] == ["completion"]
    assert (await http.get("/api/version")).json()["version"]
    for path, fields, status, param in (
        ("/api/show", {"model": "nobody"}, 404, None),
        ("/api/chat", {"messages": MESSAGES}, 400, "model"),
        ("/api/chat", {"model": "nobody", "messages": []}, 404, None),
        ("/api/chat", {"model": NAME, "messages": MESSAGES, "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"model": NAME, "messages": MESSAGES, "options": {"top_p": 7}}, 400, "options.top_p"),
        ("/api/chat", {"model": NAME, "messages": MESSAGES, "format": "yaml"}, 400, "format"),
        ("/api/generate", {"model": NAME, "prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/generate", {"model": NAME, "prompt": "a", "options": {"num_predict": 0}}, 400, "options.num_predict"),
    ):
        answer = await http.post(path, json=fields)
        error = answer.json()
        assert answer.status_code == status and isinstance(error["error"], str) and error["code"], error
        assert param is None or error["param"] == param, error


async def test_responses_whole_streamed_and_gone_on_from(http: httpx.AsyncClient, sdk: AsyncOpenAI) -> None:
    whole = await sdk.responses.create(model=NAME, input=MESSAGES, temperature=0)
    assert whole.output_text == ANSWER and whole.status == "completed" and whole.usage is not None
    async with sdk.responses.stream(model=NAME, input=MESSAGES, temperature=0) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == ANSWER
    events = await named_events(http, "/v1/responses", {"model": NAME, "input": MESSAGES, "temperature": 0})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    more: Any = {"role": "user", "content": "And then?"}
    went_on = await sdk.responses.create(model=NAME, previous_response_id=whole.id, input=[more], temperature=0)
    chat = [*MESSAGES, {"role": "assistant", "content": ANSWER}, more]
    known = await sdk.chat.completions.create(model=NAME, messages=chat, temperature=0)
    assert went_on.output_text == known.choices[0].message.content
    assert went_on.usage is not None and went_on.usage.input_tokens == known.usage.prompt_tokens  # type: ignore[union-attr]
    # Instructions are each response's own.
    first = await sdk.responses.create(
        model=NAME, input="Hi", instructions="Be brief.", max_output_tokens=4, temperature=0
    )
    assert first.status == "incomplete" and first.incomplete_details is not None
    second = await sdk.responses.create(model=NAME, input="Ho", previous_response_id=first.id, temperature=0)
    alone = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first.output_text}]
    alone.append({"role": "user", "content": "Ho"})
    same = await sdk.chat.completions.create(model=NAME, messages=alone, temperature=0)  # type: ignore[arg-type]
    assert second.output_text == same.choices[0].message.content
    assert (await sdk.responses.retrieve(whole.id)).output_text == ANSWER
    await sdk.responses.delete(whole.id)
    for response_id in (whole.id, "resp_none"):
        with pytest.raises(NotFoundError):
            await sdk.responses.retrieve(response_id)
    unstored = await sdk.responses.create(model=NAME, input="Hi", store=False, max_output_tokens=2)
    with pytest.raises(NotFoundError, match="previous_response_id"):
        await sdk.responses.create(model=NAME, input="Ho", previous_response_id=unstored.id)
    shaped = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    city = await sdk.responses.create(model=NAME, input="A city", text=shaped)  # type: ignore[call-overload]
    assert json.loads(city.output_text)["city"] in ("Paris", "Rome")


async def test_items_of_a_conversation_equal_its_chat(sdk: AsyncOpenAI) -> None:
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "How is "}, {"type": "input_text", "text": "it?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Good."}], "id": "x"},
        {"role": "user", "content": "And now?"},
    ]
    chat: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "Good."},
        {"role": "user", "content": "And now?"},
    ]
    ours = await sdk.responses.create(model=NAME, input=items, temperature=0, max_output_tokens=20)
    known = await sdk.chat.completions.create(model=NAME, messages=chat, temperature=0, max_tokens=20)
    assert ours.output_text == known.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"background": True}, "background"),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "c"}, "conversation"),
        ({"temperature": 101}, "temperature"),
    ],
)
async def test_what_responses_refuse(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/responses", json={"model": NAME, "input": "Hi", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.json()


async def test_kills_of_daemons_lose_nothing(mesh: Mesh, http: httpx.AsyncClient) -> None:
    """Not the router: HTTP has no resumption. How often others may die is shown over gRPC."""
    options = {"temperature": 0, "max_tokens": 400}
    pick = random.Random(1)

    async def texts() -> list[str]:
        chat = {"model": NAME, "messages": MESSAGES}
        anthropic, responses, ollama = await asyncio.gather(
            named_events(http, "/v1/messages", {**chat, **options}),
            named_events(http, "/v1/responses", {"model": NAME, "input": MESSAGES, "temperature": 0}),
            lines(http, "/api/chat", {**chat, "options": {"temperature": 0}}),
        )
        return [
            "".join(event["delta"]["text"] for event in anthropic if event["type"] == "content_block_delta"),
            "".join(event["delta"] for event in responses if event["type"] == "response.output_text.delta"),
            "".join(line["message"]["content"] for line in ollama),
        ]

    for service in ("detokenizer", "worker"):
        running = [asyncio.create_task(texts()) for _ in range(4)]
        await asyncio.sleep(pick.uniform(0.02, 0.2))
        assert mesh.cluster.kill(service, 1, signal.SIGKILL)
        for answer in await asyncio.wait_for(asyncio.gather(*running), 120):
            assert answer == [ANSWER] * 3, service
        await mesh.cluster.wait_healthy(60)
