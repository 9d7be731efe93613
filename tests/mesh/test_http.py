"""OpenAI's own client, and plain HTTP, against a live mesh: the same answers as over gRPC, in every form."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.http import events_of, post, raw_connection
from support.jobs import MODEL, Job, recitations, sampled_recitations
from support.mesh import Mesh, running_mesh
from support.rounding import model_tolerance

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME = "tiny-llama"
LONG = 2000
JOBS = recitations(with_sampled=False)
CHATS = [job for job in JOBS if job.messages and len(job.answers[0].ids) < 100]
# The whole set is recited over gRPC; here those that the tiny model is through with soon.
TEXTS = sorted((job for job in JOBS if job.prompt), key=lambda job: len(job.answers[0].ids))[:8]
JABBERWOCKY = next(job for job in JOBS if job.name == "jabberwocky")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh("cpu") as mesh:
        yield mesh


def sdk_options(job: Job) -> dict:  # type: ignore[type-arg]
    """The job's options as the SDK takes them: what it has no name for goes beside."""
    own = ("temperature", "n", "max_tokens", "seed", "top_p", "frequency_penalty", "presence_penalty", "stop")
    options = {name: value for name, value in job.options.items() if name in own}
    options["extra_body"] = {name: value for name, value in job.options.items() if name not in own}
    return {"model": NAME, "max_tokens": LONG, **options}


async def test_every_recitation_as_a_completion_whole_and_streamed(sdk: AsyncOpenAI) -> None:
    async def check(job: Job) -> None:
        (answer,) = job.answers
        whole = await sdk.completions.create(prompt=job.prompt, **sdk_options(job))
        assert whole.choices[0].text == answer.text, job.name
        assert whole.choices[0].finish_reason == answer.reason
        assert whole.usage is not None and whole.usage.completion_tokens == len(answer.ids)
        stream = await sdk.completions.create(prompt=job.prompt, stream=True, **sdk_options(job))
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(choice.text for choice in chunks) == answer.text, job.name
        assert [choice.finish_reason for choice in chunks if choice.finish_reason] == [answer.reason]

    await asyncio.gather(*map(check, TEXTS))


@pytest.mark.parametrize("num_outputs", [1, 3])
async def test_the_last_finish_and_the_end_of_a_stream_come_in_one_piece(mesh: Mesh, num_outputs: int) -> None:
    body = {"prompt": "tiger", "max_tokens": 12, "ignore_eos": True, "stream": True, "seed": 3, "n": num_outputs}
    async with asyncio.timeout(60), raw_connection(mesh) as (reader, writer):
        writer.write(post("/v1/completions", body, "Connection: close"))
        rest = (await reader.read()).partition(b"\r\n\r\n")[2]
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert chunks[-1] == b"" and chunks[-2].endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in chunks[-2]
    assert b"".join(chunks).count(b'"finish_reason":"length"') == num_outputs


async def test_every_recited_chat_whole_and_streamed(sdk: AsyncOpenAI) -> None:
    async def check(job: Job) -> None:
        (answer,) = job.answers
        options = {"model": NAME, "messages": job.messages, "temperature": 0}
        whole = await sdk.chat.completions.create(**options)
        assert whole.choices[0].message.content == answer.text, job.name
        assert whole.choices[0].message.role == "assistant"
        stream = await sdk.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.text, job.name
        assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(answer.ids)
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        assert {chunk.id for chunk in chunks} == {chunks[0].id}

    await asyncio.gather(*map(check, CHATS))


async def test_sampled_outputs_are_those_of_grpc(mesh: Mesh, sdk: AsyncOpenAI) -> None:
    async def check(job: Job) -> None:
        answers = await job.run(mesh.client)
        whole = await sdk.completions.create(prompt=job.prompt, **sdk_options(job))
        assert [choice.text for choice in whole.choices] == [answer.text for answer in answers], job.name
        assert [choice.finish_reason for choice in whole.choices] == [answer.reason for answer in answers]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == sum(len(answer.ids) for answer in answers)
        texts = [""] * len(answers)
        async for chunk in await sdk.completions.create(prompt=job.prompt, stream=True, **sdk_options(job)):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [answer.text for answer in answers], job.name

    await asyncio.gather(*map(check, sampled_recitations()))


