"""Admission: priorities, limits, deadlines, preemption, the decode reserve."""

from __future__ import annotations

import sys

import pytest
from support.planner_world import World

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.scheduler.planning.admission.decode_reserve import DecodeReserve
from radixmesh.daemons.scheduler.queue.deadlines import Deadlines
from radixmesh.daemons.scheduler.queue.limits import QueueLimits
from radixmesh.daemons.scheduler.queue.policies import QUEUE_POLICIES


def steps(world: World, num: int) -> None:
    for _ in range(num):
        world.plan()
        world.execute()
        world.process()


@pytest.mark.parametrize("depth", [0, 2])
def test_higher_priority_takes_a_slot_at_once_and_nobody_loses_a_token(depth: int) -> None:
    world = World(num_slots=3, queue_policy="priority", eos_rate=0.0)
    low = [world.submit([2 + i, 3], stop=Stop(max_tokens=60)) for i in range(3)]
    steps(world, 8)
    for _ in range(depth):
        world.plan()
    high = world.submit([40, 41], priority=5, stop=Stop(max_tokens=6))
    steps(world, 8 + depth)
    assert high.finished is not None, "it did not wait for a slot"
    assert world.planner.counters.num_preempted == 1
    world.run(depth)
    for record in [*low, high]:
        assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_higher_priority_takes_memory_of_the_lowest_and_youngest() -> None:
    world = World(num_pages=64, num_slots=8, queue_policy="priority", eos_rate=0.0, decode_reserve_tokens=1)
    first = world.submit([2] * 20, stop=Stop(max_tokens=4), priority=1)
    second = world.submit([3] * 20, stop=Stop(max_tokens=4))
    third = world.submit([4] * 18, stop=Stop(max_tokens=4))
    steps(world, 1)
    high = world.submit([5] * 20, stop=Stop(max_tokens=2), priority=7)
    world.plan()
    admitted = [a.request_id for a in world.log[-1].admits]
    assert admitted == ["r4"] and world.planner.counters.num_preempted == 1
    assert third.submission.key.request_id not in {r.key.request_id for r in world.planner.state.table.running()}  # type: ignore[union-attr]
    world.run()
    for record in (first, second, third, high):
        assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_preemption_is_bounded_and_only_by_higher_ones() -> None:
    world = World(num_slots=1, queue_policy="priority", eos_rate=0.0, max_preemptions=3)
    low = world.submit([2, 3], stop=Stop(max_tokens=40))
    equal = world.submit([4, 5], stop=Stop(max_tokens=4))
    steps(world, 3)
    assert not equal.tokens
    highs = []
    for i in range(12):
        highs.append(world.submit([10 + i, 3], priority=1, stop=Stop(max_tokens=3)))
        steps(world, 6)
    assert world.planner.counters.num_preempted == 3, "then it runs, whoever waits"
    world.run(1)
    for record in (low, equal, *highs):
        assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_without_the_policy_nobody_is_preempted() -> None:
    world = World(num_slots=1, queue_policy="lpm", eos_rate=0.0)
    world.submit([2, 3], stop=Stop(max_tokens=20))
    steps(world, 3)
    high = world.submit([4, 5], priority=9, stop=Stop(max_tokens=2))
    steps(world, 5)
    assert not high.tokens and not world.planner.counters.num_preempted


def test_overload_says_when_to_come_back_by_how_fast_the_queue_moves() -> None:
    world = World(num_slots=1, max_queue=10, eos_rate=0.0)
    for i in range(10):
        world.submit([2 + i, 3], stop=Stop(max_tokens=1))
    early = world.submit([2, 3])
    assert early.rejected is not None
    assert early.rejected.error.metadata["retry_after_ms"] == "1000", "nothing is known yet"
    for i in range(200):
        world.now += 0.5
        steps(world, 1)
        world.submit([2 + i % 40, 4], stop=Stop(max_tokens=1))
    late = world.submit([2, 3])
    assert late.rejected is not None and late.rejected.error.reason == common_pb2.ERROR_REASON_OVERLOADED
    retry_s = int(late.rejected.error.metadata["retry_after_ms"]) / 1000
    # One of ten leaves every step of 0.5 s.
    assert 3.0 < retry_s < 9.0


def test_tokens_that_wait_are_limited_too() -> None:
    world = World(num_slots=1, max_queue_tokens=100)
    accepted = [world.submit([2] * 40) for _ in range(3)]
    assert [record.rejected is None for record in accepted] == [True, True, True]
    refused = world.submit([2])
    assert refused.rejected is not None and refused.rejected.error.reason == common_pb2.ERROR_REASON_OVERLOADED
    world.run()
    assert world.submit([2]).rejected is None


def test_retry_after_is_within_bounds() -> None:
    limits = QueueLimits(1)
    for step in range(1000):
        limits.planned(step * 0.001, 100, 5)
    assert limits.retry_after_ms(1) == 100
    for step in range(1000):
        limits.planned(1000.0 + step, 0, 5)
    assert limits.retry_after_ms(10_000) == 60_000 or limits.retry_after_ms(10_000) == 1000


@pytest.mark.parametrize("deadline_s", [-5.0, 0.0, 1.0])
def test_a_deadline_in_the_past_fails_without_running(deadline_s: float) -> None:
    world = World()
    world.now = 1.0
    late = world.submit(list(range(2, 20)), deadline_s=deadline_s)
    other = world.submit([2, 3])
    world.run()
    assert late.finished is not None and late.finished.error is not None and not late.tokens
    assert late.finished.error.reason == common_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert not any(a.request_id == "r1" for plan in world.log for a in plan.admits)
    assert other.tokens == world.expected(other.submission)
    world.check_clean()


