"""Schedulers on groups of simulated ranks in lock-step: whatever befalls them, the outputs are the same."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.plans import first_plan
from support.rank_group import VOCAB_SIZE, RankGroup, rank_group, with_other_tokens
from support.running_daemon import Running, running
from support.serve_client import Seen, ServeClient, serve_client

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.runtime.steps.step_codec import encode_plan, encode_plans
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.group import group_client, group_stream, rank_hellos
from radixmesh.daemons.scheduler.group.group_client import ClaimedGroup, GroupClient, GroupState
from radixmesh.daemons.scheduler.group_service import grpc_connect
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.worker.v1 import worker_pb2

PROMPT = list(range(3, 20))
TIMEOUT_S = 60.0


def expected(prompt: list[int], num: int) -> list[int]:
    return simulated_continuation(prompt, num, alphabet=Alphabet.of(VOCAB_SIZE))


@asynccontextmanager
async def scheduler(group: RankGroup, name: str = "s", *, load: bool = True) -> AsyncIterator[Running[SchedulerDaemon]]:
    settings = SchedulerSettings(workers=group.addresses, check_invariants=True, chunk_tokens=8)
    async with running(SchedulerDaemon, settings, instance_id=name, load=load) as daemon:
        yield daemon


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.01)


async def submit_many(client: ServeClient, num: int = 6, max_tokens: int = 60) -> list[int]:
    return [await client.submit(PROMPT[: 5 + i], max_tokens=max_tokens) for i in range(num)]


def check(seen: list[Seen], max_tokens: int = 60) -> None:
    for i, output in enumerate(seen):
        assert output.tokens == expected(PROMPT[: 5 + i], max_tokens)


async def in_the_middle(client: ServeClient, handle: int, num: int = 15) -> None:
    await client.until(lambda: len(client.seen[handle].tokens) >= num, TIMEOUT_S)


@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_all_ranks_compute_every_step_and_one_output_comes(num_ranks: int) -> None:
    async with rank_group(num_ranks) as group, scheduler(group) as daemon, serve_client(daemon.address) as client:
        handles = await submit_many(client)
        check(await client.over(*handles, timeout_s=TIMEOUT_S))
        cores = [group.ranks[rank].daemon.core for rank in range(num_ranks)]
        await until(lambda: len({core.ledger.last_completed_step for core in cores}) == 1)  # Heartbeats go on.
        assert [core.ledger.group_generation for core in cores] == [1] * num_ranks
        assert all(len(core.retained) <= 2 * core.config.max_plans_in_flight for core in cores)
        assert daemon.daemon.loop.epoch == 1


@pytest.mark.parametrize("num_left", [1, 2])
async def test_a_group_whose_forming_was_cut_off_is_formed_again(num_left: int) -> None:
    """Ranks that have left report no generation, and still refuse those they have seen."""
    async with rank_group(2) as group:
        async with scheduler(group, "s1") as daemon, serve_client(daemon.address) as client:
            check(await client.over(await client.submit(PROMPT[:5], max_tokens=60), timeout_s=TIMEOUT_S))
        for rank in range(num_left):
            group.ranks[rank].daemon.core.ledger.formed(0)
        async with scheduler(group, "s2") as daemon, serve_client(daemon.address) as client:
            check(await client.over(await client.submit(PROMPT[:5], max_tokens=60), timeout_s=TIMEOUT_S))


async def refuse(group: RankGroup, rank: int) -> None:
    """Its next plan; the other ranks wait for it in a collective."""
    core = group.ranks[rank].daemon.core
    core.plan_runner.executor.last_step += 1


async def lag(group: RankGroup, rank: int) -> None:
    inner, member = group.member(rank).all_gather, group.member(rank)

    def late(value: object) -> list[object]:
        member.all_gather = inner  # type: ignore[method-assign]
        time.sleep(0.5)
        return inner(value)

    member.all_gather = late  # type: ignore[method-assign]


async def diverge(group: RankGroup, rank: int) -> None:
    daemon = group.ranks[rank].daemon

    def spoil(num, output):  # type: ignore[no-untyped-def]
        daemon.spoil = None
        return with_other_tokens(output)

    daemon.spoil = spoil


async def die(group: RankGroup, rank: int) -> None:
    await group.restart(rank)


async def lose_a_write(group: RankGroup, rank: int) -> None:
    """The stream to one rank breaks at a write: the others have a plan that it lacks."""
    core = group.ranks[rank].daemon.core
    holder = core.holder
    if holder is not None:
        holder.close()
        holder.fail(RuntimeError("cut"))


MISHAPS: list[Callable[[RankGroup, int], Awaitable[None]]] = [refuse, lag, diverge, die, lose_a_write]


@pytest.mark.parametrize("mishap", MISHAPS, ids=lambda mishap: mishap.__name__)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_fails_changes_no_output(
    mishap: Callable[[RankGroup, int], Awaitable[None]], rank: int
) -> None:
    async with rank_group(2) as group, scheduler(group) as daemon, serve_client(daemon.address) as client:
        handles = await submit_many(client)
        await in_the_middle(client, handles[0])
        await mishap(group, rank)
        check(await client.over(*handles, timeout_s=TIMEOUT_S))
        more = await submit_many(client)
        check(await client.over(*more, timeout_s=TIMEOUT_S))


async def run_seed(seed: int) -> None:
    """Requests of random lengths on two or four ranks, with mishaps at random moments to random ranks."""
    rng = random.Random(seed)
    num_ranks = rng.choice((2, 4))
    async with rank_group(num_ranks) as group, scheduler(group) as daemon, serve_client(daemon.address) as client:
        lengths = [rng.randrange(20, 120) for _ in range(rng.randrange(1, 8))]
        handles = [await client.submit(PROMPT[: 3 + i], max_tokens=num) for i, num in enumerate(lengths)]
        for _ in range(rng.randrange(1, 4)):
            await asyncio.sleep(rng.random() * 0.1)
            await rng.choice(MISHAPS)(group, rng.randrange(num_ranks))
        seen = await client.over(*handles, timeout_s=2 * TIMEOUT_S)
        for i, (output, num) in enumerate(zip(seen, lengths, strict=True)):
            assert output.tokens == expected(PROMPT[: 3 + i], num), f"seed {seed}, output {i}"


@pytest.mark.parametrize("seed", range(4))
async def test_every_seed_ends_in_the_same_outputs(seed: int) -> None:
    await run_seed(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 204))
async def test_every_one_of_200_seeds_ends_in_the_same_outputs(seed: int) -> None:
    await run_seed(seed)


async def test_of_two_schedulers_that_form_at_once_one_serves_and_the_other_takes_over() -> None:
    async with rank_group(2) as group, scheduler(group, "b", load=False) as b:
        loading = asyncio.ensure_future(b.daemon.load())
        loading.add_done_callback(lambda _: b.runtime.progress.loaded())
        async with scheduler(group, "a") as a:
            await loading
            states = {name: d.daemon.loop for name, d in (("a", a), ("b", b))}
            both = {GroupState.SERVING, GroupState.STANDBY}
            await until(lambda: {loop.group_state for loop in states.values()} == both)
            generations = [group.member(rank).generations for rank in range(2)]
            assert generations[0] == generations[1] == sorted(set(generations[0])), "never two groups at once"
            serving = a if a.daemon.loop.group_state is GroupState.SERVING else b
            async with serve_client(serving.address) as client:
                check(await client.over(*await submit_many(client), timeout_s=TIMEOUT_S))
            formed = list(generations[0])
            await asyncio.sleep(1.0)  # A standby polls, and takes nothing apart.
            assert serving.daemon.loop.group_state is GroupState.SERVING and generations[0] == formed
        await until(lambda: b.daemon.loop.group_state is GroupState.SERVING)
        assert generations[0] == formed, "the KV is kept: no group was formed"
        async with serve_client(b.address) as client:
            check(await client.over(*await submit_many(client), timeout_s=TIMEOUT_S))


class Hand:
    """A scheduler by hand: claims the group, and writes plans to single ranks."""

    def __init__(self, group: RankGroup, name: str) -> None:
        self.client = GroupClient(group.addresses, name, lambda _: None, grpc_connect())
        self.claimed: ClaimedGroup | None = None

    async def claim(self) -> ClaimedGroup:
        async with asyncio.timeout(TIMEOUT_S):
            self.claimed = await self.client.claim()
        return self.claimed

    async def write(self, plans: Sequence[StepPlan], *ranks: int) -> list[bytes]:
        """As one message. The bytes of each plan."""
        assert self.claimed is not None
        for rank in ranks:
            await self.claimed.stream.rank_streams[rank].send(encode_plans(plans))
        return [encode_plan(plan) for plan in plans]

    async def close(self) -> None:
        if self.claimed is not None:
            await self.claimed.close()


def _first(claimed: ClaimedGroup) -> StepPlan:
    plan = first_plan(epoch=claimed.stream.epoch)
    return _of_group(plan, claimed)


def _of_group(plan: StepPlan, claimed: ClaimedGroup) -> StepPlan:
    return replace(plan, group_generation=claimed.info.group_generation)


async def _leave_between_two_writes(group: RankGroup, first: Hand, num_plans: int = 1) -> list[bytes]:
    """Step 1 is on both ranks, so many after it on rank 0 alone, which waits for rank 1. The bytes of those."""
    claimed = await first.claim()
    await first.write([_first(claimed)], 0, 1)
    epoch, last = claimed.stream.epoch, 1 + num_plans
    plans = [StepPlan(epoch=epoch, step_id=step, decode_set=as_ints([0])) for step in range(2, last + 1)]
    data = await first.write([_of_group(plan, claimed) for plan in plans], 0)
    ledgers = [group.ranks[rank].daemon.core.ledger for rank in range(2)]
    await until(lambda: [ledger.last_received_step for ledger in ledgers] == [last, 1])
    await until(lambda: ledgers[1].last_completed_step == 1)
    return data


async def _check_taken_over(
    group: RankGroup, successor: Hand, data: Sequence[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[worker_pb2.StepPlan] = []
    core = group.ranks[1].daemon.core
    submit = core.submit

    async def seen(holder, plan, fault=None):  # type: ignore[no-untyped-def]
        taken.append(plan)
        await submit(holder, plan, fault)

    monkeypatch.setattr(core, "submit", seen)
    claimed = await successor.claim()
    assert [worker_pb2.ExecuteRequest(plan=plan).SerializeToString() for plan in taken] == data, "byte for byte"
    assert claimed.snapshots[0].records.ids.tolist() == [5, 6, 7, 8, *expected([5, 6, 7, 8], len(data))], (
        "both ranks ran all of them"
    )
    assert group.member(0).generations == group.member(1).generations == [1], "no new group: the KV is kept"


@pytest.mark.parametrize("num_plans", [1, 3])
async def test_the_successor_of_a_scheduler_killed_between_two_writes_completes_the_broadcast(
    num_plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rank_group(2) as group:
        first, successor = Hand(group, "a"), Hand(group, "b")
        try:
            data = await _leave_between_two_writes(group, first, num_plans)
            await first.close()
            await _check_taken_over(group, successor, data, monkeypatch)
        finally:
            await successor.close()


async def test_a_scheduler_that_hangs_with_plans_retained_is_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rank_group(2) as group:
        first, successor = Hand(group, "a"), Hand(group, "b")
        try:
            data = await _leave_between_two_writes(group, first)
            assert group.ranks[0].daemon.core.worker_hello().holder_silent_ms == 0, "rank 0 cannot know"
            monkeypatch.setattr(rank_hellos, "HOLDER_SILENT_MS", 300)
            for rank in range(2):
                group.ranks[rank].daemon.core.ledger.holder_timeout_s = 0.3
            await _check_taken_over(group, successor, data, monkeypatch)
        finally:
            await first.close()
            await successor.close()


class _Slow:
    """Delays a call of each rank by so many seconds, which block no event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: RankGroup, what: str) -> None:
        for rank in range(2):
            core = group.ranks[rank].daemon.core
            if what == "form":
                monkeypatch.setattr(group.member(rank), "form", _after(group.member(rank).form, 3.0))
            elif rank:  # The other rank has answered long ago, and hears nothing of this one.
                monkeypatch.setattr(core.plan_runner, "snapshot", _after(core.plan_runner.snapshot, 3.0))


