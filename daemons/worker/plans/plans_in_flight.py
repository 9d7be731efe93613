"""Plans that a worker has received and not answered, and what its health and metrics say of them. One event loop."""

from __future__ import annotations

import asyncio

from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.worker.v1 import worker_pb2

# A step counts as hung after 3 x its expected time. The first one, of which nobody knows anything, may be a slow one.
_HANG_FACTOR = 3
_UNKNOWN_STEP_S = 60.0


class PlansInFlight:
    """num: of all plans, those that will be refused among them."""

    def __init__(self, progress: Progress, metrics: Metrics) -> None:
        self.num = 0
        self._progress = progress
        self._metrics = metrics
        self._draft_seconds = 0.0
        self._to_run: dict[tuple[int, int], worker_pb2.StepPlan] = {}
        self._answered_one = asyncio.Event()

    def received(self, plan: worker_pb2.StepPlan, *, will_run: bool) -> None:
        """will_run: it is the next step of the epoch, and no plan of another one that is refused."""
        self.num += 1
        if will_run:
            self._to_run[plan.header.epoch, plan.header.step_id] = plan

    def answered(self, epoch: int, step_id: int) -> None:
        self._to_run.pop((epoch, step_id), None)
        self.num -= 1

    def completed(self, result: StepResult, draft_seconds: float) -> None:
        """A step ran: counts it, and its device time. draft_seconds: as the runner tells them now."""
        self._progress.completed()
        self._metrics.steps.inc()
        self._metrics.batch_size.observe(len(result.counts))
        device_s = max(0, result.device_end_ns - result.device_start_ns) * 1e-9
        self._metrics.step_seconds.observe(device_s)
        self._metrics.device_busy_seconds.inc(device_s)
        self._metrics.draft_seconds.inc(draft_seconds - self._draft_seconds)
        self._draft_seconds = draft_seconds

    def export(self) -> None:
        """Tells health and metrics how many there are, and for how long the oldest step may compute."""
        oldest = next(iter(self._to_run.values()), None)
        patience_s = 0.0
        if oldest is not None:
            expected_s = oldest.header.expected_us / 1e6
            patience_s = _HANG_FACTOR * expected_s if expected_s else _UNKNOWN_STEP_S
        self._progress.work_pending(self.num, patience_s=patience_s)
        self._metrics.plans_in_flight.set(self.num)

    def wake(self) -> None:
        """Lets go on who waits for an answer."""
        self._answered_one.set()

    async def next_answer(self) -> None:
        self._answered_one.clear()
        await self._answered_one.wait()
