"""Steps that are launched before the tokens of those before them are known, under a real planner."""

from dataclasses import replace

import numpy as np
import pytest
from support.lagging import LaggingWorld
from support.planner_world import VOCAB_SIZE

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.request import RequestKey


def _storm(world: LaggingWorld, rng: np.random.Generator, num_requests: int) -> list:
    """Requests that share prefixes, some with logprobs, which the runner takes as segments."""
    stems = [rng.integers(2, VOCAB_SIZE, 12).tolist() for _ in range(4)]
    wanted = []
    for index in range(num_requests):
        stem = stems[int(rng.integers(4))]
        prompt = stem[: int(rng.integers(1, 13))] + rng.integers(2, VOCAB_SIZE, int(rng.integers(0, 20))).tolist()
        sampling = Sampling(
            temperature=float(index % 3 == 0),
            seed=int(rng.integers(1 << 40)),
            num_top_logprobs=1 if index % 5 == 0 else None,
        )
        stop = Stop(max_tokens=int(rng.integers(1, 40)), min_tokens=int(index % 4 == 1))
        wanted.append(world.submit(prompt, sampling=sampling, stop=stop))
    return wanted


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_tokens_and_records_are_those_of_a_worker_that_waits(lag, page_size):
    rng = np.random.default_rng(lag * 10 + page_size)
    # Little memory: requests are retracted, pages change hands while steps that wrote them still run.
    world = LaggingWorld(lag=lag, page_size=page_size, num_pages=160 // page_size, num_slots=6)
    for _ in range(4):
        records = _storm(world, rng, 24)
        world.run(depth=lag + 1)
        for record in records:
            assert record.rejected is None and record.finished is not None
            assert record.tokens == world.expected(record.submission)
        world.check_clean()
        # What is adopted here is hit by the next round, and the worker compares every page that is named with its
        # record: one that was written down wrongly refuses the plan.
        world.begin_epoch()
        assert world.planner.state.pages.pool.num_cached > 0


def test_a_slot_that_changes_hands_keeps_both_requests_apart():
    world = LaggingWorld(lag=3, num_slots=1, num_pages=64, eos_rate=0.0)
    records = [world.submit([5 + i, 6, 7], stop=Stop(max_tokens=3 + i)) for i in range(8)]
    world.run(depth=3)
    assert [record.tokens for record in records] == [world.expected(record.submission) for record in records]
    world.begin_epoch()
    again = [
        world.send(replace(record.submission, handle=100 + i, key=RequestKey(f"again{i}", 0)))
        for i, record in enumerate(records)
    ]
    world.run(depth=3)
    assert [record.tokens for record in again] == [record.tokens for record in records]
    assert all(record.finished.cached_tokens > 0 for record in again)


def test_a_lagging_result_is_refused_nothing_by_its_successors():
    """Pages that a finished request leaves to the cache are named by the next one while steps still run."""
    world = LaggingWorld(lag=2, num_slots=2, num_pages=128, eos_rate=0.0, hold_tokens=1)
    prompt = list(range(2, 30))
    first = world.submit(prompt, stop=Stop(max_tokens=6))
    world.run(depth=2)
    seconds = [world.submit(prompt + first.tokens[:n], stop=Stop(max_tokens=9)) for n in range(1, 6)]
    world.run(depth=2)
    for record in seconds:
        assert record.tokens == world.expected(record.submission)
        assert record.finished.cached_tokens > 0
