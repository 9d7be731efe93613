"""A scheduler through hours of virtual time: bursts of requests, aborts, too little memory, a worker's faults.

The planner and the worker are real, the time is the simulated device's. What the engine does with a fault is done here
in its place: a refusal, a result that does not fit, a lost stream and a lost worker all end the epoch and begin the
next, on the KV there is.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from support.lagging import LaggingRunner, LaggingWorld
from support.planner_world import VOCAB_SIZE, Record, new_executor

NUM_PAGES, NUM_SLOTS, STEP_TOKENS, LONGEST = 480, 12, 96, 200
# A large model: some tens of thousands of steps an hour.
STEP_US = 80_000.0
FAULTS = ("refuse", "duplicate", "reorder", "delay", "vanish", "lose_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """fault_rate: probability of each kind of fault, a step. arrivals_s: requests a second, while it bursts twice as
    many, while it is calm a tenth. abort_rate: share of requests that somebody gives up on. lag: steps that the
    worker launches before it tells the tokens of one."""

    seconds: float
    seed: int
    policy: str = "lpm"
    fault_rate: float = 0.002
    arrivals_s: float = 4.0
    abort_rate: float = 0.08
    lag: int = 0


class ChaosHour:
    """run() raises AssertionError for lost or repeated tokens, leaks, broken invariants and requests without an end."""

    def __init__(self, config: ChaosConfig) -> None:
        self.config = config
        self.random = random.Random(config.seed)
        self.world = LaggingWorld(
            lag=config.lag,
            num_pages=NUM_PAGES,
            num_slots=NUM_SLOTS,
            max_tokens_per_step=STEP_TOKENS,
            chunk_tokens=48,
            max_total_len=LONGEST,
            decode_reserve_tokens=1,
            max_queue=60,
            queue_policy=config.policy,
        )
        self.world.executor = self._new_executor()
        self.world.begin_epoch()
        self.texts = [[self.random.randrange(2, VOCAB_SIZE) for _ in range(60)] for _ in range(6)]
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.num_tokens = self.num_steps = 0
        self._next_arrival_s = 0.0
        self._depth = 1
        self._lag = 0
        self._held: StepResult | None = None

    def run(self) -> None:
        world, config = self.world, self.config
        while world.now < config.seconds:
            self._arrive()
            self._meddle()
            self._plan()
            if not self._step() and not world.results:
                self._idle()
            self._process()
            self._judge()
        self._drain()

    # -- who asks

    def _arrive(self) -> None:
        while self._next_arrival_s <= self.world.now:
            is_burst = int(self.world.now // 20) % 2 == 0
            rate = self.config.arrivals_s * (2.0 if is_burst else 0.1)
            self._next_arrival_s += self.random.expovariate(rate)
            self._submit()

    def _submit(self) -> None:
        rng, world = self.random, self.world
        text = rng.choice(self.texts)
        prompt = text[: rng.randrange(1, 61)] + [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
        deadline = world.now + rng.uniform(-1.0, 20.0) if rng.random() < 0.05 else None
        world.submit(
            prompt,
            tenant=rng.choice("ab"),
            priority=rng.choice((0, 0, 0, 1)),
            cache_salt=rng.choice(("", "", "", "s")),
            deadline_s=deadline,
            sampling=Sampling(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(1000)),
            stop=Stop(
                max_tokens=rng.randrange(1, 80),
                min_tokens=rng.choice((0, 0, 1)),
                stop_ids=(rng.randrange(2, VOCAB_SIZE),) if rng.random() < 0.1 else (),
                ignore_eos=rng.random() < 0.3,
            ),
        )

    def _meddle(self) -> None:
        """Somebody gives up; now and then the lookahead changes, or an operator empties the cache."""
        rng, world = self.random, self.world
        share = self.config.abort_rate * self.config.arrivals_s * STEP_US / 1e6
        if world.records and rng.random() < share:
            record = rng.choice(list(world.records.values()))
            world.planner.abort(record.submission.key.request_id)
            world.collect()
        if rng.random() < 0.01:
            self._depth = rng.randrange(4)
        if rng.random() < 0.001:
            world.planner.flush.wish()

    # -- steps and what befalls them

    def _plan(self) -> None:
        while self.world.planner.num_in_flight <= self._depth and self.world.plan():
            pass
        self.world.log.clear()

    def _step(self) -> bool:
        """The worker runs its next plan, or something happens instead or besides."""
        world = self.world
        if not world.plans:
            return self._execute(None)
        fault = next((kind for kind in FAULTS if self.random.random() < self.config.fault_rate), None)
        if fault is not None:
            self.counts[fault] += 1
        if fault == "refuse":
            self._refuse()
        elif fault == "vanish":
            self._begin_epoch()
        elif fault == "lose_worker":
            self._lose_worker()
        else:
            self._execute(fault)
        return True

    def _execute(self, fault: str | None) -> bool:
        """Launches the next plan, and takes the result of an earlier one. Whether there was anything to do."""
        world, num_results = self.world, len(self.world.results)
        self.num_steps += bool(world.plans)
        if not world.execute():
            return False
        if len(world.results) == num_results:
            return True
        result = world.results[-1]
        world.now += (result.device_end_ns - result.device_start_ns) / 1e9
        if self._held is not None:
            world.results.append(self._held)
            self._held = None
        elif fault == "duplicate":
            world.results.append(result)
        elif fault == "reorder" and world.plans:
            self._held = world.results.pop()
        elif fault == "delay":
            self._lag = self.random.randrange(1, 4)
        return True

    def _process(self) -> None:
        """Takes what results have come, unless they are late."""
        if self._lag:
            self._lag -= 1
            return
        try:
            while self.world.process():
                pass
        except MeshError as error:
            assert error.reason == ErrorReason.ERROR_REASON_STEP_GAP, error
            self.counts["diverged"] += 1
            self._begin_epoch(error=error)

    def _refuse(self) -> None:
        """Results before the refusal come first; of the plans behind it nothing runs."""
        world = self.world
        step_id = world.plans[0].step_id
        world.plans.clear()
        while world.launched:
            world.execute()
        self._lag = 0
        if self._held is not None:  # Its successor will never come.
            world.results.append(self._held)
            self._held = None
        self._process()
        state = world.planner.state
        assert state is not None
        if state.in_flight.oldest is not None:
            error = MeshError(ErrorReason.ERROR_REASON_INTERNAL, "refused on demand")
            self._begin_epoch(refused_step=step_id, error=error)

    def _begin_epoch(self, *, refused_step: int = 0, error: MeshError | None = None) -> None:
        self._held = None
        self.world.planner.end_epoch(refused_step, error)
        self.world.collect()
        self.counts["adopted_tokens"] += self.world.begin_epoch()

    def _lose_worker(self) -> None:
        """The process died: plans and KV with it. The next one knows no epochs."""
        self.world.plans.clear()
        self.world.launched.clear()
        self.world.executor = self._new_executor()
        self.world.epoch = 0
        self._begin_epoch()

    def _new_executor(self) -> StepExecutor:
        runner_class = LaggingRunner if self.config.lag else SimulatedRunner
        return new_executor(self.world, step_us=STEP_US, runner_class=runner_class)

    def _idle(self) -> None:
        self.world.now = max(self.world.now, min(self._next_arrival_s, self.world.now + 1.0))

    # -- what came of it

    def _drain(self) -> None:
        world = self.world
        self._lag = 0
        if self._held is not None:
            self._begin_epoch()
        self._process()
        world.run(self._depth, max_steps=100_000)
        world.collect()
        self._judge()
        assert not world.records, f"{len(world.records)} requests have no end"
        world.check_clean()

    def _judge(self) -> None:
        """Compares everything that ended with the oracle, and forgets it."""
        records = self.world.records
        for key in [key for key, record in records.items() if record.finished or record.rejected]:
            self._check(records.pop(key))
        self.world.forget_expected()

    def _check(self, record: Record) -> None:
        expected, finished = self.world.expected(record.submission), record.finished
        if finished is None:
            assert record.rejected is not None and not record.tokens
            assert record.rejected.error.reason == ErrorReason.ERROR_REASON_OVERLOADED, record.rejected.error
            self.ends["overloaded"] += 1
            return
        self.ends[finished.reason.name.lower()] += 1
        self.num_tokens += len(record.tokens)
        assert record.tokens == expected[: len(record.tokens)], (record.submission.key, record.tokens, expected)
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert len(record.tokens) == len(expected) == finished.num_output, record.submission.key
        elif finished.reason is FinishReason.ERROR:
            assert finished.error is not None
            self.ends[finished.error.reason_name.lower()] += 1
            deadline = record.submission.deadline_s
            is_late = deadline is not None and deadline <= self.world.now
            # Admitted in two plans that were refused: it may be why they were.
            is_isolated = finished.error.reason == ErrorReason.ERROR_REASON_INTERNAL and self.counts["refuse"] >= 2
            assert is_late or is_isolated, finished
