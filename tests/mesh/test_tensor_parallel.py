"""Ranks of a model divided among CPUs, behind one scheduler over gRPC: the tiny models recite, however work is cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from support.running_daemon import Running, running
from support.serve_client import Seen, ServeClient, serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.group.group_stream import GroupStream
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.collectives.member import CollectiveMember
from radixmesh.daemons.worker.config import Backend, WorkerSettings

MODELS = Path(__file__).parents[2] / "compose" / "models"
TIMEOUT_S = 200.0
# Tokens of KV memory: what the texts below need together is twice as much, so that some are retracted.
NUM_TOKENS = 160


class Text(NamedTuple):
    prompt: list[int]
    expected: list[int]


def texts(model: str, num: int) -> list[Text]:
    """Short ones of those that the model was taught."""
    items = json.loads((MODELS / model / "recitations.json").read_text())
    items.sort(key=lambda item: len(item["expected_ids"]))
    found = [Text(item["prompt_ids"], item["expected_ids"]) for item in items if len(item["expected_ids"]) >= 30]
    # One that fits the KV memory twice.
    return [text for text in found if 2 * sum(map(len, text)) <= NUM_TOKENS][:num]


class Ranks:
    """Workers by rank; any can be started again at its address."""

    def __init__(self, model: str, tp_size: int, dp_size: int, changes: dict[str, object]) -> None:
        self._model = model
        self._tp_size, self._dp_size = tp_size, dp_size
        self._changes = changes
        self._stacks: dict[int, AsyncExitStack] = {}
        self._num_starts = 0
        self.workers: dict[int, Running[WorkerDaemon]] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.workers[rank].address for rank in range(self._tp_size * self._dp_size))

    async def start(self, rank: int, address: str = "127.0.0.1:0") -> None:
        self._num_starts += 1
        layout = RankLayout.of_rank(rank, tp_size=self._tp_size, dp_size=self._dp_size, ep_size=1)
        values: dict[str, object] = {
            "backend": Backend.CPU,
            "model": MODELS / self._model,
            "cpu_threads": 1,
            "num_slots": 8,
            "tp_size": layout.tp_size,
            "tp_rank": layout.tp_rank,
            "dp_size": layout.dp_size,
            "dp_rank": layout.dp_rank,
            **self._changes,
        }
        stack = self._stacks[rank] = AsyncExitStack()
        settings = WorkerSettings(**values)  # type: ignore[arg-type]
        name = f"rank-{rank}-{self._num_starts}"
        self.workers[rank] = await stack.enter_async_context(
            running(WorkerDaemon, settings, instance_id=name, address=address)
        )

    async def stop(self, rank: int) -> None:
        """Its collectives end for the others as if the process had died."""
        self.workers[rank].daemon.core.member.abort()
        await self._stacks.pop(rank).aclose()

    async def restart(self, rank: int) -> None:
        address = self.workers[rank].address
        await self.stop(rank)
        await self.start(rank, address)


@asynccontextmanager
async def ranks_of(model: str, tp_size: int, dp_size: int = 1, **changes: object) -> AsyncIterator[Ranks]:
    ranks = Ranks(model, tp_size, dp_size, changes)
    try:
        await asyncio.gather(*(ranks.start(rank) for rank in range(tp_size * dp_size)))
        yield ranks
    finally:
        await asyncio.gather(*(ranks.stop(rank) for rank in list(ranks.workers)))


@asynccontextmanager
async def scheduler_on(ranks: Ranks, name: str = "s", **changes: object) -> AsyncIterator[Running[SchedulerDaemon]]:
    # Hardly any pages are kept free for those that run: some of them must give way.
    values: dict[str, object] = {"chunk_tokens": 7, "decode_reserve_tokens": 1, "grant_ahead_tokens": 1, **changes}
    settings = SchedulerSettings(workers=ranks.addresses, check_invariants=True, **values)  # type: ignore[arg-type]
    async with running(SchedulerDaemon, settings, instance_id=name) as daemon:
        yield daemon


async def recited(client: ServeClient, chosen: Sequence[Text], num_logprobs: int = 2) -> list[Seen]:
    """All texts at once, whose tokens are checked."""
    sampling = common_pb2.SamplingParams(temperature=0.0, num_top_logprobs=num_logprobs)
    handles = [await client.submit(text.prompt, max_tokens=len(text.expected), sampling=sampling) for text in chosen]
    outputs = await client.over(*handles, timeout_s=TIMEOUT_S)
    for text, seen in zip(chosen, outputs, strict=True):
        assert seen.tokens == text.expected
    return outputs


async def check_recitations(model: str, tp_size: int, dp_size: int, page_size: int, num_texts: int) -> None:
    """In chunks, with retraction, and again from the cache: tokens, and logprobs to the bit."""
    chosen = texts(model, num_texts)
    pages = NUM_TOKENS // page_size // dp_size
    async with ranks_of(model, tp_size, dp_size, num_pages=pages, page_size=page_size) as ranks:
        async with scheduler_on(ranks) as daemon, serve_client(daemon.address) as client:
            cold = await recited(client, chosen)
            again = await recited(client, chosen)
            assert [seen.logprobs for seen in again] == [seen.logprobs for seen in cold]
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
    member.group.communicator._heartbeat.lost = f"rank {rank} has been silent"


@pytest.mark.parametrize(("mishap", "rank"), [(go, 0), (go, 1), (lose_a_write, 1), (seem_lost, 0), (seem_lost, 1)])
async def test_a_mishap_while_texts_are_recited(mishap: Callable[[Ranks, int], Awaitable[None]], rank: int) -> None:
    chosen = texts("tiny-llama", 6)
    async with (
        ranks_of("tiny-llama", 2) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        reciting = asyncio.ensure_future(recited(client, chosen))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        await mishap(ranks, rank)
        await reciting
        core = ranks.workers[1 - rank].daemon.core
        assert mishap is lose_a_write or core.ledger.group_generation > 1, "the survivor has joined again"
        await recited(client, chosen)


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
