"""The scheduler's smaller parts: page pool, lookahead, estimates, frames that merge, remembered keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planner_world import World
from support.reachable import num_reachable

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import as_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.runtime.steps.step import StepPlan, TokenLogprobs
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.group.group_client import ClaimedGroup
from radixmesh.daemons.scheduler.pages.page_pool import PagePool
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.planning.counters import check_pages
from radixmesh.daemons.scheduler.planning.timing.lookahead import Lookahead
from radixmesh.daemons.scheduler.planning.timing.step_estimate import StepEstimate
from radixmesh.daemons.scheduler.queue.grammars import Grammar
from radixmesh.daemons.scheduler.results.outputs import Outputs, TokenRow, rows_of
from radixmesh.daemons.scheduler.routers.outbox import RouterOutbox
from radixmesh.daemons.scheduler.routers.router_streams import RouterStreams
from radixmesh.daemons.scheduler.scheduler_loop import SchedulerLoop


def test_grants_bump_generations_and_freed_pages_are_used_first() -> None:
    pool = PagePool(8)
    first = pool.take(3)
    pool.give_back(first)
    again = pool.take(3)
    assert sorted(first.tolist()) == sorted(again.tolist())
    assert pool.generations[again].tolist() == [2, 2, 2]
    assert pool.generations.sum() == 6


def test_a_page_freed_twice_is_quarantined_and_the_rest_lives_on() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.give_back(pages[:1])
    pool.give_back(pages)
    assert (pool.num_quarantined, pool.num_free, pool.num_misplaced) == (1, 3, 1)
    assert pool.is_balanced()
    assert sorted(pool.take(3).tolist()) == sorted({0, 1, 2, 3} - {int(pages[0])})


@given(st.lists(st.tuples(st.sampled_from(["take", "back", "cache", "evict"]), st.integers(0, 6)), max_size=60))
def test_page_pool_counts_like_sets(actions: list[tuple[str, int]]) -> None:
    pool, owned, cached = PagePool(12), [], []
    for action, num in actions:
        if action == "take":
            owned += pool.take(min(num, pool.num_free)).tolist()
        elif action == "evict":
            pool.evict(as_ints(cached[:num]))
            cached = cached[num:]
        else:
            (pool.give_back if action == "back" else pool.cache)(as_ints(owned[:num]))
            cached += owned[:num] if action == "cache" else []
            owned = owned[num:]
        assert (pool.num_owned, pool.num_cached, pool.num_free) == (len(owned), len(cached), 12 - len(owned + cached))
        assert sorted(pool.pages_in(PageState.OWNED).tolist()) == sorted(owned)
        assert pool.is_balanced() and not pool.num_misplaced


def test_a_leaked_page_is_counted_quarantined_and_serving_goes_on() -> None:
    world = World(eos_rate=0.0)
    first = world.submit([2, 3, 4], stop=Stop(max_tokens=30))
    world.plan()
    state = world.planner.state
    assert state is not None
    leaked = state.pages.pool.take(1)
    check_pages(state, world.planner.counters, is_strict=False)
    assert world.planner.counters.num_page_violations == 1
    assert state.pages.pool.states_of(leaked).tolist() == [PageState.QUARANTINED]
    check_pages(state, world.planner.counters, is_strict=False)
    assert world.planner.counters.num_page_violations == 1, "one violation is counted once"
    world.run()
    assert first.tokens == world.expected(first.submission)


def test_books_beyond_repair_end_the_epoch_and_lose_nothing() -> None:
    world = World(eos_rate=0.0)
    record = world.submit([2, 3, 4], stop=Stop(max_tokens=30))
    for _ in range(5):
        world.plan()
        world.execute()
        world.process()
    state = world.planner.state
    assert state is not None
    state.pages.pool.cache(state.pages.pool.take(1))
    with pytest.raises(MeshError, match="beyond repair"):
        check_pages(state, world.planner.counters, is_strict=False)
    world.begin_epoch()
    world.run()
    assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_lookahead_keeps_gap_in_as_few_plans_as_that_takes() -> None:
    lookahead = Lookahead(depth=None, max_in_flight=8)
    lookahead.gap_us = 2_000.0
    assert lookahead.depth_for(8_000) == 1
    assert lookahead.depth_for(1_000) == 2
    assert lookahead.depth_for(250) == 7, "the worker takes 8 plans at a time"
    assert lookahead.wants_more(0, 0) and lookahead.wants_more(1, 0)
    assert not lookahead.wants_more(2, 8_000) and lookahead.wants_more(2, 1_000)
    assert not lookahead.wants_more(8, 0)


@pytest.mark.parametrize(("step_us", "size"), [(0, 1), (2_600, 1), (1_200, 2), (800, 3), (100, 4)])
def test_short_steps_travel_in_batches_of_a_bounded_time(step_us: int, size: int) -> None:
    assert Lookahead(depth=None, max_in_flight=8).batch_size(step_us) == size
    assert Lookahead(depth=3, max_in_flight=8).batch_size(step_us) == 1


class _Stream:
    """Keeps what is sent; nothing answers."""

    def __init__(self) -> None:
        self.messages: list[list[StepPlan]] = []

    async def send(self, *plans: StepPlan) -> None:
        self.messages.append(list(plans))


def _loop_of_short_steps(world: World, clock: Callable[[], float] = time.monotonic) -> SchedulerLoop:
    """In an epoch whose steps take 0.8 ms."""
    group = SimpleNamespace(addresses=("nowhere:1",))
    loop = SchedulerLoop(SchedulerSettings(workers=group.addresses), group, Progress(), clock=clock)  # type: ignore[arg-type]
    planner = loop.planner
    planner.begin_epoch(1, replace(world.group, max_plans_in_flight=8, grammar_format="xgrammar"), None)
    loop.sender.lookahead = Lookahead(depth=None, max_in_flight=8)
    for tokens in (1, 4):
        planner.estimate.observe(tokens, 800.0)
    return loop


async def test_decodes_of_short_steps_are_sent_as_batches_and_a_prompt_never_waits_for_them() -> None:
    world, stream = World(), _Stream()
    loop = _loop_of_short_steps(world)
    loop.planner.submit(world.submission([2, 3, 4]))
    await loop.sender.send_plans(stream)
    sizes = [len(message) for message in stream.messages]
    assert sizes[0] == 1 and stream.messages[0][0].chunks
    assert set(sizes[1:]) == {3}, sizes
    assert [plan.step_id for message in stream.messages for plan in message] == list(range(1, 1 + sum(sizes)))
    # The batch that runs is answered as a whole: as much as the gap takes has to lie behind it.
    assert sum(sizes[1:]) * 800 >= loop.sender.lookahead.gap_us


async def test_a_first_token_leaves_before_the_step_behind_the_next_is_planned() -> None:
    world, events = World(eos_rate=0.0), []
    loop = _loop_of_short_steps(world)
    loop.sender.lookahead = Lookahead(depth=2, max_in_flight=2)
    router = loop.streams.open("router")
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=8)))
    stream = _Stream()
    claimed = ClaimedGroup(stream, world.group, (), ())  # type: ignore[arg-type]
    world.executor.begin_epoch(1)
    driving = asyncio.ensure_future(loop.drive(claimed))
    loop.notify()
    async with asyncio.timeout(30):
        while len(stream.messages) < 2:
            await asyncio.sleep(0)

        async def write() -> None:
            await router.outbox.wait()
            assert loop.planner.state is not None
            num_cached = loop.planner.state.page_counts()[PageState.CACHED]
            events.append(f"tokens, {len(stream.messages)} plans, {num_cached} pages cached")

        writing = asyncio.ensure_future(write())
        router.outbox.take(0)
        await asyncio.sleep(0)
        loop.received([world.executor.run(stream.messages[0][0])])
        while len(stream.messages) < 3:
            await asyncio.sleep(0)
        await writing
    driving.cancel()
    await asyncio.wait((driving,))
    assert events == ["tokens, 2 plans, 0 pages cached"]
    assert loop.planner.state is not None and loop.planner.state.page_counts()[PageState.CACHED] == 3


async def test_the_plan_that_has_a_submit_leaves_before_the_load_that_it_makes() -> None:
    world, now = World(), [0.0]
    loop = _loop_of_short_steps(world, lambda: now[0])
    router, stream = loop.streams.open("router"), _Stream()
    router.outbox.wants_load = False
    now[0] = 1.0  # A change is told at once, but no more often than so.
    driving = asyncio.ensure_future(loop.drive(ClaimedGroup(stream, world.group, (), ())))  # type: ignore[arg-type]
    loop.planner.submit(world.submission([2, 3, 4]))
    loop.submitted()
    async with asyncio.timeout(30):
        while not stream.messages:
            assert not router.outbox.wants_load
            await asyncio.sleep(0)
        while not router.outbox.wants_load:
            await asyncio.sleep(0)
    driving.cancel()
    await asyncio.wait((driving,))


async def test_a_submit_that_is_refused_while_no_epoch_runs_is_answered_at_once() -> None:
    world = World()
    loop = _loop_of_short_steps(world)
    loop.planner.end_epoch()
    router = loop.streams.open("router")
    loop.planner.submit(replace(world.submission([2, 3, 4]), owner=router.owner, prompt_ids=as_ints([])))
    loop.submitted()
    assert len(router.outbox.take(0).rejected) == 1


async def test_the_round_trip_of_a_batch_has_the_device_time_of_all_its_steps() -> None:
    world, stream = World(), _Stream()
    loop = _loop_of_short_steps(world, lambda: world.now)
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=64)))
    world.executor.begin_epoch(1)

    def answer_all() -> None:
        plans = [plan for message in stream.messages for plan in message]
        stream.messages.clear()
        for number, plan in enumerate(plans):
            result = world.executor.run(plan)
            loop.take([replace(result, device_start_ns=800_000 * number, device_end_ns=800_000 * (number + 1))])
        loop.settle()

    await loop.sender.send_plans(stream)
    answer_all()
    gap_us = loop.sender.lookahead.gap_us
    loop.sender.lookahead.max_in_flight = 3
    loop.sender.lookahead.batch_size = lambda step_us: 3  # type: ignore[method-assign]
    await loop.sender.send_plans(stream)
    assert [len(message) for message in stream.messages] == [3]
    # As long as the device took for the three, and half a millisecond.
    world.now += 0.0029
    answer_all()
    assert loop.sender.lookahead.gap_us < gap_us


async def test_plans_leave_one_by_one_while_an_output_follows_a_grammar() -> None:
    world, stream = World(), _Stream()
    loop = _loop_of_short_steps(world)
    grammar = Grammar("a" * 64, b"grammar")
    loop.planner.grammars.ready(grammar.hash)
    loop.planner.submit(world.submission([2, 3, 4], grammar=grammar))
    loop.planner.submit(world.submission([2, 3, 5]))
    loop.sender.lookahead.gap_us = 20_000.0
    await loop.sender.send_plans(stream)
    assert len(stream.messages) > 2 and {len(message) for message in stream.messages} == {1}
    assert loop.planner.state is not None
    table = loop.planner.state.table
    assert table.num_guided == 1
    table.free(next(slot for slot, its in enumerate(table.sequences) if its is not None and its.submission.grammar))
    assert table.num_guided == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_fixed_depth_is_kept(depth: int) -> None:
    lookahead = Lookahead(depth=depth, max_in_flight=8)
    assert lookahead.wants_more(depth, 10**9) and not lookahead.wants_more(depth + 1, 0)
    assert lookahead.depth_for(1) == depth


def test_gap_follows_round_trips_up_fast_and_down_slowly() -> None:
    lookahead = Lookahead(depth=None, max_in_flight=8)
    for _ in range(10):
        lookahead.observe_round_trip(13_000.0, 8_000.0)
    assert 4_900 < lookahead.gap_us <= 5_000
    lookahead.observe_round_trip(9_000.0, 8_000.0)
    assert lookahead.gap_us > 4_500


def test_estimate_is_of_the_nearest_size_and_generous_beyond() -> None:
    estimate = StepEstimate()
    assert estimate.expect_us(10) == 0
    estimate.observe(256, 8_000.0)
    assert estimate.expect_us(300) == 8_000 and estimate.expect_us(10) == 8_000
    assert estimate.expect_us(2_048) == 64_000


@given(st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=6), min_size=1, max_size=6))
def test_a_slow_reader_gets_one_frame_with_every_token_in_order(steps: list[list[tuple[int, int]]]) -> None:
    outbox, expected, logprobs = RouterOutbox(7), {}, {}
    for step in steps:
        rows = []
        for handle, count in dict(step).items():
            ids = expected.setdefault(handle, [])
            new = [100 * handle + len(ids) + i for i in range(count)]
            values = np.array(new, np.float32)
            given_logprobs = TokenLogprobs(own=values, num_top=0, top_ids=as_ints([]), top=values[:0])
            rows.append(TokenRow(7, handle, 2, len(ids), as_ints(new), given_logprobs if handle % 2 else None))
            rows.append(TokenRow(8, handle, 0, 0, as_ints([1])))
            ids += new
            if handle % 2:
                logprobs[handle] = ids
        outbox.add(Outputs(rows=[rows_of(rows)] if rows else []))
    tokens = outbox.take(1).tokens
    handles = unpack_ints(tokens.handles, "").tolist()
    counts, ids = unpack_ints(tokens.counts, "").tolist(), unpack_ints(tokens.ids, "").tolist()
    assert sorted(handles) == sorted(expected)
    assert not any(unpack_ints(tokens.first_output_indexes, "").tolist())
    for handle, count in zip(handles, counts, strict=True):
        assert [ids.pop(0) for _ in range(count)] == expected[handle]
    by_row = {r.row: np.frombuffer(r.logprobs.token_logprobs, "<f4").tolist() for r in tokens.logprobs}
    assert {handles[row]: values for row, values in by_row.items()} == logprobs
    assert not outbox.take(1).HasField("tokens")


def _token_row(owner: int, handle: int, first: int) -> TokenRow:
    ids = as_ints([10 * handle + first])
    logprobs = TokenLogprobs(
        own=np.array([-first], np.float32), num_top=1, top_ids=ids.reshape(1, 1), top=np.array([[first]], np.float32)
    )
    return TokenRow(owner, handle, 0, first, ids, logprobs if handle == 2 else None)


def test_rows_for_a_reader_that_is_away_are_merged_and_none_is_lost() -> None:
    outbox, num_steps, sizes = RouterOutbox(7), 1_000, list[int]()
    for step in range(num_steps):
        outbox.add(Outputs(rows=[rows_of([_token_row(7, handle, step) for handle in (1, 2, 3)])]))
        sizes.append(num_reachable(outbox))
    assert max(sizes[65:]) <= max(sizes[:65]), "parts are merged when they are many"
    tokens = outbox.take(1).tokens
    assert unpack_ints(tokens.handles, "").tolist() == [1, 2, 3]
    assert unpack_ints(tokens.counts, "").tolist() == [num_steps] * 3
    ids = unpack_ints(tokens.ids, "").reshape(3, num_steps)
    assert (ids == 10 * np.array([[1], [2], [3]]) + np.arange(num_steps)).all()
    (logprobs,) = tokens.logprobs
    assert logprobs.row == 1
    assert np.array_equal(np.frombuffer(logprobs.logprobs.token_logprobs, "<f4"), -np.arange(num_steps))
    assert np.array_equal(unpack_ints(logprobs.logprobs.top_ids, ""), ids[1])
    assert not outbox.is_overfull and not outbox.take(1).HasField("tokens")


def test_a_router_that_never_reads_is_left_with_an_error_and_costs_no_more() -> None:
    streams = RouterStreams()
    away, other = streams.open("away"), streams.open("other")
    away.outbox = RouterOutbox(away.owner, most_values=500)
    for step in range(400):
        streams.deliver(Outputs(rows=[rows_of([_token_row(s.owner, 1, step) for s in (away, other)])]))
    assert not away.outbox.is_overfull and not streams.expired(0.0)
    for step in range(400, 600):
        streams.deliver(Outputs(rows=[rows_of([_token_row(s.owner, 1, step) for s in (away, other)])]))
    assert away.outbox.is_overfull
    assert num_reachable(away.outbox) < num_reachable(RouterOutbox(away.owner)) + 10, "what was kept for it is gone"
    assert streams.expired(0.0) == [away.owner], "its requests are aborted"
    assert not streams.expired(0.0), "once"
    assert away.closed_by is not None and away.closed_by.reason == ErrorReason.ERROR_REASON_CLIENT_STALLED
    assert other.closed_by is None
    assert unpack_ints(other.outbox.take(1).tokens.counts, "").tolist() == [600]


def test_ended_keys_are_remembered_within_bounds() -> None:
    world = World()
    world.planner.submissions.max_ended = 3
    for _ in range(5):
        world.submit([2, 3], stop=Stop(max_tokens=1))
    world.run()
    known = [world.planner.submissions.has_ended(f"r{i}", None, None) for i in range(1, 6)]
    assert known == [False, False, True, True, True]


def test_group_that_shrinks_fails_what_no_longer_fits() -> None:
    from dataclasses import replace

    world = World(eos_rate=0.0)
    long = world.submit(list(range(2, 40)), stop=Stop(max_tokens=100))
    short = world.submit([2, 3], stop=Stop(max_tokens=4))
    world.group = replace(world.group, max_total_len=30)
    world.begin_epoch()
    world.collect()
    assert long.finished is not None and long.finished.error is not None
    assert long.finished.error.reason == common_pb2.ERROR_REASON_PROMPT_TOO_LONG
    world.run()
    assert short.tokens == world.expected(short.submission)


def test_a_changed_load_is_pushed_at_once_but_not_more_often_than_that() -> None:
    now, world = [100.0], World()
    settings = SchedulerSettings(workers=("nowhere:1",))
    loop = SchedulerLoop(settings, None, Progress(), clock=lambda: now[0])  # type: ignore[arg-type]
    stream = loop.streams.open("router")
    loop.planner.begin_epoch(1, world.group, None)
    pushed = []
    for seconds in (0.06, 0.04, 0.02):
        now[0] += seconds
        stream.outbox.wants_load = False
        loop.planner.submit(world.submission([2, 3, 4]))
        loop.deliver()
        pushed.append(stream.outbox.wants_load)
    assert pushed == [True, False, True]