def _after(call, delay_s):  # type: ignore[no-untyped-def]
    def late(*args):  # type: ignore[no-untyped-def]
        time.sleep(delay_s)
        return call(*args)

    return late


@pytest.mark.parametrize("what", ["form", "snapshot"])
async def test_a_standby_does_not_take_a_group_that_takes_long_to_begin(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its holder has nothing to say until the ranks have answered, for longer than a holder may be silent."""
    monkeypatch.setattr(rank_hellos, "HOLDER_SILENT_MS", 1600)
    monkeypatch.setattr(group_stream, "ALIVE_S", 0.1)
    monkeypatch.setattr(group_client, "STANDBY_POLL_S", 0.1)
    async with rank_group(2) as group:
        _Slow(monkeypatch, group, what)
        a, b = Hand(group, "a"), Hand(group, "b")
        claiming = asyncio.ensure_future(a.claim())
        ledgers = [group.ranks[rank].daemon.core.ledger for rank in range(2)]
        await until(lambda: all(ledger.highest_epoch for ledger in ledgers))
        standing_by = asyncio.ensure_future(b.claim())
        try:
            await asyncio.wait((claiming, standing_by), return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
            assert {ledger.holder_instance_id for ledger in ledgers} == {"a"}, "the standby took it meanwhile"
            assert len(group.member(0).generations) == len(group.member(1).generations) == 1
        finally:
            for task in (claiming, standing_by):
                task.cancel()
            await asyncio.wait((claiming, standing_by))
            await a.close()
            await b.close()