async def test_options_reach_the_sampler(mesh: Mesh, sdk: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    everything = {
        "temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5,
        "frequency_penalty": 0.5, "presence_penalty": 0.25, "min_tokens": 20, "max_tokens": 40, "ignore_eos": True,
        "stop": ["zzz"],
    }  # fmt: skip
    ours = await mesh.client.complete("The Tyger", logit_bias={204: -90.0}, **everything)
    theirs = await http.post(
        "/v1/completions", json={"prompt": "The Tyger", "logit_bias": {"204": -90.0}, **everything}
    )
    assert theirs.json()["choices"][0]["text"] == ours.outputs[0].text
    assert "x-radixmesh-ignored-fields" not in theirs.headers
    unbiased = await http.post("/v1/completions", json={"prompt": "The Tyger", **everything})
    assert unbiased.json()["choices"][0]["text"] != ours.outputs[0].text
    negative = await sdk.completions.create(model=NAME, prompt="Lorelei", seed=-1, temperature=1.0, max_tokens=20)
    same = await mesh.client.complete("Lorelei", seed=2**64 - 1, temperature=1.0, max_tokens=20)
    assert negative.choices[0].text == same.outputs[0].text


async def test_a_stop_is_left_out_or_kept_and_named(http: httpx.AsyncClient) -> None:
    job = JABBERWOCKY
    whole = job.answers[0].text
    body = {"prompt": job.prompt, "temperature": 0, "max_tokens": LONG, "stop": "vorpal sword"}
    cut = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert cut["text"] == whole.partition("vorpal sword")[0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", "vorpal sword")
    kept = await http.post("/v1/completions", json={**body, "include_stop_str_in_output": True})
    assert kept.json()["choices"][0]["text"] == cut["text"] + "vorpal sword"
    by_id = await http.post("/v1/completions", json={**body, "stop": None, "stop_token_ids": [job.answers[0].ids[5]]})
    assert by_id.json()["choices"][0]["stop_reason"] == job.answers[0].ids[5]
    assert by_id.json()["usage"]["completion_tokens"] <= 6


async def test_prompts_in_all_forms(http: httpx.AsyncClient) -> None:
    first, second = TEXTS[:2]
    ids = [(await http.post("/tokenize", json={"prompt": job.prompt})).json()["tokens"] for job in (first, second)]
    texts = [first.answers[0].text, second.answers[0].text]
    body = {"temperature": 0, "max_tokens": LONG}
    for prompt, expected in (
        (first.prompt, texts[:1]),
        (ids[0], texts[:1]),
        ([first.prompt, second.prompt], texts),
        (ids, texts),
    ):
        whole = (await http.post("/v1/completions", json={**body, "prompt": prompt})).json()
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(expected)))
        assert whole["usage"]["prompt_tokens"] == sum(map(len, ids[: len(expected)]))
        async with http.stream("POST", "/v1/completions", json={**body, "prompt": prompt, "stream": True}) as response:
            streamed = [""] * len(expected)
            events = await events_of(response)
            assert events.pop() == {}
            for event in events:
                streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert streamed == expected
    doubled = (await http.post("/v1/completions", json={**body, "prompt": ids, "n": 2})).json()["choices"]
    assert [choice["text"] for choice in doubled] == [texts[0], texts[0], texts[1], texts[1]]


