"""KV that comes from elsewhere, as the planner keeps it: pages, locks and requests, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.scheduler.pages.integrity import find_deep_violation
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.transfers.arrival import Arrival, ArrivalFailure, ArrivalState
from radixmesh.daemons.scheduler.transfers.arrivals import PROGRESS_LEASE_S, KvArrivals
from radixmesh.worker.v1 import worker_pb2

PATIENCE_S = 3.0
ops = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "reserve",
                "prepared",
                "soon",
                "written",
                "valid",
                "stamp",
                "gone",
                "unsound",
                "cancel",
                "fail",
                "pass",
                "renew",
            )
        ),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(ops, st.sampled_from([1, 4]))
def test_pages_add_up_and_no_lock_is_left(steps: list[tuple[str, int]], page_size: int) -> None:
    world = World(page_size=page_size, num_pages=96 // page_size)
    state = world.planner.state
    assert state is not None
    arrivals = KvArrivals(world.planner.queue, world.planner.arrivals.room, patience_s=PATIENCE_S)
    now, num_unsound = 0.0, 0
    live: dict[int, Arrival] = {}
    for number, (what, which) in enumerate(steps):
        arrival = live.get(which)
        if what == "reserve":
            ids = as_ints([3 + which, *range(10, 30 + which)])
            try:
                found = arrivals.reserve(state, f"t{which}", ids, "", 4.0, 1, now)
            except MeshError:
                assert f"t{which}" in arrivals
                continue
            if found is not None:
                live[which] = found
                arrivals.take_wanted(state)
        elif what == "pass":
            now += which
            arrivals.pass_time(state, now)
        elif arrival is None:
            continue
        elif what == "prepared":
            assert arrivals.prepared(arrival) == (arrival.state is ArrivalState.RESERVED)
        elif what in ("soon", "written"):
            if arrivals.written(state, arrival, is_awaited=what == "soon"):
                assert len(arrival.pages) == arrival.num_tokens // page_size
        elif what in ("valid", "stamp", "gone", "unsound"):
            if arrival.state is ArrivalState.COMMITTING:
                num_unsound += len(arrival.pages) if what == "unsound" else 0
                arrivals.committed(
                    state,
                    arrival,
                    is_valid=what == "valid",
                    are_pages_sound=what != "unsound",
                    was_granted=what != "gone",
                )
        elif what == "cancel":
            arrivals.cancel(state, arrival.transfer_id)
        elif what == "fail":
            arrivals.failed(state, arrival, ArrivalFailure.REFUSED)
        else:
            arrivals.renew(arrival.transfer_id, 5.0, now)
        assert not find_deep_violation(state.pages.pool, state.pages.cache, state.table), (number, what)
        loading = sum(len(a.pages) for a in live.values() if a.state is ArrivalState.COMMITTING)
        counts = state.page_counts()
        assert (counts[PageState.LOADING], counts[PageState.QUARANTINED]) == (loading, num_unsound)
    for arrival in live.values():
        if arrival.state is ArrivalState.COMMITTING:
            arrivals.committed(state, arrival, is_valid=False)
    arrivals.pass_time(state, now + 100.0)
    assert not len(arrivals)
    assert state.pages.cache.num_evictable == state.pages.pool.num_cached, "a lock was left"
    found_ids = [a.ids for a in live.values() if a.state is ArrivalState.ARRIVED]
    for ids in found_ids:
        match = state.pages.cache.match(state.pages.namespace_named(""), ids)
        assert len(match.pages) * page_size == len(ids), "what arrived is found"
    assert not np.isin(state.pages.pool.pages_in(PageState.LOADING), state.pages.pool.pages_in(PageState.CACHED)).any()


def reserved(arrivals: KvArrivals, state: EpochState, *of_it: Any) -> Arrival:
    """A transfer that has its turn at once."""
    arrival = arrivals.reserve(state, *of_it)
    assert arrival is not None and arrivals.take_wanted(state) == [arrival]
    return arrival


def test_calls_of_an_epoch_before_change_nothing() -> None:
    world = World(page_size=1, num_pages=64)
    state = world.planner.state
    assert state is not None
    arrivals = world.planner.arrivals
    arrival = reserved(arrivals, state, "t", as_ints(range(3, 20)), "", 10.0, 1, 0.0)
    assert arrival is not None and arrivals.prepared(arrival) and arrivals.written(state, arrival)
    arrivals.begin_epoch()
    arrivals.committed(state, arrival, is_valid=False, are_pages_sound=False)
    arrivals.failed(state, arrival, ArrivalFailure.REFUSED)
    assert not len(arrivals) and not arrivals.take_failed()


@pytest.mark.parametrize("is_arrived", [False, True])
def test_a_flush_does_not_wait_for_transfers_whose_requests_wait_for_the_flush(is_arrived: bool) -> None:
    world = World(page_size=1, num_pages=64)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    arrival = reserved(arrivals, state, "t", as_ints(range(3, 20)), "", 60.0, 1, 0.0)
    assert arrival is not None and arrivals.prepared(arrival)
    assert arrivals.written(state, arrival), "a commit that runs"
    wish = planner.flush.wish()
    assert planner.plan(0.0) is None, "its pages are being written"
    arrivals.committed(state, arrival, is_valid=is_arrived)
    plan = planner.plan(0.0)
    assert plan is not None and plan.barrier_ops, "nothing else runs"
    assert not len(arrivals) and state.num_available == state.num_pages
    assert wish in planner.flush.planned


def test_a_flush_ends_what_is_on_its_way_and_what_arrived_is_counted_once() -> None:
    world = World(page_size=1, num_pages=64)
    arrivals, state = world.planner.arrivals, world.planner.state
    assert state is not None
    here = reserved(arrivals, state, "here", as_ints(range(3, 20)), "", 60.0, 1, 0.0)
    coming = reserved(arrivals, state, "coming", as_ints(range(30, 40)), "", 60.0, 1, 0.0)
    assert here is not None and coming is not None
    assert arrivals.prepared(here) and arrivals.written(state, here) and arrivals.prepared(coming)
    arrivals.committed(state, here, is_valid=True)
    assert (arrivals.num_arrived, arrivals.num_tokens) == (1, 17)
    arrivals.give_up(state)
    assert (here.state, coming.state) == (ArrivalState.ARRIVED, ArrivalState.FAILED)
    assert arrivals.take_failed() == [coming] and not len(arrivals) and arrivals.num_failed == 1


def test_a_transfer_outlives_the_attempt_that_a_later_one_replaces() -> None:
    world = World(page_size=1, num_pages=64)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    ids = as_ints(range(3, 20))
    arrival = reserved(arrivals, state, "t", ids, "", 60.0, 1, 0.0)
    assert arrival is not None and arrivals.prepared(arrival)
    submission = world.submission([*range(3, 20)], transfer_id="t")
    planner.submit(submission)
    assert planner.plan(0.0) is None and arrival.sequences, "it waits"
    again = replace(submission, handle=submission.handle + 1, attempt=1, resumed_output_ids=as_ints([5]))
    planner.submit(again)
    assert planner.plan(0.1) is None and arrival.state is ArrivalState.RESERVED
    planner.abort(submission.key.request_id)
    planner.plan(0.2)
    assert arrival.state is ArrivalState.FAILED and not len(arrivals)


@pytest.mark.parametrize("end", ["a later attempt", "time", "cancelled", "pages"])
def test_an_attempt_whose_first_token_is_on_its_way_is_held_back_for_it(end: str) -> None:
    """It would compute that token anew, and its steps would run ahead of those of the attempt that brings it."""
    world = World(page_size=1, num_pages=64)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    ids = list(range(3, 20))
    arrival = reserved(arrivals, state, "t", as_ints(ids), "", 60.0, 1, 0.0)
    assert arrival is not None and arrivals.prepared(arrival)
    submission = world.submission(ids, transfer_id="t")
    planner.submit(submission)
    planner.submit(replace(submission, handle=90, key=replace(submission.key, index=1)))
    planner.plan(0.0)
    assert arrivals.written(state, arrival)
    world.executor.records.grant(
        arrival.pages, np.array([17]), previous_pages=as_ints([-1]), namespaces=[""], weights_version=1
    )
    world.executor.records.extend(arrival.pages, np.zeros(17, np.int32), as_ints(ids))
    arrivals.committed(state, arrival, is_valid=True)
    plan = planner.plan(0.1)
    assert plan is not None and len(plan.admits) == 1 and planner.num_waiting == 1, "another output samples its own"
    if end == "a later attempt":
        planner.submit(replace(submission, handle=91, attempt=1, resumed_output_ids=as_ints([5])))
    elif end == "cancelled":
        arrivals.cancel(state, "t")
    elif end == "pages":
        assert arrivals.let_go(state)
    later = planner.plan(0.4 if end == "time" else 0.11)
    assert later is not None and [admit.cached_len for admit in later.admits] in ([16], [17])
    assert not planner.num_waiting
    planner.plan(0.5)
    assert not len(arrivals)


def test_a_transfer_takes_as_long_as_it_makes_progress_and_no_longer() -> None:
    world = World(page_size=1, num_pages=64)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    arrival = reserved(arrivals, state, "t", as_ints(range(3, 20)), "", 15.0, 1, 0.0)
    assert arrival is not None and arrivals.prepared(arrival)
    for now in range(2, 60, 2):
        arrivals.progressed(arrival, float(now))
        arrivals.pass_time(state, float(now) + 1.9)
        assert arrival.state is ArrivalState.RESERVED, now
    arrivals.pass_time(state, 58.0 + PROGRESS_LEASE_S)
    assert arrival.state is ArrivalState.FAILED


def test_a_request_that_is_too_large_without_unsound_pages_does_not_wait_for_them() -> None:
    world = World(num_pages=96)
    state, arrivals = world.planner.state, world.planner.arrivals
    assert state is not None
    arrival = reserved(arrivals, state, "t", as_ints(range(2, 42)), "", 4.0, 1, world.now)
    assert arrival is not None and arrivals.prepared(arrival) and arrivals.written(state, arrival)
    arrivals.committed(state, arrival, is_valid=False, are_pages_sound=False)
    large, other = world.submit([2] * 80), world.submit([3] * 20)
    world.run()
    assert large.finished is not None and large.finished.reason is FinishReason.ERROR
    assert other.tokens == world.expected(other.submission)


def test_the_plan_that_a_commit_waits_for_releases_the_slots_whose_pages_it_got() -> None:
    """An op about experts has a plan of its own, which releases nothing."""
    world = World(num_pages=96)
    state, planner = world.planner.state, world.planner
    assert state is not None
    ending = world.submit([3] * 20)
    world.plan()
    world.execute()
    world.process()
    planner.abort(ending.submission.key.request_id)
    arrival = reserved(planner.arrivals, state, "t", as_ints(range(2, 42)), "", 60.0, 1, world.now)
    assert arrival is not None and planner.arrivals.prepared(arrival) and planner.arrivals.written(state, arrival)
    op = worker_pb2.BarrierOp(flush_cache=worker_pb2.FlushCache())
    planner.experts = SimpleNamespace(is_on=True, next_op=lambda now, step_id: op)  # type: ignore[assignment]
    assert state.releases and world.plan() and world.plans.pop().releases
    assert not state.releases and world.plan() and world.plans.pop().barrier_ops


def of_world(world: World, **fields: float) -> KvArrivals:
    return KvArrivals(world.planner.queue, world.planner.arrivals.room, patience_s=PATIENCE_S, **fields)


def prompt_of(name: str, num: int) -> list[int]:
    return [ord(name) - ord("a") + 3, *(10 + at % 50 for at in range(num - 1))]


def asked(
    arrivals: KvArrivals, state: EpochState, names: str, *, num: int = 20, lease_s: float = 60.0
) -> list[Arrival]:
    """Reservations of as many tokens each, one for each letter."""
    found = [arrivals.reserve(state, name, as_ints(prompt_of(name, num)), "", lease_s, 1, 0.0) for name in names]
    assert all(found)
    return [arrival for arrival in found if arrival is not None]


def test_a_burst_that_is_more_than_there_are_pages_waits_for_its_turn() -> None:
    world = World(page_size=1, num_pages=96)
    state = world.planner.state
    assert state is not None
    arrivals = of_world(world)
    first, second = asked(arrivals, state, "ab", num=61)
    assert arrivals.take_wanted(state) == [first] and arrivals.prepared(first)
    assert second.state is ArrivalState.QUEUED and not arrivals.take_wanted(state) and not arrivals.prepared(second)
    assert arrivals.written(state, first)
    arrivals.committed(state, first, is_valid=True)
    assert not arrivals.take_wanted(state), "it is locked until its request has it"
    arrivals.pass_time(state, 61.0)
    assert first.transfer_id not in arrivals and second.failure == ArrivalFailure.LEASE


def test_what_is_written_waits_for_pages_that_others_took_meanwhile() -> None:
    world = World(page_size=1, num_pages=96)
    state = world.planner.state
    assert state is not None
    arrivals = of_world(world)
    (arrival,) = asked(arrivals, state, "a", num=61)
    assert arrivals.take_wanted(state) == [arrival] and arrivals.prepared(arrival)
    taken = state.pages.begin_load(50)
    assert not arrivals.has_room(state, arrival)
    arrivals.waits_for_pages(arrival)
    arrivals.pass_time(state, 29.0)
    assert arrival.state is ArrivalState.RESERVED, "longer than without news"
    state.pages.drop_load(taken, was_granted=False)
    assert arrivals.has_room(state, arrival) and arrivals.written(state, arrival)
    arrivals.committed(state, arrival, is_valid=True)
    assert arrivals.num_arrived == 1 and not arrivals.num_failed


def test_reservations_beyond_the_staging_wait_in_order_and_ask_one_by_one() -> None:
    world = World(page_size=1, num_pages=400)
    state = world.planner.state
    assert state is not None
    arrivals = of_world(world)
    a, b, c, d = asked(arrivals, state, "abcd")
    assert arrivals.take_wanted(state) == [a, b, c, d]
    assert arrivals.prepared(a)
    for arrival in (c, b, d):
        arrivals.refused(state, arrival)
    assert arrivals.num_queued == 3 and not arrivals.take_wanted(state), "none is free yet"
    arrivals.pass_time(state, 0.1)
    assert arrivals.take_wanted(state) == [b] and not arrivals.take_wanted(state), "the first alone"
    arrivals.refused(state, b)
    assert not arrivals.take_wanted(state)
    # One is over, so its region is free.
    assert arrivals.written(state, a)
    arrivals.committed(state, a, is_valid=True)
    assert arrivals.take_wanted(state) == [b] and arrivals.prepared(b)
    assert arrivals.take_wanted(state) == [c], "there may be room for more"
    arrivals.cancel(state, "c")
    arrivals.refused(state, c)
    assert c.state is ArrivalState.FAILED, "nobody wants it any more"
    assert arrivals.take_wanted(state) == [d] and not arrivals.num_queued
    for name in "abd":
        arrivals.cancel(state, name)
    arrivals.pass_time(state, 100.0)
    assert not len(arrivals) and state.pages.cache.num_evictable == state.pages.pool.num_cached


def test_a_reservation_waits_for_a_slot_that_is_free_soon() -> None:
    world = World(page_size=1, num_pages=4000, num_slots=8)
    state = world.planner.state
    assert state is not None
    arrivals = of_world(world)
    many = asked(arrivals, state, "abcdefghijklmnop", num=12)
    assert arrivals.take_wanted(state) == many[:12], "as many as there are slots, and 4"
    assert arrivals.prepared(many[0]) and arrivals.written(state, many[0])
    arrivals.committed(state, many[0], is_valid=True)
    assert not arrivals.take_wanted(state), "its request is not in a slot yet"
    arrivals.cancel(state, many[1].transfer_id)
    assert arrivals.take_wanted(state) == [many[12]]


def test_a_reservation_without_room_waits_so_long_and_its_request_computes_the_prompt() -> None:
    world = World(page_size=1, num_pages=96)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    (other, _) = asked(arrivals, state, "ab", num=61)
    assert arrivals.take_wanted(state) == [other]
    waiting = world.submit(prompt_of("b", 61), transfer_id="b")
    planner.plan(0.0)
    for now in (10.0, 20.0, 29.0):
        arrivals.renew("a", 20.0, now)
        arrivals.renew("b", 20.0, now)
        assert planner.plan(now) is None and not waiting.tokens, "no patience is lost while it has no turn"
    arrivals.renew("a", 20.0, 30.0)
    world.now = 30.0
    world.plan()
    assert arrivals.failures == {ArrivalFailure.QUEUE: 1} and "a" in arrivals
    arrivals.cancel(state, "a")
    world.run()
    assert waiting.tokens == world.expected(waiting.submission)
    world.check_clean()


def test_nothing_is_locked_while_it_waits_and_what_the_cache_has_by_then_needs_no_transfer() -> None:
    world = World(page_size=1, num_pages=96)
    state = world.planner.state
    assert state is not None
    arrivals = of_world(world)
    first, second = asked(arrivals, state, "ab", num=61)
    assert arrivals.take_wanted(state) == [first] and second.held is None
    inserted = second.ids.copy()
    arrivals.cancel(state, "a")
    pages = state.pages.begin_load(len(inserted))
    held = state.pages.cache.match(second.namespace, inserted[:0])
    state.pages.cache.lock(held)
    held = state.pages.end_load(held, second.namespace, inserted, pages)
    state.pages.cache.unlock(held)
    assert not arrivals.take_wanted(state) and second.failure == ArrivalFailure.CACHED
    assert arrivals.take_failed() == [first, second] and arrivals.num_failed == 1 and not len(arrivals)


def test_what_arrived_gives_way_where_nothing_runs_and_nobody_is_admitted() -> None:
    """Its request waits behind another, which waits for the pages that it keeps."""
    world = World(page_size=1, num_pages=96)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    large = world.submit([2] * 70)
    behind = world.submit(prompt_of("a", 61), transfer_id="a")
    (arrival,) = asked(arrivals, state, "a", num=61)
    assert arrivals.take_wanted(state) == [arrival] and arrivals.prepared(arrival) and arrivals.written(state, arrival)
    arrivals.committed(state, arrival, is_valid=True)
    world.run()
    assert large.finished is None and "a" not in arrivals, "whoever runs has outgrown nothing"
    # Nothing was scattered for the executor.
    planner.abort(behind.submission.key.request_id)
    world.run()
    assert large.tokens == world.expected(large.submission)


def test_what_is_committed_ahead_is_given_up_by_the_workers_word_alone() -> None:
    """The pages are the scatter's until they say that there was none; a commit of what is written is not ended."""
    world = World(page_size=1, num_pages=96)
    state = world.planner.state
    assert state is not None
    arrivals = KvArrivals(world.planner.queue, world.planner.arrivals.room, patience_s=PATIENCE_S)
    free = state.page_counts()[PageState.FREE]
    for name, is_awaited in (("ahead", True), ("written", False)):
        arrival = reserved(arrivals, state, name, as_ints(range(10, 40)), "", 4.0, 1, 0.0)
        assert arrival is not None and arrivals.prepared(arrival)
        assert arrivals.written(state, arrival, is_awaited=is_awaited)
        generations = state.pages.pool.generations[arrival.pages].copy()
        arrivals.pass_time(state, 100.0)
        arrivals.cancel(state, name)
        assert arrival.state is ArrivalState.COMMITTING
        assert arrivals.take_failed() == ([arrival] if is_awaited else []), "the workers are told once"
        assert state.page_counts()[PageState.LOADING] == len(arrival.pages)
        arrivals.committed(state, arrival, is_valid=False, was_granted=not is_awaited)
        assert arrival.state is ArrivalState.FAILED and state.page_counts()[PageState.FREE] == free
        assert (state.pages.pool.generations[arrival.pages] == generations - is_awaited).all()
        arrivals.take_failed()
