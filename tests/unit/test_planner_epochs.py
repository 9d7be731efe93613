"""Carried over by a planner from one epoch of its group into the next: stop ids, live requests, experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.planner_world import World

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.scheduler.group.shared_experts import SharedExperts
from radixmesh.daemons.scheduler.queue.grammars import Grammar

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


def guided_world() -> World:
    """Its workers follow grammars, which nobody puts."""
    world = World(eos_rate=0.0)
    world.group = replace(world.group, grammar_format="lists")
    world.begin_epoch()
    return world


def test_a_grammar_that_can_never_be_put_fails_those_that_still_wait_for_it() -> None:
    world = guided_world()
    grammar = Grammar("a" * 64, b"{}")
    waiting, left = (world.submit(PROMPT, grammar=grammar, stop=Stop(max_tokens=2)) for _ in range(2))
    other = world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.run()
    assert waiting.tokens == left.tokens == [] and len(other.tokens) == 2
    assert [wanted.hash for wanted in world.planner.grammars.take_wanted()] == [grammar.hash]
    world.planner.abort(left.submission.key.request_id)
    world.planner.grammar_failed(grammar.hash, MeshError(ErrorReason.ERROR_REASON_INVALID_GRAMMAR, "no text fits"))
    world.collect()
    assert waiting.finished is not None and waiting.finished.reason is FinishReason.ERROR
    assert waiting.finished.error is not None and waiting.finished.error.reason_name == "INVALID_GRAMMAR"
    assert left.finished is not None and left.finished.reason is FinishReason.ABORT
    world.check_clean()


def test_grammars_are_put_anew_for_the_workers_of_the_next_epoch() -> None:
    world = guided_world()
    grammar = Grammar("a" * 64, b"{}")
    world.submit(PROMPT, grammar=grammar)
    world.plan()
    assert len(world.planner.grammars.take_wanted()) == 1 and not world.planner.grammars.take_wanted()
    world.planner.end_epoch()
    world.begin_epoch()
    world.plan()
    assert [wanted.hash for wanted in world.planner.grammars.take_wanted()] == [grammar.hash]