async def test_completion_logprobs_and_echo(mesh: Mesh, sdk: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    prompt = "古池"
    ours = await mesh.client.complete(prompt, temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=True)
    known = ours.outputs[0].logprobs
    assert known is not None and ours.prompt_logprobs is not None
    options = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 20, "logprobs": 2}
    (plain,) = (await sdk.completions.create(**options)).choices
    assert plain.logprobs is not None and plain.logprobs.tokens is not None
    assert plain.logprobs.token_logprobs == known.token_logprobs
    assert plain.logprobs.top_logprobs is not None
    best = [max(top.values()) for top in plain.logprobs.top_logprobs]
    assert best == [top[0] for top in known.top_logprobs]
    assert plain.logprobs.tokens[:2] == ["\n", "\n"] and plain.logprobs.text_offset[:3] == [0, 1, 2]
    assert all(token.startswith("bytes:\\x") for token in plain.logprobs.tokens[2:5])
    # The second character starts with the sixth token: bytes of one character share its offset.
    assert plain.logprobs.text_offset[2:6] == [2, 2, 2, 3]
    streamed: list[float] = []
    async for chunk in await sdk.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.token_logprobs
    assert streamed == plain.logprobs.token_logprobs

    (echoed,) = (await sdk.completions.create(echo=True, **options)).choices
    assert echoed.text == prompt + plain.text
    values = echoed.logprobs.token_logprobs
    assert values[0] is None
    assert values[1:] == ours.prompt_logprobs.token_logprobs + known.token_logprobs
    only = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}
    scored = (await http.post("/v1/completions", json=only)).json()
    assert scored["choices"][0]["text"] == prompt and scored["usage"]["completion_tokens"] == 0
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(ours.prompt_ids) == scored["usage"]["prompt_tokens"]
    async with http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": prompt, "echo": True, "stream": True, "temperature": 0, "max_tokens": 20},
    ) as response:
        texts = [event["choices"][0]["text"] for event in await events_of(response) if event]
    assert texts[0] == prompt and "".join(texts) == echoed.text


async def test_logprobs_of_a_prompt_as_vllm_tells_them(http: httpx.AsyncClient) -> None:
    body = {"prompt": "The Tyger, burning", "temperature": 0, "max_tokens": 3}
    echoed = (await http.post("/v1/completions", json={**body, "echo": True, "logprobs": 3})).json()["choices"][0]
    num_prompt = len(echoed["logprobs"]["tokens"]) - 3
    asked = {**body, "logprobs": 1, "prompt_logprobs": 3, "n": 2, "return_token_ids": True}
    for choice in (await http.post("/v1/completions", json=asked)).json()["choices"]:
        told, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
        assert told[0] is None and len(told) == len(ids) == num_prompt
        own = [entries[str(token)] for entries, token in zip(told[1:], ids[1:], strict=True)]
        assert [entry["logprob"] for entry in own] == pytest.approx(echoed["logprobs"]["token_logprobs"][1:num_prompt])
        assert [entry["decoded_token"] for entry in own] == echoed["logprobs"]["tokens"][1:num_prompt]
        for entries, token in zip(told[1:], ids[1:], strict=True):
            ranks = {entry["rank"]: entry["logprob"] for entry in entries.values()}
            assert ranks[1] >= ranks[2] >= ranks[3] and len(entries) == 3 + (entries[str(token)]["rank"] is None)
        # The output's have as many alternatives as were asked for.
        assert len(choice["logprobs"]["tokens"]) == 3 and {len(top) for top in choice["logprobs"]["top_logprobs"]} == {
            1
        }
    alone = (await http.post("/v1/completions", json={**body, "prompt_logprobs": 0})).json()["choices"][0]
    assert alone["logprobs"] is None and {len(entries) for entries in alone["prompt_logprobs"][1:]} == {1}
    large = {"prompt": ["a " * 1000] * 5, "max_tokens": 1, "prompt_logprobs": 60}
    answer = await http.post("/v1/completions", json=large)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "prompt_logprobs"), answer.text[:200]
    echoed = {"prompt": large["prompt"], "max_tokens": 1, "echo": True, "logprobs": 60}
    answer = await http.post("/v1/completions", json=echoed)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "logprobs"), answer.text[:200]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 2}
    answer = (await http.post("/v1/chat/completions", json={**chat, "return_token_ids": True})).json()
    assert (
        len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) and answer["choices"][0]["logprobs"] is None
    )
    beside = (await http.post("/v1/chat/completions", json={**chat, "logprobs": True, "top_logprobs": 1})).json()
    assert [len(entry["top_logprobs"]) for entry in beside["choices"][0]["logprobs"]["content"]] == [1, 1]
    for path, fields in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        for more, code in (({"prompt_logprobs": 10_000}, "INVALID_ARGUMENT"), ({"stream": True}, "UNSUPPORTED")):
            answer = (await http.post(path, json={**fields, "prompt_logprobs": 1, **more})).json()["error"]
            assert (answer["code"], answer["param"]) == (code, "prompt_logprobs"), answer


