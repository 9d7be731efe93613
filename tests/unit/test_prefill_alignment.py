"""Prompts of ranks that share experts begin together, and none waits longer than it may."""

from __future__ import annotations

import pytest
from unit.test_dp_ranks import DpWorld
from unit.test_ep_planning import ep_world

from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.scheduler.planning.experts.dispatch import DispatchChoice

NUM_RANKS = 3
MAX_STEPS = 4
AUTO = DispatchChoice(max_tokens=8)


def decoding_world(choice: DispatchChoice = AUTO, *, max_steps: int = MAX_STEPS) -> DpWorld:
    """One request decodes, alone."""
    world = ep_world(NUM_RANKS, choice, prefill_align_steps=max_steps)
    world.submit([2, 3, 4], 60)
    advance(world, 3)
    return world


def advance(world: DpWorld, num_steps: int) -> list[tuple[DispatchMode, int]]:
    """Dispatch of each step and how many requests it admits, of so many steps one at a time."""
    steps = []
    for _ in range(num_steps):
        assert world.step()
        sections = world.sections[-1]
        steps.append((sections[0].dispatch, sum(len(section.admits) for section in sections)))
        world.process()
    return steps


LOW, NORMAL = DispatchMode.LOW_LATENCY, DispatchMode.NORMAL


def test_one_prompt_waits_for_so_many_steps_and_no_longer() -> None:
    world = decoding_world()
    world.submit([5, 6, 7], 20)
    assert advance(world, 7) == [(LOW, 0)] * MAX_STEPS + [(NORMAL, 1), (LOW, 0), (LOW, 0)]
    assert world.planner.counters.num_held_plans == MAX_STEPS
    # And so does the next one.
    world.submit([8, 9], 20)
    assert advance(world, MAX_STEPS + 1) == [(LOW, 0)] * MAX_STEPS + [(NORMAL, 1)]


def test_prompts_for_every_rank_begin_at_once() -> None:
    world = decoding_world()
    world.submit([5, 6, 7], 20)
    assert advance(world, 2) == [(LOW, 0)] * 2
    world.submit([8, 9, 10], 20)
    world.submit([11, 12, 13], 20)
    assert advance(world, 2) == [(NORMAL, 3), (LOW, 0)]
    assert world.planner.state is not None
    assert min(world.planner.state.decode_set.num_by_rank) > 0


def test_a_prompt_joins_one_that_is_being_computed() -> None:
    world = decoding_world()
    world.submit([2 + i % 50 for i in range(64)], 4)
    assert advance(world, MAX_STEPS + 1)[-1] == (NORMAL, 1)
    world.submit([7, 8, 9], 4)
    # Chunks of 16: the steps are not of low latency for three more, whoever comes.
    assert advance(world, 4) == [(NORMAL, 1), (NORMAL, 0), (NORMAL, 0), (LOW, 0)]


def test_ranks_without_a_free_slot_are_not_waited_for() -> None:
    world = decoding_world(DispatchChoice(max_tokens=100))
    # Four slots a rank: all but two of one rank are taken.
    for first in range(9):
        world.submit([first + 2, 30, 31], 12)
    advance(world, 2)
    assert world.planner.num_running == 10
    world.submit([40, 41], 4)
    world.submit([42, 43], 4)
    assert advance(world, 1) == [(NORMAL, 2)]


@pytest.mark.parametrize(
    ("choice", "max_steps"),
    [
        pytest.param(AUTO, 0, id="off"),
        pytest.param(DispatchChoice(mode=NORMAL), MAX_STEPS, id="normal"),
        pytest.param(DispatchChoice(mode=LOW), MAX_STEPS, id="low latency"),
        pytest.param(DispatchChoice(max_tokens=0), MAX_STEPS, id="more rows than low latency takes"),
    ],
)
def test_nothing_waits_where_no_low_latency_is_lost(choice: DispatchChoice, max_steps: int) -> None:
    world = decoding_world(choice, max_steps=max_steps)
    world.submit([5, 6, 7], 20)
    assert [num for _, num in advance(world, 2)] == [1, 0]


def test_nothing_waits_where_nobody_decodes_or_no_experts_are_shared() -> None:
    world = ep_world(NUM_RANKS, AUTO, prefill_align_steps=MAX_STEPS)
    world.submit([5, 6, 7], 2)
    assert advance(world, 1) == [(NORMAL, 1)]
    plain = DpWorld(NUM_RANKS, dispatch=AUTO, prefill_align_steps=MAX_STEPS)
    plain.submit([2, 3, 4], 20)
    advance(plain, 3)
    plain.submit([5, 6, 7], 20)
    assert [num for _, num in advance(plain, 1)] == [1]
