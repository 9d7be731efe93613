"""Choices of a plan: the order of admission, a flush before all others, results of one rank and of several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.planner_world import World

from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.scheduler.group.shared_experts import SharedExperts

PROMPT = list(range(2, 34))


def test_the_longest_cached_prefix_is_admitted_first_where_the_policy_says_so() -> None:
    """Each plan asks the cache as it is then."""
    world = World(eos_rate=0.0, num_slots=1, queue_policy="lpm")
    world.submit(PROMPT, stop=Stop(max_tokens=1))
    world.run()
    other = world.submit(PROMPT[::-1], stop=Stop(max_tokens=1))
    cached = world.submit([*PROMPT, 50], stop=Stop(max_tokens=1))
    while not (other.finished or cached.finished):
        world.plan()
        world.execute()
        world.process()
    assert cached.finished and not other.finished
    world.run()
    assert other.finished is not None


def test_nobody_gives_way_to_a_priority_that_a_flush_keeps_out() -> None:
    world = World(eos_rate=0.0, num_slots=1, queue_policy="priority")
    low = world.submit(PROMPT, stop=Stop(max_tokens=6))
    for _ in range(3):
        world.plan()
        world.execute()
        world.process()
    wish = world.planner.flush.wish()
    high = world.submit(PROMPT[::-1], priority=5, stop=Stop(max_tokens=2))
    while not wish.is_done:
        world.plan()
        world.execute()
        world.process()
    assert world.planner.counters.num_preempted == 0 and low.finished is not None and not high.tokens
    world.run()
    assert len(high.tokens) == 2


def test_ranks_that_share_experts_plan_nothing_where_nothing_is_to_be_done() -> None:
    world = World(eos_rate=0.0)
    shared = SharedExperts(
        num_ranks=2, num_experts=4, expert_bytes=10, version=0, experts_LS=np.array([[0, 1, -1, 2, 3, -1]], np.int32)
    )
    world.group = replace(world.group, experts=shared, barrier_ops=frozenset({"move_experts", "place_experts"}))
    world.begin_epoch()
    assert world.planner.experts.is_on and world.planner.plan(0.0) is None
    plan = world.planner.plan(0.0, is_heartbeat=True)
    assert plan is not None and not plan.barrier_ops
    # Loads of experts come with results, and are the balancer's.
    world.begin_epoch()
    world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.plan()
    world.execute()
    assert world.planner.experts.balancedness() == 0.0
    loads = np.array([30, 10, 10, 10], np.int32)
    world.take(world.planner.process(replace(world.results.popleft(), expert_loads=loads)))
    assert world.planner.experts.balancedness() == 0.75


def test_the_result_of_one_rank_is_the_groups_in_any_epoch() -> None:
    world = World(eos_rate=0.0)
    world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.plan()
    world.execute()
    (result,) = world.results
    assert world.planner.joined([result]) is result
    assert world.planner.joined([replace(result, epoch=9), result]).epoch == 9, "of another epoch: as it came"
    world.planner.end_epoch()
    assert world.planner.joined([result]) is result


def test_transfers_that_are_over_give_their_pages_back_with_the_result() -> None:
    world = World(eos_rate=0.0)
    state = world.planner.state
    assert state is not None
    ended: list[int] = []
    leases = state.ranks[0].leases
    pages = state.pages.pool.pages_in(0)[:2]  # type: ignore[arg-type]
    state.pages.pool.lease_pinned(pages)
    leases.end = lambda ids: (ended.extend(ids), pages)[1]  # type: ignore[assignment,method-assign,func-returns-value]
    world.submit(PROMPT, stop=Stop(max_tokens=1))
    world.plan()
    world.execute()
    (result,) = world.results
    world.planner.joined([replace(result, released_transfers=("t1",))])  # type: ignore[arg-type]
    assert ended == ["t1"] and state.pages.pool.num_leased == 0