async def test_completions_tell_their_ids(mesh: Mesh, http: httpx.AsyncClient) -> None:
    prompts = ["The Tyger", "古池"]
    known = [await mesh.client.complete(prompt, temperature=0, max_tokens=9, n=2) for prompt in prompts]
    want = {
        2 * index + output.index: (one.prompt_ids, output.ids)
        for index, one in enumerate(known)
        for output in one.outputs
    }
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 9, "n": 2, "return_token_ids": True}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert {c["index"]: (c["prompt_token_ids"], c["token_ids"]) for c in whole} == want
    for more in ({}, {"echo": True}, {"logprobs": 1}):
        streamed: dict[int, tuple[list[int], list[int]]] = {}
        async with http.stream("POST", "/v1/completions", json={**body, **more, "stream": True}) as response:
            for event in await events_of(response):
                for choice in event.get("choices", ()):
                    if choice["index"] not in streamed:
                        streamed[choice["index"]] = (choice["prompt_token_ids"], [])
                    else:
                        assert choice["prompt_token_ids"] is None
                    streamed[choice["index"]][1].extend(choice["token_ids"])
        assert streamed == want
    plain = (await http.post("/v1/completions", json={**body, "return_token_ids": False})).json()["choices"]
    assert "token_ids" not in plain[0]


async def test_chat_logprobs_carry_bytes(sdk: AsyncOpenAI) -> None:
    job = next(job for job in CHATS if job.name == "chat.emoji")
    options = {"model": NAME, "messages": job.messages, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    (choice,) = (await sdk.chat.completions.create(**options)).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert len(content) == len(job.answers[0].ids)
    data = b"".join(bytes(entry.bytes or ()) for entry in content)
    assert data.decode().startswith(job.answers[0].text)  # The id that ends the turn is told too.
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob for entry in content)
    streamed = []
    async for chunk in await sdk.chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == content


async def test_chat_outputs_and_limits(sdk: AsyncOpenAI) -> None:
    job = CHATS[0]
    limited = await sdk.chat.completions.create(
        model=NAME, messages=job.messages, temperature=0, n=3, max_completion_tokens=4
    )
    assert [choice.index for choice in limited.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in limited.choices} == {"length"}
    assert {choice.message.content for choice in limited.choices} == {limited.choices[0].message.content}
    assert limited.usage is not None and limited.usage.completion_tokens == 12
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in job.messages]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    same = await sdk.chat.completions.create(model=NAME, messages=parts, temperature=0, tools=tools)
    assert same.choices[0].message.content == job.answers[0].text
    opened = [*job.messages, {"role": "assistant", "content": job.answers[0].text[:5]}]
    rest = await sdk.chat.completions.create(
        model=NAME, messages=opened, temperature=0, extra_body={"continue_final_message": True}
    )
    assert job.answers[0].text.startswith(job.answers[0].text[:5] + (rest.choices[0].message.content or "?"))


