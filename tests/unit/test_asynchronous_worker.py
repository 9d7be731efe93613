"""Steps that are launched before the tokens of those before them are known, under a real planner."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.chaos_hour import ChaosConfig, ChaosHour
from support.lagging import LaggingRunner, LaggingUnevenRunner, LaggingWorld, LateGuides, SkippingRunner
from support.planner_world import VOCAB_SIZE
from support.plans import admit, chunk, grant

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.runtime.steps.step_codec import plan_to_proto
from radixmesh.daemons.scheduler.sequence import SequenceKey
from radixmesh.daemons.worker.plans.files.plan_dump import PlanDump
from radixmesh.daemons.worker.plans.plan_runner import PlanRunner
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.step_handle import StepHandle

# Both sizes of a page and each lag that differs in kind: none, one step, and more steps than a row has pages in flight.
CELLS = [(0, 4), (1, 1), (3, 4), *(pytest.param(*cell, marks=pytest.mark.full) for cell in [(0, 1), (1, 4), (3, 1)])]


def _submit_load(
    world: LaggingWorld, rng: np.random.Generator, num_requests: int, *, has_min_tokens: bool = True
) -> list:
    """Requests that share prefixes, some with logprobs, which the plain runner takes as segments."""
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
        stop = Stop(max_tokens=int(rng.integers(1, 40)), min_tokens=int(has_min_tokens and index % 4 == 1))
        wanted.append(world.submit(prompt, sampling=sampling, stop=stop))
    return wanted


def _check_load(world: LaggingWorld, records: list) -> None:
    world.run(depth=world.lag + 1)
    for record in records:
        assert record.rejected is None and record.finished is not None
        assert record.tokens == world.expected(record.submission)
    world.check_clean()
    # Pages adopted here are hit by the next round, and the worker compares every page that is named with its record:
    # one that was written down wrongly refuses the plan.
    world.begin_epoch()
    assert world.planner.state.pages.pool.num_cached > 0


@pytest.mark.parametrize(("lag", "page_size"), CELLS)
def test_tokens_and_records_are_those_of_a_worker_that_waits(lag, page_size):
    rng = np.random.default_rng(lag * 10 + page_size)
    # Little memory: requests are retracted, pages change hands while steps that wrote them still run.
    world = LaggingWorld(lag=lag, page_size=page_size, num_pages=160 // page_size, num_slots=6)
    for _ in range(4):
        _check_load(world, _submit_load(world, rng, 24))


@pytest.mark.parametrize(("lag", "page_size"), CELLS)
def test_rows_of_any_number_of_tokens_over_steps_in_flight(lag, page_size):
    """The host hears late how long rows are: pages are granted for the most, records are settled from counts."""
    most = page_size + 1
    rng = np.random.default_rng(lag * 10 + page_size)
    runner_class = partial(LaggingUnevenRunner, max_tokens_per_row=most, row_seed=lag)
    world = LaggingWorld(
        lag=lag, page_size=page_size, num_pages=240 // page_size, num_slots=6, runner_class=runner_class
    )
    for _ in range(3):
        _check_load(world, _submit_load(world, rng, 24, has_min_tokens=False))


@pytest.mark.parametrize(("lag", "page_size"), CELLS)
def test_rows_that_yield_nothing_in_some_steps(lag, page_size):
    """As those whose masks are late: their lengths go on from where they are, and every output comes to its end."""
    rng = np.random.default_rng(lag * 10 + page_size)
    world = LaggingWorld(
        lag=lag, page_size=page_size, num_pages=200 // page_size, num_slots=6, runner_class=SkippingRunner
    )
    for _ in range(3):
        _check_load(world, _submit_load(world, rng, 24, has_min_tokens=False))
    assert world.executor.runner.num_skipped > 50


@pytest.mark.parametrize(("lag", "runner_class"), [(0, SimulatedRunner), (1, LaggingRunner), (3, SkippingRunner)])
def test_prompts_and_segments_whose_masks_are_late(lag, runner_class):
    """The last token of a prompt is computed by the step that samples behind it; what is cached was computed."""
    rng = np.random.default_rng(lag)
    world = LaggingWorld(lag=lag, page_size=4, num_pages=60, num_slots=6, runner_class=runner_class)
    guides = world.executor.guides = LateGuides()
    for _ in range(3):
        _check_load(world, _submit_load(world, rng, 24, has_min_tokens=False))
    assert guides.num_late > 50


def test_a_slot_that_changes_hands_keeps_both_requests_apart():
    world = LaggingWorld(lag=3, num_slots=1, num_pages=64, eos_rate=0.0)
    records = [world.submit([5 + i, 6, 7], stop=Stop(max_tokens=3 + i)) for i in range(8)]
    world.run(depth=3)
    assert [record.tokens for record in records] == [world.expected(record.submission) for record in records]
    world.begin_epoch()
    again = [
        world.send(replace(record.submission, handle=100 + i, key=SequenceKey(f"again{i}", 0)))
        for i, record in enumerate(records)
    ]
    world.run(depth=3)
    assert [record.tokens for record in again] == [record.tokens for record in records]
    assert all(record.finished.cached_tokens > 0 for record in again)


def test_a_lagging_result_is_refused_nothing_by_its_successors():
    """Pages that a finished request leaves to the cache are named by the next one while steps still run."""
    world = LaggingWorld(lag=2, num_slots=2, num_pages=128, eos_rate=0.0, inflight_prefix_min_tokens=1)
    prompt = list(range(2, 30))
    first = world.submit(prompt, stop=Stop(max_tokens=6))
    world.run(depth=2)
    seconds = [world.submit(prompt + first.tokens[:n], stop=Stop(max_tokens=9)) for n in range(1, 6)]
    world.run(depth=2)
    for record in seconds:
        assert record.tokens == world.expected(record.submission)
        assert record.finished.cached_tokens > 0


@pytest.mark.parametrize("lag", [1, 3])
def test_load_over_steps_in_flight(lag):
    """Refusals, lost streams, flushes, aborts and retractions while tokens are not known yet."""
    hour = ChaosHour(ChaosConfig(seconds=60.0, seed=lag, fault_rate=0.01, lag=lag))
    hour.run()
    assert hour.num_steps > 400 and hour.world.planner.counters.num_page_violations == 0
    assert hour.counts["refuse"] and hour.counts["diverged"] and hour.counts["adopted_tokens"], hour.counts


def _dead():
    raise RuntimeError("an illegal memory access was encountered")


class _DyingRunner(LaggingRunner):
    """`dies_at`: the launch whose step dies; `refuses_at`: the one that fails as it is launched."""

    dies_at = refuses_at = num_launches = 0

    def launch(self, rows, segments, ready_ns):
        self.num_launches += 1
        if self.num_launches == self.refuses_at:
            raise MemoryError("out of memory")
        step = super().launch(rows, segments, ready_ns)
        return StepHandle(step.event, _dead) if self.num_launches == self.dies_at else step


def _answers(tmp_path, *, dies_at=0, refuses_at=0, sampling=None):
    """Of four plans that are launched one behind the other: a prompt, then its decodes."""
    world = LaggingWorld(lag=0, num_slots=2, num_pages=64, eos_rate=0.0, runner_class=_DyingRunner)
    world.executor.runner.dies_at, world.executor.runner.refuses_at = dies_at, refuses_at
    runner = PlanRunner(world.executor, PlanDump(tmp_path, "instance"), lambda: None)
    runner.begin_epoch(2, 0)
    parts = {"admits": (admit(0, [5, 6, 7], sampling=sampling),), "grants": (grant(0, range(16)),)}
    plans = [StepPlan(epoch=2, step_id=1, chunks=(chunk(0, 3),), decode_set=as_ints([]), **parts)]
    plans += [StepPlan(epoch=2, step_id=step, decode_set=as_ints([0])) for step in (2, 3, 4)]
    jobs = [runner.launch(plan_to_proto(plan), 0, None) for plan in plans]
    return [job.result() for job in jobs]


def _kinds(answers):
    return [
        "died" if a.died else "result" if a.result else "none" if a.response is None else "refused" for a in answers
    ]


def _check_died(answer, tmp_path):
    assert answer.refusal.reason == common_pb2.ERROR_REASON_STEP_FAILED
    assert answer.response.refusal.step_id == answer.step_id
    (dump,) = tmp_path.glob("*.bin")
    assert dump.name.endswith(f"-2-{answer.step_id}.bin")


def test_a_step_that_dies_ends_those_behind_it(tmp_path):
    answers = _answers(tmp_path, dies_at=2)
    assert _kinds(answers) == ["result", "died", "none", "none"]
    _check_died(answers[1], tmp_path)


def test_the_step_that_died_is_blamed_not_the_one_that_waited_for_it(tmp_path):
    """Logprobs are told by the host: a decode that wants them waits for the step before as it is launched."""
    answers = _answers(tmp_path, dies_at=2, sampling=Sampling(temperature=0.0, num_top_logprobs=1))
    assert _kinds(answers) == ["result", "died", "none", "none"]
    _check_died(answers[1], tmp_path)


def test_a_launch_that_fails_behind_a_dead_step_is_no_death_of_its_own(tmp_path):
    answers = _answers(tmp_path, dies_at=2, refuses_at=3)
    assert _kinds(answers) == ["result", "died", "none", "none"]
    _check_died(answers[1], tmp_path)


def test_steps_before_a_launch_that_fails_give_their_results(tmp_path):
    answers = _answers(tmp_path, refuses_at=3)
    assert _kinds(answers) == ["result", "result", "died", "none"]
    _check_died(answers[2], tmp_path)
