"""Ranks of a model divided among CPUs, behind one scheduler over gRPC: the tiny models recite, however work is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.cpu_ranks import NUM_TOKENS, TIMEOUT_S, Ranks, ranks_of, recited, scheduler_on, texts
from support.serve_client import serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.daemons.scheduler.group.group_stream import GroupStream
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.collectives.member import CollectiveMember


async def check_recitations(model: str, tp_size: int, dp_size: int, page_size: int, num_texts: int) -> None:
    """In chunks, with retraction, and again from the cache: tokens, and logprobs to the bit."""
    chosen = texts(model, num_texts)
    pages = NUM_TOKENS // page_size // dp_size
    async with ranks_of(model, tp_size, dp_size, num_pages=pages, page_size=page_size) as ranks:
        async with scheduler_on(ranks) as daemon, serve_client(daemon.address) as client:
            cold = await recited(client, chosen)
            again = await recited(client, chosen)
            assert [seen.logprobs for seen in again] == [seen.logprobs for seen in cold]
            # Few large pages: each text evicts the one before it. One whose prompt has a page stays for its next turn.
            number = max(range(num_texts), key=lambda i: len(chosen[i].prompt))
            for _ in range(2):
                (alone,) = await recited(client, [chosen[number]])
                assert alone.logprobs == cold[number].logprobs
            counters = daemon.daemon.loop.planner.counters
            assert counters.num_retracted and counters.cached_tokens, repr(counters)
        cores = [ranks.workers[rank].daemon.core for rank in range(tp_size * dp_size)]
        assert {core.ledger.group_generation for core in cores} == {1}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "tp_size", "dp_size", "page_size"),
    [
        ("tiny-llama", 2, 1, 1),
        ("tiny-deepseek", 2, 1, 16),
        pytest.param("tiny-llama", 4, 1, 16, marks=pytest.mark.full),
        pytest.param("tiny-deepseek", 4, 1, 1, marks=pytest.mark.full),
        pytest.param("tiny-llama", 2, 2, 1, marks=pytest.mark.full),
        pytest.param("tiny-deepseek", 2, 2, 16, marks=pytest.mark.full),
    ],
)
async def test_the_tiny_models_recite(model: str, tp_size: int, dp_size: int, page_size: int) -> None:
    await check_recitations(model, tp_size, dp_size, page_size, num_texts=6)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "tp_size"),
    [
        ("tiny-llama", 2),
        pytest.param("tiny-deepseek", 2, marks=pytest.mark.full),
        pytest.param("tiny-llama", 4, marks=pytest.mark.full),
        pytest.param("tiny-deepseek", 4, marks=pytest.mark.full),
    ],
)
async def test_an_output_resumes_at_every_cut(model: str, tp_size: int) -> None:
    """Greedy, and sampled: what comes after a cut is what came without one, to the bit of its logprobs."""
    (text,) = texts(model, 1)
    sampled = common_pb2.SamplingParams(temperature=1.0, seed=9, num_top_logprobs=1)
    greedy = common_pb2.SamplingParams(temperature=0.0, num_top_logprobs=1)
    async with ranks_of(model, tp_size) as ranks, scheduler_on(ranks) as daemon, serve_client(daemon.address) as client:
        for sampling in (greedy, sampled):
            num = len(text.expected)
            whole = await client.submit(text.prompt, max_tokens=num, sampling=sampling)
            (first,) = await client.over(whole, timeout_s=TIMEOUT_S)
            if sampling is greedy:
                assert first.tokens == text.expected
            num = len(first.tokens)
            handles = [
                await client.submit(text.prompt, max_tokens=num, sampling=sampling, resumed=first.tokens[:cut])
                for cut in range(1, num)
            ]
            for cut, seen in enumerate(await client.over(*handles, timeout_s=TIMEOUT_S), 1):
                assert seen.tokens == first.tokens[cut:] and seen.logprobs == first.logprobs[cut:]


async def go(ranks: Ranks, rank: int) -> None:
    await ranks.restart(rank)


async def lose_a_write(ranks: Ranks, rank: int) -> None:
    """The stream to one rank breaks: the others may have a plan that it lacks, and wait for it in a collective."""
    holder = ranks.workers[rank].daemon.core.holder
    if holder is not None:
        holder.close()
        holder.fail(RuntimeError("cut"))


async def seem_lost(ranks: Ranks, rank: int) -> None:
    """The other rank takes it for hung, as after a long pause of its process."""
    member = ranks.workers[1 - rank].daemon.core.member
    assert isinstance(member, CollectiveMember) and isinstance(member.group.communicator, GlooCommunicator)
    member.group.communicator.heartbeat.lost = f"rank {rank} has been silent"


@pytest.mark.parametrize(
    ("mishap", "rank"),
    [
        (go, 0),
        (lose_a_write, 1),
        (seem_lost, 1),
        *(pytest.param(*of, marks=pytest.mark.full) for of in ((go, 1), (seem_lost, 0))),
    ],
)
async def test_a_mishap_while_texts_are_recited(mishap: Callable[[Ranks, int], Awaitable[None]], rank: int) -> None:
    chosen = texts("tiny-llama", 6)
    async with (
        ranks_of("tiny-llama", 2) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        reciting = asyncio.ensure_future(recited(client, chosen, num_logprobs=None))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        await mishap(ranks, rank)
        await reciting
        core = ranks.workers[1 - rank].daemon.core
        assert mishap is lose_a_write or core.ledger.group_generation > 1, "the survivor has joined again"
        await recited(client, chosen[:2])


async def test_a_scheduler_that_dies_between_two_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a collective for rank 1, which has not got the plan: the next scheduler sends it."""
    (text,) = texts("tiny-llama", 1)
    is_dead, send, num_sent = asyncio.Event(), GroupStream.send, 0

    async def send_to_one(self: GroupStream, plan: StepPlan) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent < 12:
            return await send(self, plan)
        await self.rank_streams[0].send(encode_plan(plan, self._completed_step, 1, self._slots_per_rank))
        is_dead.set()
        await asyncio.Event().wait()

    async with ranks_of("tiny-llama", 2) as ranks:
        monkeypatch.setattr(GroupStream, "send", send_to_one)
        async with scheduler_on(ranks, "one") as daemon, serve_client(daemon.address) as client:
            await client.submit(text.prompt, max_tokens=len(text.expected))
            async with asyncio.timeout(TIMEOUT_S):
                await is_dead.wait()
            seen = client.seen[1].tokens
        monkeypatch.undo()
        ledgers = [ranks.workers[rank].daemon.core.ledger for rank in (0, 1)]
        assert ledgers[0].last_received_step == ledgers[1].last_received_step + 1
        async with scheduler_on(ranks, "two") as daemon, serve_client(daemon.address, "b") as client:
            handle = await client.submit(text.prompt, max_tokens=len(text.expected), resumed=seen)
            (output,) = await client.over(handle, timeout_s=TIMEOUT_S)
            assert seen + output.tokens == text.expected
            assert daemon.daemon.loop.planner.counters.adopted_tokens > 0
        assert [ledger.group_generation for ledger in ledgers] == [1, 1], "the KV was good: nobody formed a new group"