async def test_native_generate(mesh: Mesh, http: httpx.AsyncClient) -> None:
    job, other = TEXTS[0], TEXTS[1]
    params = {"temperature": 0, "max_new_tokens": LONG}
    single = (await http.post("/generate", json={"text": job.prompt, "sampling_params": params})).json()
    assert (single["text"], tuple(single["output_ids"])) == (job.answers[0].text, job.answers[0].ids)
    assert single["meta_info"]["finish_reason"] == {"type": "stop", "matched": job.answers[0].ids[-1]}
    assert single["meta_info"]["completion_tokens"] == len(job.answers[0].ids)
    prompt_ids = (await http.post("/tokenize", json={"prompt": job.prompt})).json()["tokens"]
    known = await mesh.client.complete(job.prompt, temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=True)
    told = await http.post(
        "/generate",
        json={
            "input_ids": prompt_ids, "sampling_params": {"temperature": 0, "max_new_tokens": 5}, "return_logprob": True,
            "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True,
        },
    )  # fmt: skip
    meta = told.json()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    logprobs = known.outputs[0].logprobs
    assert logprobs is not None and known.prompt_logprobs is not None
    values = [value for value, _, _ in meta["output_token_logprobs"]]
    assert values == logprobs.token_logprobs
    assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt_ids
    assert meta["input_token_logprobs"][0][0] is None
    values = [value for value, _, _ in meta["input_token_logprobs"][1:]]
    assert values == known.prompt_logprobs.token_logprobs
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 5
    batch = {"text": [job.prompt, other.prompt], "sampling_params": [params, {**params, "n": 2}]}
    entries = (await http.post("/generate", json=batch)).json()
    assert [e["text"] for e in entries] == [job.answers[0].text, other.answers[0].text, other.answers[0].text]


@pytest.mark.parametrize("incremental", [False, True])
async def test_native_streams(http: httpx.AsyncClient, incremental: bool) -> None:
    job, other = TEXTS[0], TEXTS[1]
    body = {
        "text": [job.prompt, other.prompt], "sampling_params": {"temperature": 0, "max_new_tokens": LONG},
        "stream": True, "incremental": incremental, "return_logprob": True,
    }  # fmt: skip
    async with http.stream("POST", "/generate", json=body) as response:
        events = await events_of(response)
    assert events.pop() == {}
    for index, expected in enumerate((job, other)):
        mine = [event for event in events if event["index"] == index]
        assert len(mine) > 1, "a busy machine merges pieces, but not all of them"
        texts, ids = [event["text"] for event in mine], [event["output_ids"] for event in mine]
        num_logprobs = [len(event["meta_info"]["output_token_logprobs"]) for event in mine]
        assert num_logprobs == list(map(len, ids))
        if incremental:
            assert "".join(texts) == expected.answers[0].text
            assert tuple(i for part in ids for i in part) == expected.answers[0].ids
        else:
            assert texts[-1] == expected.answers[0].text and tuple(ids[-1]) == expected.answers[0].ids
            assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert mine[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        assert mine[-1]["meta_info"]["completion_tokens"] == len(expected.answers[0].ids)


async def test_texts_and_models(sdk: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    text = "naïve café 日本 <|user|>"
    encoded = (await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert encoded["count"] == len(encoded["tokens"]) and encoded["max_model_len"] == 2048
    kept = {"tokens": encoded["tokens"], "skip_special_tokens": False}
    assert (await http.post("/detokenize", json=kept)).json() == {"text": text, "prompt": text}
    two = (await http.post("/tokenize", json={"prompt": [text, ""], "add_special_tokens": False})).json()["tokens"]
    assert two == [encoded["tokens"], []]
    texts = ["naïve café 日本 ", ""]
    assert (await http.post("/detokenize", json={"tokens": two})).json() == {"text": texts, "prompt": texts}
    spelt = (await http.post("/tokenize", json={"prompt": "The Tyger", "return_token_strs": True})).json()
    assert len(spelt["token_strs"]) == len(spelt["tokens"]) and "".join(spelt["token_strs"]).endswith("The Tyger")
    messages = CHATS[0].messages
    chat = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    used = await sdk.chat.completions.create(model=NAME, messages=messages, max_tokens=1)
    assert used.usage is not None and used.usage.prompt_tokens == len(chat)
    assert [model.id async for model in sdk.models.list()] == [NAME]
    assert (await sdk.models.retrieve(NAME)).id == NAME
    with pytest.raises(openai.NotFoundError) as raised:
        await sdk.models.retrieve("some/other")
    assert raised.value.code == "model_not_found"
    assert (await http.get("/health")).json() == {"status": "serving"}
    assert "radixmesh_output_tokens_total" in (await http.get("/metrics")).text


async def test_embeddings_equal_transformers(sdk: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()
    texts = ["The Tyger", "Lorelei, a siren on a rock in the Rhine", "古池"]
    lists = (await http.post("/tokenize", json={"prompt": texts})).json()["tokens"]
    # A prompt that the prefix cache holds gives the same vector.
    await sdk.completions.create(model=NAME, prompt=texts[0], max_tokens=1)
    for given in (texts, lists):
        answer = await sdk.embeddings.create(model=NAME, input=given)
        assert answer.usage.prompt_tokens == sum(map(len, lists))
        for ids, entry in zip(lists, answer.data, strict=True):
            with torch.inference_mode():
                hidden = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
            atol = model_tolerance(model.config, len(ids), float(hidden.abs().max()))
            np.testing.assert_allclose(entry.embedding, hidden.numpy(), rtol=0, atol=atol)
    as_floats = await sdk.embeddings.create(model=NAME, input=texts[0], encoding_format="float")
    as_base64 = (await sdk.embeddings.create(model=NAME, input=texts[0])).data[0].embedding
    np.testing.assert_array_equal(np.float32(as_floats.data[0].embedding), np.float32(as_base64))
    empty = await http.post("/v1/embeddings", json={"input": []})
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "EMPTY_PROMPT")


async def test_as_many_embeddings_as_openai_takes(http: httpx.AsyncClient) -> None:
    """Each vector at its index: equal inputs have the same, but for rounding."""
    texts = ["a", "b c", "d"]
    given = [texts[i % 3] for i in range(2048)]
    body = {"input": given, "encoding_format": "base64"}
    answer = await http.post("/v1/embeddings", json=body, timeout=120)
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(2048))
    vectors = np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])
    size = float(np.abs(vectors).max())
    for start in range(3):
        np.testing.assert_allclose(
            vectors[start::3], vectors[[start]].repeat(len(vectors[start::3]), 0), atol=1e-3 * size
        )
        assert np.abs(vectors[start] - vectors[(start + 1) % 3]).max() > 1e-2 * size
    refused = await http.post("/v1/embeddings", json={"input": [*given, "e"]})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "INVALID_ARGUMENT", "input")


