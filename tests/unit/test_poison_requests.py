"""A request that workers die of fails, alone; nobody else does, whatever befalls the workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.planner_world import Record, World, new_executor

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.common_settings import PredecessorEnd
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Stop

LOST = MeshError(common_pb2.ERROR_REASON_GROUP_LOST, "the worker died")


def make_world(**changes: object) -> World:
    return World(eos_rate=0.0, num_pages=2400, num_slots=12, **changes)  # type: ignore[arg-type]


def submit_many(world: World, num: int, max_tokens: int = 40) -> list[Record]:
    return [world.submit(list(range(2, 12 + i)), stop=Stop(max_tokens=max_tokens)) for i in range(num)]


def lose_worker(world: World, error: MeshError = LOST) -> None:
    """Its plans, results and KV are gone; the next one has just started."""
    world.plans.clear()
    world.planner.end_epoch(0, error)
    world.executor = new_executor(world)
    world.epoch = 0
    world.begin_epoch()
    world.collect()


def run_dying(world: World, depth: int, is_fatal: Callable[[World], bool], max_steps: int = 5_000) -> int:
    """Until nothing is left to do. The worker dies with each step after which is_fatal() holds; returns how often."""
    num_deaths = 0
    for _ in range(max_steps):
        while world.planner.num_in_flight <= depth and world.plan():
            pass
        if not world.execute() and not world.results:
            return num_deaths
        if is_fatal(world):
            num_deaths += 1
            world.results.clear()
            lose_worker(world)
        else:
            world.process()
    raise AssertionError(f"not done after {max_steps} steps: {world.planner.num_live} live")


def reaches(record: Record, num_output: int) -> Callable[[World], bool]:
    """True if the worker has sampled so many tokens of an output."""
    name, length = record.submission.key.request_id, len(record.submission.prompt_ids) + num_output

    def is_fatal(world: World) -> bool:
        table = world.executor.table
        held = [slot for slot in range(world.group.num_slots) if table.is_occupied[slot]]
        return any(table.occupant(s).request_id == name and table.total_len[s] >= length for s in held)

    return is_fatal


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("num_output", [1, 2, 9, 30])
@pytest.mark.parametrize("which", [0, 4, 11])
def test_a_request_that_workers_die_of_fails_alone(depth: int, num_output: int, which: int) -> None:
    world = make_world()
    records = submit_many(world, 12)
    poison = records[which]
    num_deaths = run_dying(world, depth, reaches(poison, num_output))
    # Three in a row and two probes; more where tokens came in between.
    assert 5 <= num_deaths <= 7
    assert poison.finished is not None and poison.finished.reason is FinishReason.ERROR
    error = poison.finished.error
    assert error is not None and error.reason == common_pb2.ERROR_REASON_STEP_FAILED
    assert error.metadata["request_id"] == poison.submission.key.request_id
    assert poison.tokens == world.expected(poison.submission)[: len(poison.tokens)]
    for record in records:
        if record is not poison:
            assert record.finished is not None and record.finished.reason is FinishReason.LENGTH
            assert record.tokens == world.expected(record.submission)
    world.check_clean()


@pytest.mark.parametrize("num_output", [1, 9])
def test_two_such_requests_fail_one_after_the_other(num_output: int) -> None:
    world = make_world()
    records = submit_many(world, 8)
    fatal = [reaches(records[i], num_output) for i in (2, 5)]
    num_deaths = run_dying(world, 1, lambda w: any(is_fatal(w) for is_fatal in fatal))
    failed = [i for i, record in enumerate(records) if record.finished and record.finished.error]
    assert failed == [2, 5] and num_deaths <= 8
    assert all(r.tokens == world.expected(r.submission) for i, r in enumerate(records) if i not in failed)


def test_suspects_are_tried_one_at_a_time_and_run_on() -> None:
    world = make_world()
    records = submit_many(world, 5)
    for _ in range(3):
        world.plan()
        lose_worker(world)
    late = world.submit([3, 4, 5], stop=Stop(max_tokens=4))
    most_untried = 0
    while any(record.finished is None for record in records):
        assert world.plan()
        state = world.planner.state
        assert state is not None
        running = {request.key for request in state.table.running()}
        fresh = [r for r in records if r.submission.key in running and len(r.tokens) < 8]
        most_untried = max(most_untried, len(fresh))
        if any(len(record.tokens) < 8 for record in records):
            assert late.submission.key not in running, "nobody else is admitted while suspects are left"
        world.execute()
        world.process()
    assert most_untried == 1
    world.run()
    assert all(r.tokens == world.expected(r.submission) for r in (*records, late))


def test_losses_that_come_whenever_they_like_fail_nobody() -> None:
    num_deaths = 0
    for seed in range(5):
        # Replays are short against the time between losses, or nobody could tell a fatal request from bad luck.
        world, rng = make_world(max_tokens_per_step=512, chunk_tokens=64), random.Random(seed)
        records = submit_many(world, 12, max_tokens=150)
        num_deaths += run_dying(world, 1, lambda _, rng=rng: rng.random() < 0.03)
        assert all(r.finished is not None and r.finished.error is None for r in records)
        assert all(r.tokens == world.expected(r.submission) for r in records)
    assert num_deaths > 20


def test_who_is_fenced_off_again_and_again_is_no_suspect() -> None:
    world = make_world()
    records = submit_many(world, 4)
    fenced = MeshError(common_pb2.ERROR_REASON_EPOCH_FENCED, "another scheduler took over")
    for _ in range(6):
        world.plan()
        lose_worker(world, fenced)
    world.plan()
    state = world.planner.state
    assert state is not None and state.table.num_running == 4
    world.run()
    assert all(r.tokens == world.expected(r.submission) for r in records)


def lose_to(world: World, end: PredecessorEnd, number: int) -> None:
    """Another worker process is there, whose supervisor knows how the last one ended."""
    world.group = replace(world.group, instance_id=f"w{number}", predecessor_end=end)
    lose_worker(world)


def test_workers_that_are_killed_from_outside_fail_nobody() -> None:
    world = make_world(chunk_tokens=4, max_tokens_per_step=4)
    record = world.submit(list(range(2, 60)))
    for number in range(12):
        world.plan()  # Always in the middle of the same prefill.
        lose_to(world, PredecessorEnd.FROM_OUTSIDE, number)
    late = world.submit([3, 4, 5], stop=Stop(max_tokens=4))
    world.run()
    for r in (record, late):
        assert r.finished is not None and r.finished.error is None and r.tokens == world.expected(r.submission)


@pytest.mark.parametrize("end", [PredecessorEnd.UNKNOWN, PredecessorEnd.BY_ITSELF])
def test_a_death_that_nobody_explains_counts_as_ever(end: PredecessorEnd) -> None:
    world = make_world()
    record = world.submit(list(range(2, 30)))
    for number in range(5):
        assert record.finished is None
        world.plan()
        lose_to(world, end, number)
    assert record.finished is not None and record.finished.error is not None
    assert record.finished.error.reason == common_pb2.ERROR_REASON_STEP_FAILED


def test_one_kill_from_outside_excuses_no_later_loss_of_the_same_worker() -> None:
    world = make_world()
    record = world.submit(list(range(2, 30)))
    world.plan()
    lose_to(world, PredecessorEnd.FROM_OUTSIDE, 1)
    for _ in range(5):
        assert record.finished is None
        world.plan()
        lose_worker(world)  # The same process still: its stream was lost, or its answers make no sense.
    assert record.finished is not None and record.finished.error is not None


@pytest.mark.parametrize("num_output", [1, 9])
def test_a_step_that_raises_counts_like_a_death(num_output: int) -> None:
    world = make_world()
    records = submit_many(world, 8)
    is_fatal = reaches(records[3], num_output)
    failure = MeshError(common_pb2.ERROR_REASON_STEP_FAILED, "step died: the worker restarts")
    num_deaths = 0
    for _ in range(2_000):
        while world.planner.num_in_flight <= 1 and world.plan():
            pass
        if not world.execute() and not world.results:
            break
        if is_fatal(world):
            num_deaths += 1
            state = world.planner.state
            assert state is not None and state.in_flight.oldest is not None
            step_id = state.in_flight.oldest.plan.step_id
            world.results.clear()
            world.plans.clear()
            world.planner.end_epoch(step_id, failure)
            lose_to(world, PredecessorEnd.BY_ITSELF, num_deaths)
        else:
            world.process()
    failed = [i for i, record in enumerate(records) if record.finished and record.finished.error]
    assert failed == [3] and 5 <= num_deaths <= 7


def test_a_worker_that_says_that_it_leaves_is_no_death() -> None:
    world = make_world()
    record = world.submit(list(range(2, 30)))
    leaving = MeshError(common_pb2.ERROR_REASON_NOT_SERVING, "the worker leaves", {"state": "draining"})
    for _ in range(8):
        world.plan()
        lose_worker(world, leaving)
    world.run()
    assert record.tokens == world.expected(record.submission)


def test_a_group_that_dies_with_nothing_to_do_makes_no_suspects() -> None:
    world = make_world()
    for _ in range(6):
        lose_worker(world)
    record = world.submit([2, 3, 4])
    for _ in range(2):
        world.plan()
        lose_worker(world)
    other = world.submit([2, 3, 5])
    world.plan()
    state = world.planner.state
    assert state is not None and state.table.num_running == 2
    world.run()
    assert [record.tokens, other.tokens] == [world.expected(record.submission), world.expected(other.submission)]


def suspect_of(world: World, **changes: object) -> Record:
    """A request of 80 tokens that ran at three losses: it is probed alone, once its KV is there or given up."""
    suspect = world.submit(list(range(2, 52)) + list(range(2, 32)), stop=Stop(max_tokens=12), **changes)
    for _ in range(3):
        world.plan()
        lose_worker(world)
    return suspect


def test_a_suspect_waits_for_kv_from_elsewhere_as_any_other_does() -> None:
    world = make_world()
    suspect = suspect_of(world, transfer_id="t")
    state, arrivals = world.planner.state, world.planner.arrivals
    assert state is not None
    assert arrivals.reserve(state, "t", suspect.submission.prompt_ids, "", 60.0, 1, world.now)
    for _ in range(3):
        assert not world.plan(), "it waits, and nobody else is admitted"
    arrivals.cancel(state, "t")
    world.run()
    assert suspect.tokens == world.expected(suspect.submission)
    world.check_clean()


def test_a_suspect_waits_for_a_fetch_as_any_other_does() -> None:
    world = make_world()
    suspect = suspect_of(world)
    world.group = replace(world.group, num_host_pages=64, has_kv_store=True)
    lose_worker(world, MeshError(common_pb2.ERROR_REASON_EPOCH_FENCED, "another scheduler took over"))
    state, fetches = world.planner.state, world.planner.fetches
    assert state is not None
    for _ in range(3):
        assert not world.plan(), "it waits, and nobody else is admitted"
    (fetch,) = fetches.take_wanted()
    fetches.fetched(state, fetch, 0)
    world.group = replace(world.group, num_host_pages=0)
    assert world.plan() and state.table.num_running == 1
    assert suspect.finished is None
