"""Loads over HTTP against a small server with the quirks of others."""

from __future__ import annotations

import numpy as np
import pytest
from support.small_openai import small_openai

from radixmesh.cli.bench.load_turn import Prompt
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.targets.target import Target, TargetError, TargetOptions, open_target


async def send(target: Target, prompt: Prompt) -> RequestRecord:
    record = RequestRecord(index=0, due=0.0)
    await target.send(prompt, 7, record)
    assert record.ended > 0
    return record


def ids(*values: int) -> Prompt:
    return Prompt(ids=np.array(values, np.int32))


async def test_prompts_are_ids_texts_and_chats_and_the_servers_count_holds() -> None:
    async with small_openai() as server, open_target(server.base, TargetOptions()) as target:
        assert await target.prepare() is None and target.model == "small"
        messages = ({"role": "user", "content": "hi"},)
        for prompt in (ids(5, 6), Prompt(text="t"), Prompt(messages=messages)):
            record = await send(target, prompt)
            assert (record.error, record.output_text, len(record.deliveries)) == ("", "w0 w1 w2 w3 ", 4)
            assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (10, 8, 4)
            assert record.is_exact and record.output_ids is None
        first, second, third = server.bodies
        assert (first["prompt"], second["prompt"], third["messages"]) == ([5, 6], "t", list(messages))
        assert all(body["max_tokens"] == 7 and body["ignore_eos"] is True for body in server.bodies)


async def test_a_server_that_tells_ids_and_one_that_counts_nothing() -> None:
    async with small_openai() as server, open_target(server.base, TargetOptions()) as target:
        await target.prepare()
        server.has_ids = True
        record = await send(target, ids(1))
        assert record.output_ids is not None
        assert record.output_ids.tolist() == [100, 200, 101, 201, 102, 202, 103, 203]
        server.has_ids = server.has_usage = False
        record = await send(target, ids(1))
        assert (record.is_exact, record.output_tokens, record.error) == (False, 4, "")


async def test_plain_requests_hold_nothing_that_openai_does_not_know() -> None:
    known = {"model", "stream", "stream_options", "temperature", "prompt", "max_tokens"}
    async with (
        small_openai() as server,
        open_target(server.base, TargetOptions(is_plain=True, model="other")) as target,
    ):
        await target.prepare()
        await send(target, ids(1))
        await send(target, Prompt(messages=({"role": "user", "content": "hi"},)))
        assert set(server.bodies[0]) == known
        assert set(server.bodies[1]) == known - {"prompt", "max_tokens"} | {"messages", "max_completion_tokens"}
        assert {body["model"] for body in server.bodies} == {"other"}


async def test_every_failure_is_written_down() -> None:
    async with small_openai() as server, open_target(server.base, TargetOptions(timeout_s=60)) as target:
        await target.prepare()
        server.failing = {1: 503, 2: "event", 3: "cut"}
        assert (await send(target, ids(1))).error == "503: come back later"
        within = await send(target, ids(2))
        assert within.error == "200: it broke" and len(within.deliveries) == 2 and within.output_tokens == 2
        assert (await send(target, ids(3))).error
        assert (await send(target, ids(4))).error == ""


async def test_a_target_that_cannot_be_measured_says_why() -> None:
    async with small_openai() as server:
        for base, model, wrong in (
            (server.base, "gpt-0", "there is no model 'gpt-0'; served: small, other"),
            (server.base + "/x", "", "404 Not Found"),
            ("http://127.0.0.1:1/v1", "", "does not answer"),
        ):
            async with open_target(base, TargetOptions(model=model)) as target:
                with pytest.raises(TargetError, match=wrong):
                    await target.prepare()
