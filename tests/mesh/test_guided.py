"""Outputs that follow a grammar, through every daemon: over gRPC and HTTP, streamed, n > 1, killed and resumed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal

import httpx
import pytest
from openai import AsyncOpenAI
from support.fault_injection import kill_once
from support.jobs import Job
from support.mesh import Mesh, running_mesh
from support.stream_load import StreamLoad

from radixmesh.client import NamedTool, Tool, errors, tool_calls

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
WRONG = {"type": "objekt"}
WORDS = "([a-f]{3} ){20,30}end"


def check_city(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"city", "size"} and value["city"] in ("Paris", "Rome", "Oslo") and value["size"] in (1, 2, 3)


async def test_a_schema_over_grpc_with_several_outputs(mesh: Mesh) -> None:
    done = await mesh.client.complete("A city:", json_schema=SCHEMA, n=4, temperature=1.0, seed=3, max_tokens=200)
    for output in done.outputs:
        check_city(output.text)
    assert (await mesh.client.complete("One of", choices=["héé", 'ho"ho'], seed=1)).outputs[0].text in ("héé", 'ho"ho')
    again = await mesh.client.complete("A city:", json_schema=SCHEMA, n=4, temperature=1.0, seed=3, max_tokens=200)
    assert [output.ids for output in again.outputs] == [output.ids for output in done.outputs]


async def test_a_required_call_and_any_json_over_grpc(mesh: Mesh) -> None:
    chat, more = [{"role": "user", "content": "A city?"}], {"temperature": 1.0, "seed": 4, "max_tokens": 300}
    tools = [Tool("city", SCHEMA), Tool("size", SCHEMA)]
    done = await mesh.client.complete(
        messages=chat, tools=tools, tool_choice="required", parallel_tool_calls=False, enable_thinking=False, **more
    )
    (call,) = tool_calls(done.outputs[0].text)
    assert call.name in ("city", "size")
    check_city(json.dumps(call.arguments))
    named = await mesh.client.complete(messages=chat, tools=tools, tool_choice=NamedTool("size"), **more)
    assert [call.name for call in tool_calls(named.outputs[0].text)] == ["size"]
    value = (await mesh.client.complete("JSON:", json_object=True, **more)).outputs[0]
    assert value.finish is not None and (value.finish.reason == "length" or json.loads(value.text) is not Ellipsis)


async def test_every_name_of_a_constraint_over_http(http: httpx.AsyncClient) -> None:
    body = {"model": "tiny-llama", "prompt": "Once", "max_tokens": 200, "seed": 5}
    schema_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    for fields in (
        {"response_format": schema_format},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ):
        answer = (await http.post("/v1/completions", json={**body, **fields})).json()
        check_city(answer["choices"][0]["text"])
    for fields, pattern in (
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"guided_regex": "(ab){2,4}"}, "(ab){2,4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["left (or so)", "right"]}, r"left \(or so\)|right"),
        ({"ebnf": 'root ::= "x" | "y" root'}, "y*x"),
        ({"guided_grammar": 'root ::= "x" | "y" root'}, "y*x"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ):
        answer = (await http.post("/v1/completions", json={**body, **fields})).json()
        assert re.fullmatch(pattern, answer["choices"][0]["text"]), (fields, answer)
    native = {"text": "Once", "sampling_params": {"regex": "[ab]{4}", "max_new_tokens": 50, "temperature": 1.0}}
    assert re.fullmatch("[ab]{4}", (await http.post("/generate", json=native)).json()["text"])


async def test_the_sdk_streams_json_mode(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="tiny-llama",
        messages=[{"role": "user", "content": "A city, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        stream=True,
        max_tokens=200,
        seed=2,
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert len(parts) > 1
    check_city("".join(parts))


USER = [{"role": "user", "content": "A city?"}]
WRONG = {"type": "json_schema", "schema": {"type": "objekt"}}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "INVALID_GRAMMAR",
            "response_format",
        ),
        ({"response_format": {"type": "yaml"}}, "UNSUPPORTED", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "INVALID_ARGUMENT", "response_format"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "INVALID_ARGUMENT", "ebnf"),
        ({"guided_choice": [""]}, "INVALID_ARGUMENT", "guided_choice"),
        ({"guided_json": {"not": {}}}, "INVALID_GRAMMAR", "guided_json"),
        ({"structured_outputs": {"regex": "(a"}, "stream": True}, "INVALID_GRAMMAR", "structured_outputs"),
        ({"regex": "a" * ((1 << 20) + 1)}, "INVALID_GRAMMAR", "regex"),
        ({"regex": "a", "ignore_eos": True}, "INVALID_ARGUMENT", "ignore_eos"),
    ],
)
async def test_what_cannot_be_followed_is_refused(
    http: httpx.AsyncClient, fields: object, code: str, param: str
) -> None:
    answer = await http.post("/v1/completions", json={"model": "tiny-llama", "prompt": "Once", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == code, error
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/generate", {"text": "Once", "sampling_params": {"regex": "(a"}}, "sampling_params.regex"),
        ("/v1/chat/completions", {"messages": USER, "guided_regex": "(a" + "b" * 200_000}, "guided_regex"),
        ("/v1/messages", {"messages": USER, "output_config": {"format": WRONG}, "max_tokens": 5}, "output_config"),
        ("/api/chat", {"messages": USER, "format": {"type": "objekt"}}, "format"),
    ],
)
async def test_a_wrong_grammar_is_an_error_of_the_field_that_brought_it(
    http: httpx.AsyncClient, path: str, fields: dict[str, object], param: str
) -> None:
    answer = await http.post(path, json={"model": "tiny-llama", **fields})
    body = answer.json()
    error = body["error"] if isinstance(body["error"], dict) else body
    assert answer.status_code == 400 and (error["code"], error["param"]) == ("INVALID_GRAMMAR", param), body


async def test_a_broken_grammar_over_grpc_is_a_typed_error(mesh: Mesh) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        await mesh.client.complete("x", regex="(a")
    assert caught.value.reason == "INVALID_GRAMMAR"


async def test_a_mesh_that_jumps_forward_gives_the_same_ids(mesh: Mesh) -> None:
    options = {"json_schema": SCHEMA, "n": 2, "temperature": 1.0, "max_tokens": 200}
    async with running_mesh("cpu", worker={"jump_forward_tokens": 7}) as jumping:
        for seed in range(3):
            one, other = [
                await asked.client.complete("A city:", seed=seed, **options)  # type: ignore[arg-type]
                for asked in (mesh, jumping)
            ]
            assert [output.ids for output in one.outputs] == [output.ids for output in other.outputs]
        plain = [
            (await asked.client.complete("Once", seed=1, max_tokens=30)).outputs[0].ids for asked in (mesh, jumping)
        ]
        assert plain[0] == plain[1]
        assert jumping.bugs == []


async def test_kills_change_no_byte(mesh: Mesh) -> None:
    """Daemons that know of grammars are killed while guided streams are open, n = 2 among them."""
    jobs = [
        Job(name=f"words-{seed}", prompt="Words", options={"regex": WORDS, "seed": seed, "n": 1 + seed % 2})
        for seed in range(8)
    ]
    jobs = [job.learned(await job.run(mesh.client)) for job in jobs]
    for job in jobs:
        assert all(re.fullmatch(WORDS, answer.text) for answer in job.answers)
    pick = random.Random(7)
    async with StreamLoad(mesh.client, jobs, num_streams=8) as load:
        await load.all_progressed(0.0)
        for service in ("worker", "scheduler", "router"):
            kill = await kill_once(mesh, load, service, signal.SIGKILL, pick)
            assert load.failures == [], (kill, load.failures[:3])
    assert load.failures == [] and load.num_completed >= 8


# Each token of it is read in ever more ways: a mask takes tens of milliseconds after 200 tokens.
AMBIGUOUS = 'root ::= root root root | root root | "a" | "b" | ""'


async def test_a_bomb_of_a_mask_holds_up_no_other_grammar(mesh: Mesh) -> None:
    """Not even when its output is gone over again, after its worker was killed."""
    jobs = [Job(name=f"words-{seed}", prompt="Words", options={"regex": WORDS, "seed": seed}) for seed in range(4)]
    jobs = [job.learned(await job.run(mesh.client)) for job in jobs]
    ask = {"ebnf": AMBIGUOUS, "min_tokens": 1200, "max_tokens": 1200, "temperature": 1.0, "seed": 1}
    bombs = [asyncio.ensure_future(mesh.client.complete(f"Bomb {number}", **ask)) for number in range(2)]
    try:
        async with StreamLoad(mesh.client, jobs, num_streams=4) as load:
            await load.all_progressed(0.0)
            async with asyncio.timeout(120):
                while load.num_completed < 12:
                    await asyncio.sleep(0.05)
            kill = await kill_once(mesh, load, "worker", signal.SIGKILL, random.Random(7))
            assert load.failures == [], (kill, load.failures[:3])
            num_completed = load.num_completed
            async with asyncio.timeout(120):
                while load.num_completed < num_completed + 4:
                    await asyncio.sleep(0.05)
        assert load.failures == []
        assert not any(bomb.done() for bomb in bombs), bombs
    finally:
        for bomb in bombs:
            bomb.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)