def test_deadlines_far_away_do_not_keep_what_has_ended() -> None:
    world = World(num_slots=8, max_queue=1000)
    for i in range(400):
        world.submit([2 + i % 50, 3], stop=Stop(max_tokens=1), deadline_s=1e6)
        if i % 8 == 7:
            world.run()
    deadlines: Deadlines = world.planner.deadlines
    assert len(deadlines) <= 64


def test_the_reserve_doubles_once_a_shortage_and_decays() -> None:
    decode_reserve = DecodeReserve(64)
    for _ in range(20):  # Retracted in one plan.
        decode_reserve.retracted()
    assert decode_reserve.num_tokens == 128
    decode_reserve.stepped()
    decode_reserve.retracted()
    assert 250 < decode_reserve.num_tokens < 256
    for _ in range(700):
        decode_reserve.stepped()
    assert 120 < decode_reserve.num_tokens < 130
    for _ in range(20_000):
        decode_reserve.stepped()
    assert decode_reserve.num_tokens == 1.0


def test_the_decode_reserve_ends_thrashing() -> None:
    world = World(num_pages=200, num_slots=16, eos_rate=0.0, decode_reserve_tokens=1, max_total_len=120)
    records = [world.submit([2 + i, 3, 4], stop=Stop(max_tokens=60)) for i in range(40)]
    world.run(2)
    for record in records:
        assert record.tokens == world.expected(record.submission)
    assert 0 < world.planner.counters.num_retracted < 40
    world.check_clean()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
def test_a_flood_of_salts_and_tenants_leaves_nothing_behind(policy: str) -> None:
    world = World(num_pages=64, queue_policy=policy, max_queue=5000)
    sizes = []
    for part in range(4):
        for i in range(250):
            name = f"{part}-{i}"
            world.submit([2 + i % 50, 3, 4], cache_salt=name, tenant=name, priority=i % 97, stop=Stop(max_tokens=1))
        world.run()
        world.check_clean()
        state = world.planner.state
        assert state is not None
        cache, queue = state.pages.cache, world.planner.queue
        assert len(cache.tree.namespaces) <= 64  # type: ignore[attr-defined]
        assert queue.num_kept == 0
        sizes.append(sys.getsizeof(cache.tree.nodes.ids))  # type: ignore[attr-defined]
    assert sizes[-1] <= 2 * sizes[0]


def test_eviction_by_priority_keeps_what_matters() -> None:
    world = World(num_pages=64, eviction="priority")
    important = world.submit(list(range(2, 30)), priority=3, stop=Stop(max_tokens=1))
    world.run()
    for i in range(10):
        world.submit([30 + i] * 25, stop=Stop(max_tokens=1))
        world.run()
    again = world.submit(list(range(2, 30)), stop=Stop(max_tokens=1))
    world.run()
    assert again.finished is not None and again.finished.cached_tokens == 27
    assert again.tokens == important.tokens


def _order(world: World) -> list[str]:
    """Request ids by admission."""
    world.run()
    return [admit.request_id for plan in world.log for admit in plan.admits]


@pytest.mark.parametrize("policy", sorted(QUEUE_POLICIES))
def test_a_priority_counts_among_requests_of_its_own_tenant(policy: str) -> None:
    world = World(num_slots=1, eos_rate=0.0, queue_policy=policy)
    one = Stop(max_tokens=1)
    greedy = [world.submit([2, 3, 4 + i], tenant="a", priority=1_000, stop=one) for i in range(30)]
    low = world.submit([2, 3, 40], tenant="a", stop=one)
    polite = world.submit([4, 5], tenant="b", stop=one)
    order = _order(world)
    assert order.index(polite.submission.key.request_id) <= 2, "another tenant's priority does not count"
    assert order[-1] == low.submission.key.request_id and len(order) == len(greedy) + 2


def test_a_priority_counts_before_tenants_if_the_operator_says_so() -> None:
    world = World(num_slots=1, eos_rate=0.0, priority_across_tenants=True)
    one = Stop(max_tokens=1)
    high = [world.submit([2, 3, 4 + i], tenant="a", priority=5, stop=one) for i in range(10)]
    other = world.submit([4, 5], tenant="b", stop=one)
    order = _order(world)
    assert order[-1] == other.submission.key.request_id and len(order) == len(high) + 1


@pytest.mark.parametrize(("is_across", "num_preempted"), [(False, 0), (True, 1)])
def test_a_priority_takes_the_place_of_another_tenants_request_only_if_it_may(
    is_across: bool, num_preempted: int
) -> None:
    world = World(num_slots=1, queue_policy="priority", eos_rate=0.0, priority_across_tenants=is_across)
    low = world.submit([2, 3], tenant="b", stop=Stop(max_tokens=20))
    for _ in range(4):
        world.plan()
        world.execute()
        world.process()
    high = world.submit([4, 5], tenant="a", priority=9, stop=Stop(max_tokens=2))
    world.run()
    assert world.planner.counters.num_preempted == num_preempted
    for record in (low, high):
        assert record.tokens == world.expected(record.submission)


def test_who_gives_way_for_want_of_pages_is_of_the_tenant_that_came_last() -> None:
    world = World(num_pages=128, num_slots=8, eos_rate=0.0, decode_reserve_tokens=1)
    stop = Stop(max_tokens=40)
    quiet = world.submit([2] * 20, tenant="b", stop=stop)
    loud = [world.submit([3 + i] * 20, tenant="a", priority=7, stop=stop) for i in range(4)]
    world.run()
    assert world.planner.counters.num_retracted > 0
    admits = [a.request_id for plan in world.log for a in plan.admits]
    assert admits.count(quiet.submission.key.request_id) == 1, "its priority of 0 is no reason"
    assert all(r.tokens == world.expected(r.submission) for r in (quiet, *loud))