async def test_unknown_fields_are_named_in_a_header(http: httpx.AsyncClient) -> None:
    """Those alone that change nothing: accounting, and what asks for nothing."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "max_tokens": 1, "user": "u", "no_such_field": None, "weird\r\nname": False}
    answer = await http.post("/v1/completions", json={**body, "stream_options": options})
    assert answer.status_code == 200
    expected = "user, no_such_field, stream_options.continuous_usage_stats"
    assert answer.headers["x-radixmesh-ignored-fields"] == expected
    message = {"role": "user", "content": "x", "mood": "good"}
    answer = await http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
    assert answer.headers["x-radixmesh-ignored-fields"] == "messages.mood"


async def test_a_given_id_names_the_request(mesh: Mesh, http: httpx.AsyncClient) -> None:
    body = {"prompt": "The Tyger", "temperature": 0, "stream": True, "max_tokens": LONG, "request_id": "mine-1"}
    async with http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
        assert response.headers["x-request-id"] == "mine-1"
        # A reader that is dropped closes its connection, which ends the request.
        lines = response.aiter_lines()
        await anext(lines)
        twice = await http.post("/v1/completions", json=body)
        assert (twice.status_code, twice.json()["error"]["code"]) == (409, "DUPLICATE_REQUEST")
        assert await mesh.client.abort("mine-1")
        rest = [line async for line in lines if line]
        assert '"code":"ABORTED"' in rest[-1]
