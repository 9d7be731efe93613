"""Carried over by a planner from one epoch of its group into the next: stop ids, live requests, experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.planner_world import World

from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.scheduler.group.shared_experts import SharedExperts

PROMPT = list(range(2, 12))


def test_a_live_requests_stop_id_is_watched_for_another_vocabulary_too() -> None:
    world = World(eos_rate=0.0)
    free = world.submit(PROMPT, stop=Stop(max_tokens=8))
    world.run()
    stop_id = free.tokens[3]
    record = world.submit(PROMPT, stop=Stop(max_tokens=8, stop_ids=(stop_id,)))
    world.planner.end_epoch()
    # Of a vocabulary that has the id, and back: the request waits meanwhile.
    world.planner.begin_epoch(world.epoch + 1, replace(world.group, vocab_size=128), None)
    world.epoch += 1
    world.begin_epoch()
    world.run()
    assert record.tokens == free.tokens[: free.tokens.index(stop_id) + 1]


def test_losses_without_a_word_are_no_refusals() -> None:
    """A refused plan counts against those that were admitted in it, a lost stream against nobody in particular."""
    world = World(eos_rate=0.0)
    record = world.submit(PROMPT, stop=Stop(max_tokens=4))
    for _ in range(2):
        assert world.plan()
        world.plans.clear()
        world.planner.end_epoch()
        world.collect()
        world.begin_epoch()
        world.collect()
    assert record.finished is None
    world.run()
    assert record.tokens == world.expected(record.submission)


def test_experts_that_ranks_share_are_balanced_from_the_epoch_on_in_which_they_come() -> None:
    world = World(eos_rate=0.0)
    planner = world.planner
    assert not planner.experts.is_on
    shared = SharedExperts(
        num_ranks=2, num_experts=4, expert_bytes=10, version=0, experts_LS=np.array([[0, 1, -1, 2, 3, -1]], np.int32)
    )
    able = replace(world.group, experts=shared, barrier_ops=frozenset({"move_experts", "place_experts"}))
    planner.begin_epoch(world.epoch + 1, able, None)
    assert planner.experts.is_on
    planner.begin_epoch(world.epoch + 2, replace(able, experts=None), None)
    assert not planner.experts.is_on
