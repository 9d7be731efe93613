"""A router with the vocabulary in its own process: ids and texts as through daemons, whatever dies or fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.router_mesh import TINY, RouterMesh, connected, oracle_ids, oracle_text, router_mesh

from radixmesh.client import AsyncClient, Completion
from radixmesh.daemons.router import router as router_module
from radixmesh.daemons.router.peers import local_detokenizer
from radixmesh.daemons.router.peers.local_detokenizer import LocalDetokenizer
from radixmesh.daemons.runtime.detokenize.frames import read_tokens
from radixmesh.daemons.runtime.detokenize.messages import TokenBatch
from radixmesh.detokenizer.v1 import detokenizer_pb2

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

        def fail_once(message: detokenizer_pb2.TokenRows) -> TokenBatch:
            nonlocal num_frames
            num_frames += 1
            if num_frames == 12:
                raise RuntimeError("a bug of one output")
            return read_tokens(message)

        monkeypatch.setattr(local_detokenizer, "read_tokens", fail_once)
        await run_many(client, range(100, 108))
        assert num_frames == 12 and not local(mesh).is_connected
        await run_many(client, range(200, 204))
        await mesh.settle()


@pytest.mark.parametrize("seed", range(2))
async def test_daemons_die_at_random_and_no_token_is_lost_or_repeated(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    counts = {"tokenizers": 2, "detokenizers": 2, "schedulers": 2, "routers": 2, "local_outputs": 6}
    async with mesh_with_text(monkeypatch, **counts) as mesh, mesh.client(resume_timeout_s=30) as client:
        for fake in mesh.fakes:
            fake.step_s = 0.004

        async def kill_some() -> None:
            for _ in range(10):
                await asyncio.sleep(rng.uniform(0.01, 0.08))
                member = rng.choice(mesh.members)
                await member.kill()
                await asyncio.sleep(rng.uniform(0, 0.05))
                await member.start()

        killer = asyncio.create_task(kill_some())
        rounds = 0
        while not killer.done():
            await run_many(client, range(1000 * seed + 20 * rounds, 1000 * seed + 20 * rounds + 16))
            rounds += 1
        await killer
        for i in range(2):
            await connected(mesh.router(i))
        await run_many(client, range(4))
        await mesh.settle()
