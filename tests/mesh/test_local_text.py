"""A router with the vocabulary in its own process: ids and texts as through daemons, whatever dies or fails."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.router_mesh import TINY, RouterMesh, live_through_deaths, oracle_ids, oracle_text, router_mesh

from radixmesh.client import AsyncClient, Completion, RadixMeshError
from radixmesh.daemons.router import router as router_module
from radixmesh.daemons.router.peers import local_detokenizer
from radixmesh.daemons.router.peers.local_detokenizer import LocalDetokenizer
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.runtime.detokenize.messages import TokenBatch

PROMPT = [5, 6, 7, 8]
MAX_TOKENS = 40


@asynccontextmanager
async def mesh_with_text(monkeypatch: pytest.MonkeyPatch, **settings: object) -> AsyncIterator[RouterMesh]:
    monkeypatch.setattr(router_module, "LOAD_AFTER_S", 0.0)
    async with router_mesh(tokenizer_path=TINY, **settings) as mesh:  # type: ignore[arg-type]
        for i in range(len(mesh.routers)):
            await ready(mesh, i)
        yield mesh


async def ready(mesh: RouterMesh, i: int = 0) -> None:
    async with asyncio.timeout(60):
        while not mesh.router(i).has_text:
            await asyncio.sleep(0.005)


def local(mesh: RouterMesh, i: int = 0) -> LocalDetokenizer:
    found = mesh.router(i).detokenizers.local
    assert found is not None
    return found


def check(done: Completion, seed: int, stops: tuple[str, ...] = ()) -> None:
    for output in done.outputs:
        text, counted, stop = oracle_text(oracle_ids(PROMPT, seed, MAX_TOKENS, index=output.index), PROMPT, stops)
        assert (output.ids, output.text) == (counted, text)
        assert output.finish is not None and output.finish.stop == stop


async def run_many(client: AsyncClient, seeds: range) -> None:
    async def one(seed: int) -> None:
        text = oracle_text(oracle_ids(PROMPT, seed, MAX_TOKENS), PROMPT)[0]
        stops = (text[-6:-2],) if seed % 3 == 0 and len(text) > 20 else ()
        done = await client.complete(PROMPT, seed=seed, max_tokens=MAX_TOKENS, n=1 + (seed % 4 == 0), stop=stops)
        check(done, seed, stops)

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(seed) for seed in seeds))


async def test_a_request_needs_neither_tokenizer_nor_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_with_text(monkeypatch) as mesh, mesh.client() as client:
        expected = await client.complete("the end", seed=1, max_tokens=8)
        await asyncio.gather(mesh.tokenizers[0].kill(), mesh.detokenizers[0].kill())
        done = await client.complete("the end", seed=1, max_tokens=8)
        assert (done.prompt_ids, done.outputs[0].text) == (expected.prompt_ids, expected.outputs[0].text)


@pytest.mark.parametrize("seed", range(3))
async def test_options_give_the_same_here_as_through_the_daemons(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Ids, texts, stops and logprobs of random requests, some with more stop strings than are looked for here."""
    rng = random.Random(seed)
    requests: list[tuple[dict[str, object], dict[str, object]]] = []
    for number in range(40):
        text = oracle_text(oracle_ids(PROMPT, number, MAX_TOKENS), PROMPT)[0]
        cuts = [rng.randrange(len(text)) for _ in range(rng.choice([0, 1, 3, 12]))] if text else []
        options = {
            "seed": number,
            "n": rng.choice([1, 1, 3]),
            "max_tokens": rng.randrange(1, MAX_TOKENS),
            "temperature": rng.choice([0.0, 1.0]),
            "stop": [text[cut : cut + rng.randrange(1, 5)] for cut in cuts],
            "include_stop": rng.choice([True, False]),
            "skip_special_tokens": rng.choice([True, False]),
            "ignore_eos": rng.choice([True, False]),
        }
        if rng.random() < 0.3:
            options["logprobs"] = 0
        prompts = ["the end", "", "\u00e9\u4e16\U0001f600 \n\n\t x", "a b " * 60]
        asked = {"prompt": PROMPT} if rng.random() < 0.5 else {"prompt": rng.choice(prompts)}
        if rng.random() < 0.3:
            asked = {"messages": [{"role": "user", "content": rng.choice(prompts) or "x"}]}
        requests.append((asked, options))

    async def answers(client: AsyncClient) -> list[object]:
        async def one(asked: dict[str, object], options: dict[str, object]) -> object:
            try:
                done = await client.complete(**asked, **options)  # type: ignore[arg-type]
            except RadixMeshError as error:
                return type(error), str(error)
            return done.prompt_ids, done.outputs

        async with asyncio.timeout(60):
            return [await one(*request) for request in requests]

    async with router_mesh() as mesh, mesh.client() as client:
        expected = await answers(client)
    takes, taken = LocalDetokenizer.takes, collections.Counter[bool]()

    def counted(link: LocalDetokenizer, output: Output) -> bool:
        is_taken = takes(link, output)
        taken[is_taken] += 1
        return is_taken

    monkeypatch.setattr(LocalDetokenizer, "takes", counted)
    async with mesh_with_text(monkeypatch) as mesh, mesh.client() as client:
        await mesh.tokenizers[0].kill()
        assert await answers(client) == expected
        assert sum(isinstance(answer, tuple) and isinstance(answer[0], list) for answer in expected) > 20
        assert taken[True] > 20 and taken[False] > 3
        await mesh.settle()


async def test_more_outputs_than_are_decoded_here_go_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_with_text(monkeypatch, local_outputs=4) as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.003
        most_here = most_there = 0

        async def watch() -> None:
            nonlocal most_here, most_there
            while True:
                most_here = max(most_here, local(mesh).num_entries)
                most_there = max(most_there, mesh.router().detokenizers.links[0].num_entries)
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        for start in range(0, 60, 20):
            await run_many(client, range(start, start + 20))
        watching.cancel()
        assert most_here == 4 and most_there > 4
        await mesh.settle()


async def test_outputs_go_on_at_the_daemon_when_decoding_here_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_with_text(monkeypatch) as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.003
        await run_many(client, range(4))
        num_frames = 0

        def fail_once(**columns: Any) -> TokenBatch:
            nonlocal num_frames
            num_frames += 1
            if num_frames == 12:
                raise RuntimeError("a bug of one output")
            return TokenBatch(**columns)

        monkeypatch.setattr(local_detokenizer, "TokenBatch", fail_once)
        await run_many(client, range(100, 108))
        assert num_frames == 12 and not local(mesh).is_connected
        await run_many(client, range(200, 204))
        await mesh.settle()


@pytest.mark.parametrize("seed", range(2))
async def test_daemons_die_at_random_and_no_token_is_lost_or_repeated(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    counts = {"tokenizers": 2, "detokenizers": 2, "schedulers": 2, "routers": 2, "local_outputs": 6}
    async with mesh_with_text(monkeypatch, **counts) as mesh, mesh.client(resume_timeout_s=30) as client:
        await live_through_deaths(mesh, seed, lambda seeds: run_many(client, seeds))
