"""The sending end of a scheduler's epoch: plans while the lookahead wants more, and sends them alone or in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.timing.lookahead import Lookahead
from radixmesh.daemons.scheduler.planning.timing.plan_hold import PlanHold
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep
from radixmesh.daemons.scheduler.scheduler_metrics import SchedulerMetrics
from radixmesh.daemons.scheduler.step_timeout import StepTimeout

log = get_logger(__name__)

# A holder that says nothing for 5 s counts as dead to other schedulers.
_HEARTBEAT_S = 1.0


class PlanStream(Protocol):
    async def send(self, *plans: StepPlan) -> None:
        """Sends plans as one message."""


class PlanSender:
    """Of one scheduler. depth: plans ahead, None: by the lookahead rule. timeout: told of the first plan of a pause.
    holds_plans: see PlanHold; a fixed depth holds none."""

    def __init__(
        self,
        planner: Planner,
        timeout: StepTimeout,
        clock: Callable[[], float],
        *,
        depth: int | None,
        holds_plans: bool = True,
        metrics: SchedulerMetrics | None = None,
    ) -> None:
        self._planner = planner
        self._timeout = timeout
        self._clock = clock
        self._depth = depth
        self._metrics = metrics
        self.lookahead = Lookahead(depth=depth, max_in_flight=1)
        self.hold = PlanHold(planner.estimate, planner.token_time)
        self._holds_plans = holds_plans and depth is None
        self._last_sent_s = self._last_answered_s = clock()
        self._is_holding, self._late_step = False, 0  # The step whose plan was still held when that before it ended.
        # Steps sent while nothing ran, and the device time of their results.
        self._sent_idle, self._sent_idle_us = range(0), 0.0
        self._batch_ends: deque[int] = deque()  # The last step of each batch in flight.

    def begin_epoch(self, max_in_flight: int) -> None:
        """max_in_flight: plans that the workers take at a time."""
        self._sent_idle = range(0)
        self._is_holding, self._late_step = False, 0
        self._batch_ends.clear()
        self.lookahead = Lookahead(depth=self._depth, max_in_flight=max_in_flight)
        self._last_sent_s = self._clock()

    async def send_plans(self, stream: PlanStream) -> float:
        """Sends what the planner has to do, as far ahead as the lookahead wants. Returns seconds for which the next
        plan is held: call again then, and at each result; 0 = none is."""
        planner = self._planner
        batch: list[StepPlan] = []
        size = 1
        while planner.state is not None:
            steps = planner.state.in_flight.steps()
            is_filling = 0 < len(batch) < size and len(steps) < self.lookahead.max_in_flight
            if not is_filling and not self.lookahead.wants_more(len(steps), self._queued_us(steps)):
                break
            now = self._clock()
            if steps and not batch and self._holds_plans:
                if self._awaits_prefix(steps):
                    self._is_holding = False  # It leaves behind the result, which is no lateness.
                    break
                if held_s := self._held_s(steps, now):
                    self._is_holding = True
                    return held_s
            self._is_holding = False
            is_heartbeat = not steps and now - self._last_sent_s >= _HEARTBEAT_S
            plan = planner.plan(now, is_heartbeat=is_heartbeat)
            if plan is None:
                self._late_step = 0
                break
            if self._metrics is not None:
                self._metrics.planned(self._clock() - now)
            if not steps:
                self._timeout.restart(now)
            self._last_sent_s = now
            if batch and not _is_decode(plan):
                await self._send(stream, batch)
                batch = []
            batch.append(plan)
            # The worker learns the tokens of a batch at its end: masks of a grammar would come late.
            may_batch = _is_decode(plan) and not planner.state.table.num_guided
            size = self.lookahead.batch_size(plan.expected_us) if may_batch else 1
            if len(batch) >= size:
                await self._send(stream, batch)
                batch = []
        if batch:
            await self._send(stream, batch)
        return 0.0

    def answered(self, result: StepResult, oldest: PlannedStep, now: float) -> None:
        """A step's result came, which the planner has not taken yet. oldest: the step, as it was in flight."""
        if self._holds_plans and oldest.plan.step_id == result.step_id:
            is_late = result.step_id == self._late_step
            self.hold.observe(oldest, result, followed=is_late or oldest.sent_s < self._last_answered_s)
        self._late_step = result.step_id + 1 if self._is_holding else 0
        self._is_holding = False
        self._last_answered_s = now
        if result.step_id in self._sent_idle:
            self._sent_idle_us += (result.device_end_ns - result.device_start_ns) / 1000
            if result.step_id == self._sent_idle[-1]:
                self.lookahead.observe_round_trip((now - oldest.sent_s) * 1e6, self._sent_idle_us)

    def _held_s(self, steps: Sequence[PlannedStep], now: float) -> float:
        started_s = max(steps[0].sent_s, self._last_answered_s)
        return self.hold.seconds(steps, started_s, now, self.lookahead.gap_us)

    def _awaits_prefix(self, steps: Sequence[PlannedStep]) -> bool:
        """True if the next plan is better made when the running step's result is in: see PlanHold.is_worth_a_gap()."""
        prefill, state = self._planner.prefill, self._planner.state
        if len(steps) > 1 or prefill is None or state is None or not self._planner.queue.num_waiting_for_prefix:
            return False
        num_rows, gap_us = len(state.decode_set.slots), self.lookahead.gap_us
        return self.hold.is_worth_a_gap(steps[0], prefill.num_due_followers(state), num_rows, gap_us)

    async def _send(self, stream: PlanStream, batch: Sequence[StepPlan]) -> None:
        assert self._planner.state is not None
        first, last, oldest = batch[0], batch[-1].step_id, self._planner.state.in_flight.oldest
        if oldest is not None and oldest.plan.step_id == first.step_id and first.has_forward:
            # A batch is answered as a whole: its round trip has the device time of all its steps.
            self._sent_idle, self._sent_idle_us = range(first.step_id, last + 1), 0.0
        self._batch_ends.append(last)
        await stream.send(*batch)
        if first.chunks:
            log.debug("step_plan_sent", step=first.step_id)

    def _queued_us(self, steps: Sequence[PlannedStep]) -> int:
        """Expected time of the plans behind the batch that runs: it is answered as a whole."""
        if not steps:
            return 0
        ends = self._batch_ends
        while ends and ends[0] < steps[0].plan.step_id:
            ends.popleft()
        running = ends[0] if ends else steps[0].plan.step_id
        return sum(step.plan.expected_us for step in steps if step.plan.step_id > running)


def _is_decode(plan: StepPlan) -> bool:
    """True if a step brings nobody a first token: its result may wait for that of the next."""
    return plan.has_forward and not (plan.chunks or plan.admits or plan.barrier_ops)
