"""Decodes that yield 0 to k tokens a step: outputs are those of one token a step, lengths stay within bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from support.planner_world import VOCAB_SIZE, World

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import Chunk, StepPlan


def _submit_some(world: World, rng: random.Random, count: int) -> None:
    for _ in range(count):
        wants_logprobs = rng.random() < 0.3
        max_tokens = rng.choice((None, 1, 2, 7, 30))
        world.submit(
            [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))],
            sampling=Sampling(
                temperature=rng.choice((0.0, 1.0)),
                seed=rng.randrange(99),
                num_top_logprobs=2 if wants_logprobs else None,
            ),
            stop=Stop(
                max_tokens=max_tokens,
                min_tokens=min(rng.choice((0, 0, 1, 5)), max_tokens or 5),
                ignore_eos=rng.random() < 0.5,
                stop_ids=(rng.randrange(2, VOCAB_SIZE),) if rng.random() < 0.4 else (),
            ),
        )


@pytest.mark.parametrize("most", range(1, 10))
def test_outputs_do_not_depend_on_how_many_tokens_come_in_a_step(most: int) -> None:
    """Stops and EOS in the middle of a row, max_total_len, logprobs, min_tokens; pages run out and some retract."""
    rng = random.Random(most)
    world = World(
        page_size=rng.choice((1, 4)),
        num_pages=160,
        num_slots=6,
        max_total_len=100,
        max_tokens_per_row=most,
        row_seed=most,
    )
    for depth in range(4):
        _submit_some(world, rng, 12)
        world.run(depth)
    for record in world.records.values():
        assert record.finished is not None and record.finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_rows_yield_none_and_several() -> None:
    """The proof above is one of what it says: rows without a token and with the most there are."""
    world = World(max_tokens_per_row=5, eos_rate=0.0)
    for _ in range(4):
        world.submit([3, 4, 5], stop=Stop(max_tokens=50))
    counts: list[int] = []
    while world.plan() or world.results or world.plans:
        if world.execute():
            counts += world.results[-1].counts.tolist()
        world.process()
    assert set(counts) == set(range(6))


def test_known_lengths_lie_within_the_bounds_and_pages_cover_the_most() -> None:
    world = World(page_size=4, num_pages=200, num_slots=4, max_tokens_per_row=4, row_seed=3, eos_rate=0.0)
    for number in range(4):
        world.submit([5 + number, 6, 7], stop=Stop(max_tokens=60))
    state = world.planner.state
    assert state is not None
    table, num_surplus = state.table, 0
    for step in range(400):
        while world.planner.num_in_flight <= step % 4 and world.plan():
            pass
        live = np.flatnonzero(table.live)
        assert (table.computed_len[live] <= table.least_len[live]).all()
        assert (table.least_len[live] <= table.planned_len[live]).all()
        assert (table.planned_len[live] < table.max_total_len[live]).all()
        assert (table.planned_len[live] <= table.num_pages[live] * 4).all()
        world.execute()
        before = table.planned_len.copy()
        world.process()
        num_surplus += int((table.planned_len[live] < before[live]).any())
    assert num_surplus > 10
    world.check_clean()


def test_a_row_leaves_the_decode_set_when_the_least_reaches_its_room() -> None:
    """Though the most has reached it long before: rows that yield nothing must still decode."""
    world = World(max_tokens_per_row=8, eos_rate=0.0)
    world.submit([3, 4, 5], stop=Stop(max_tokens=6))
    assert world.plan() and world.plan() and world.plan()
    state = world.planner.state
    assert state is not None and state.table.planned_len.max() == 3 + 6 - 1
    assert world.plan() and len(state.decode_set) == 1


def test_logprobs_of_tokens_behind_an_end_are_dropped() -> None:
    world = World(max_tokens_per_row=8, eos_rate=0.4, row_seed=1)
    rows = []
    take = world.take

    def noting(outputs: object) -> None:
        rows.extend(outputs.rows)  # type: ignore[attr-defined]
        take(outputs)  # type: ignore[arg-type]

    world.take = noting  # type: ignore[method-assign,assignment]
    for number in range(20):
        world.submit([3, 4 + number], sampling=Sampling(temperature=1.0, seed=number, num_top_logprobs=1))
    world.run(2)
    told = [(int(part.counts[row]), len(given.own)) for part in rows for row, given in part.logprobs.items()]
    assert told and all(count == length for count, length in told)
    assert max(count for count, _ in told) > 1


def test_a_chunk_for_a_slot_whose_length_is_a_bound_is_refused() -> None:
    world = World(max_tokens_per_row=3, eos_rate=0.0)
    world.submit([3, 4, 5], stop=Stop(max_tokens=30))
    for _ in range(4):
        world.plan()
        world.execute()
        world.process()
    plan = StepPlan(
        epoch=world.epoch,
        step_id=world.log[-1].step_id + 1,
        decode_set=np.zeros(0, np.int32),
        chunks=(Chunk(slot=int(world.log[0].admits[0].slot), length=1),),
        has_forward=True,
    )
    with pytest.raises(MeshError, match="bound"):
        world.executor.run(plan)


def test_a_row_of_more_tokens_than_the_worker_told_of_ends_the_epoch() -> None:
    """Pages were granted for what it told."""
    world = World(max_tokens_per_row=3, eos_rate=0.0, row_seed=2)
    world.submit([3, 4, 5], stop=Stop(max_tokens=30))
    for _ in range(2):
        world.plan()
        world.execute()
        world.process()
    assert world.plan() and world.execute()
    wrong = replace(world.results[-1], counts=np.array([4], np.int32), ids=np.array([2, 2, 2, 2], np.int32))
    with pytest.raises(MeshError, match="at most") as caught:
        world.planner.process(wrong)
    assert caught.value.reason == ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION
