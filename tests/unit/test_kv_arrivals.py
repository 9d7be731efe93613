"""KV that comes from elsewhere, as the planner keeps it: pages, locks and requests, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

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
from radixmesh.daemons.scheduler.transfers.arrivals import PROGRESS_LEASE_S, Arrival, ArrivalState, KvArrivals
from radixmesh.worker.v1 import worker_pb2

PATIENCE_S = 3.0
ops = st.lists(
    st.tuples(
        st.sampled_from(
            ("reserve", "prepared", "written", "valid", "stamp", "unsound", "cancel", "fail", "pass", "renew")
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
    arrivals, now, num_unsound = KvArrivals(world.planner.queue, patience_s=PATIENCE_S), 0.0, 0
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
        elif what == "pass":
            now += which
            arrivals.pass_time(state, now)
        elif arrival is None:
            continue
        elif what == "prepared":
            assert arrivals.prepared(arrival) == (arrival.state is ArrivalState.RESERVED)
        elif what == "written":
            if arrivals.written(state, arrival):
                assert len(arrival.pages) == arrival.num_tokens // page_size
        elif what in ("valid", "stamp", "unsound"):
            if arrival.state is ArrivalState.COMMITTING:
                num_unsound += len(arrival.pages) if what == "unsound" else 0
                arrivals.committed(state, arrival, is_valid=what == "valid", are_pages_sound=what != "unsound")
        elif what == "cancel":
            arrivals.cancel(state, arrival.transfer_id)
        elif what == "fail":
            arrivals.failed(state, arrival)
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


def test_calls_of_an_epoch_before_change_nothing() -> None:
    world = World(page_size=1, num_pages=64)
    state = world.planner.state
    assert state is not None
    arrivals = world.planner.arrivals
    arrival = arrivals.reserve(state, "t", as_ints(range(3, 20)), "", 10.0, 1, 0.0)
    assert arrival is not None and arrivals.prepared(arrival) and arrivals.written(state, arrival)
    arrivals.begin_epoch()
    arrivals.committed(state, arrival, is_valid=False, are_pages_sound=False)
    arrivals.failed(state, arrival)
    assert not len(arrivals) and not arrivals.take_failed()


@pytest.mark.parametrize("is_arrived", [False, True])
def test_a_flush_does_not_wait_for_transfers_whose_requests_wait_for_the_flush(is_arrived: bool) -> None:
    world = World(page_size=1, num_pages=64)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    arrival = arrivals.reserve(state, "t", as_ints(range(3, 20)), "", 60.0, 1, 0.0)
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
    here = arrivals.reserve(state, "here", as_ints(range(3, 20)), "", 60.0, 1, 0.0)
    coming = arrivals.reserve(state, "coming", as_ints(range(30, 40)), "", 60.0, 1, 0.0)
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
    arrival = arrivals.reserve(state, "t", ids, "", 60.0, 1, 0.0)
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


def test_a_transfer_takes_as_long_as_it_makes_progress_and_no_longer() -> None:
    world = World(page_size=1, num_pages=64)
    planner, arrivals = world.planner, world.planner.arrivals
    state = planner.state
    assert state is not None
    arrival = arrivals.reserve(state, "t", as_ints(range(3, 20)), "", 15.0, 1, 0.0)
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
    arrival = arrivals.reserve(state, "t", as_ints(range(2, 42)), "", 4.0, 1, world.now)
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
    arrival = planner.arrivals.reserve(state, "t", as_ints(range(2, 42)), "", 60.0, 1, world.now)
    assert arrival is not None and planner.arrivals.prepared(arrival) and planner.arrivals.written(state, arrival)
    op = worker_pb2.BarrierOp(flush_cache=worker_pb2.FlushCache())
    planner.experts = SimpleNamespace(is_on=True, next_op=lambda now, step_id: op)  # type: ignore[assignment]
    assert state.releases and world.plan() and world.plans.pop().releases
    assert not state.releases and world.plan() and world.plans.pop().barrier_ops


def test_what_is_written_waits_for_pages_as_its_request_would() -> None:
    """Reservations take no pages: those of a burst may be more than there are."""
    world = World(page_size=1, num_pages=96)
    state = world.planner.state
    assert state is not None
    arrivals = KvArrivals(world.planner.queue, patience_s=PATIENCE_S)
    found = [arrivals.reserve(state, name, as_ints([first, *range(10, 70)]), "", 4.0, 1, 0.0)
             for first, name in ((3, "a"), (4, "b"))]  # fmt: skip
    first, second = found
    assert first is not None and second is not None
    for arrival in (first, second):
        assert arrivals.prepared(arrival) and arrivals.has_room(state, arrival)
    assert arrivals.written(state, first)
    assert not arrivals.has_room(state, second) and second.state is ArrivalState.RESERVED
    arrivals.committed(state, first, is_valid=True)
    assert not arrivals.has_room(state, second), "it is locked until its request has it"
    arrivals.pass_time(state, 4.0)
    assert arrivals.has_room(state, second) and not arrivals.written(state, second), "its lease has run out"
