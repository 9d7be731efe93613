"""The scheduler's loop: waits for submits and results, plans while the lookahead allows, sends plans and outputs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import NoTracer, Tracer
from radixmesh.daemons.scheduler.config import Role, SchedulerSettings
from radixmesh.daemons.scheduler.grammar_puts import GrammarPuts
from radixmesh.daemons.scheduler.group.group_client import ClaimedGroup, GroupClient, GroupState
from radixmesh.daemons.scheduler.group.worker_stream import RefusedPlan
from radixmesh.daemons.scheduler.plan_sender import PlanSender
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep
from radixmesh.daemons.scheduler.routers.load_push import LoadPush
from radixmesh.daemons.scheduler.routers.router_streams import RouterStreams
from radixmesh.daemons.scheduler.scheduler_metrics import SchedulerMetrics
from radixmesh.daemons.scheduler.sequence_times import SequenceTimes
from radixmesh.daemons.scheduler.step_timeout import StepTimeout
from radixmesh.daemons.scheduler.tiers.fetch_calls import FetchCalls
from radixmesh.daemons.scheduler.transfers.reservations import Reservations
from radixmesh.daemons.scheduler.transfers.transfer_calls import TransferCalls

log = get_logger(__name__)

_TICK_S = 0.1
_EXPORT_S = 0.5
# After an epoch without a single step: whatever ended it may well end the next one.
_FUTILE_PAUSE_S = 0.2


class _Taken(NamedTuple):
    """A result whose tokens were taken. step: the one that it answers, None = of another epoch. Seconds."""

    result: StepResult
    step: PlannedStep | None
    at_s: float
    take_s: float


class SchedulerLoop:
    """Drives a planner and a worker group; routers' streams hang on `streams`. One event loop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        group: GroupClient,
        progress: Progress,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds; tests give their own."""
        self._clock = clock
        # Revisions of the cache must be higher than those of a scheduler before this one: microseconds are.
        self.planner = Planner(
            settings.planner_settings(),
            first_revision=time.time_ns() // 1000,
            observer=SequenceTimes(metrics, tracer or NoTracer()) if metrics is not None else None,
        )
        self.streams = RouterStreams()
        self.reservations = Reservations(self.planner, is_on=lambda: self.role is Role.DECODE, clock=clock)
        self.group_state = GroupState.CONNECTING
        self.is_draining = False
        self.is_leaving = False
        """The process is about to end: routers may move what runs here."""
        self.epoch = 0
        self._settings = settings
        self._role = settings.role
        self.group = group
        self._progress = progress
        self._metrics = metrics
        self._step_metrics = SchedulerMetrics(metrics) if metrics is not None else None
        self._wake = asyncio.Event()
        self._results: deque[Sequence[StepResult]] = deque()
        self._taken: list[_Taken] = []
        self._loss: BaseException | None = None
        now = self._last_export_s = self._clock()
        self._loads = LoadPush(self.planner, self.streams, now)
        self._timeout = StepTimeout(settings.step_timeout_s, now)
        self.sender = PlanSender(
            self.planner,
            self._timeout,
            clock,
            depth=settings.fixed_depth,
            holds_plans=settings.hold_plans,
            metrics=self._step_metrics,
        )
        self._held: asyncio.TimerHandle | None = None
        self.has_first_tokens = False
        """First tokens are on their way, and nothing else has been done of the results that brought them."""
        self._changed: asyncio.Future[None] | None = None
        self._served = b""

    @property
    def role(self) -> Role:
        """In disaggregated prefill and decode; BOTH where the workers have no transfers."""
        return self._role if self._has_transfers else Role.BOTH

    @property
    def _has_transfers(self) -> bool:
        group = self.planner.group
        return group is not None and group.has_transfers

    def set_role(self, role: Role) -> Role:
        """Takes another role while serving; the one until now. Raises UNSUPPORTED where there are no transfers."""
        if role is not Role.BOTH and (not self._has_transfers or self._settings.cache == "none"):
            message = "KV transfer is not offered here: give the workers --transfer-staging-bytes, and keep the cache"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "KV transfer"})
        previous, self._role = self.role, role
        self.streams.push_loads()
        return previous

    def notify(self) -> None:
        """Something was aborted or wished for: delivers outputs, and plans soon."""
        self.deliver()
        self._wake.set()

    def submitted(self) -> None:
        """Something was submitted: the plan that has it leaves before anybody hears of the load that it makes."""
        if self.planner.state is None:
            self.deliver()
        self._wake.set()

    def deliver(self) -> None:
        self.streams.deliver(self.planner.take_outputs())
        self._loads.if_changed(self._clock())
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Returns once is_true() is; looks whenever something happened."""
        while not is_true():
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            # Shielded: several wait for one future, and one that gives up must not cancel it.
            await asyncio.shield(self._changed)

    def on_state(self, state: GroupState) -> None:
        """The group client's news. In standby nothing of ours can run: routers go elsewhere."""
        if state is self.group_state:
            return
        log.info("group_state", state=state.name.lower(), epoch=self.epoch)
        self.group_state = state
        if state is GroupState.STANDBY:
            message = "another scheduler holds the worker group: submit there"
            self.streams.close_all(MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": "standby"}))
        self.streams.push_loads()
        self.deliver()  # Wakes who waits for the state.

    async def run(self) -> None:
        """Runs for ever: claims the group, serves until it is lost, claims it again."""
        ticking = asyncio.ensure_future(self._tick())
        try:
            while True:
                claimed = await self.group.claim()
                num_steps = self.planner.counters.num_steps
                try:
                    await self._serve(claimed)
                finally:
                    await claimed.close()
                if self.planner.counters.num_steps == num_steps:
                    await asyncio.sleep(_FUTILE_PAUSE_S)
        finally:
            ticking.cancel()

    async def _serve(self, claimed: ClaimedGroup) -> None:
        """One epoch, from adoption to loss."""
        refused_step, error = 0, None
        reading: asyncio.Future[None] | None = None
        try:
            self._begin(claimed)
            reading = asyncio.ensure_future(self._read(claimed))
            await self.drive(claimed)
        except RefusedPlan as refusal:
            refused_step, error = refusal.step_id, refusal.error
            log.warning("plan_refused", step_id=refused_step, reason=error.reason_name, error=error.message)
        except MeshError as lost:
            error = lost
            log.warning("epoch_lost", epoch=self.epoch, reason=lost.reason_name, error=lost.message)
        except Exception:
            # A bug in planning must not take the daemon, nor the requests: a new epoch starts from sound state.
            log.exception("planner_failed", epoch=self.epoch)
        finally:
            if reading is not None:
                reading.cancel()
                # Not "await reading": that could not tell its cancellation from our own.
                await asyncio.wait((reading,))
            self.planner.end_epoch(refused_step, error)
            self.deliver()
            self._count_loss(error)
            is_fenced = error is not None and error.reason == ErrorReason.ERROR_REASON_EPOCH_FENCED
            self.on_state(GroupState.STANDBY if is_fenced else GroupState.CONNECTING)

    def _begin(self, claimed: ClaimedGroup) -> None:
        self.epoch = claimed.stream.epoch
        start = self._clock()
        self._check_identity()
        adopted = self.planner.begin_epoch(self.epoch, claimed.info, claimed.snapshots)
        self._results.clear()
        self._taken.clear()
        self.has_first_tokens = False
        self._loss = None
        self.sender.begin_epoch(claimed.info.max_plans_in_flight)
        now = self._clock()
        self._timeout.restart(now)
        log.info("epoch_begun", epoch=self.epoch, adopted_tokens=adopted, seconds=round(now - start, 4))
        if self._metrics is not None:
            self._metrics.epoch.set(self.epoch)
            self._metrics.readopted_tokens.inc(adopted)
        self.on_state(GroupState.SERVING)
        self.deliver()
        self._wake.set()

    async def _read(self, claimed: ClaimedGroup) -> None:
        try:
            async for results in claimed.stream.results():
                self.received(results)
        except Exception as loss:
            self.lost(loss)

    def received(self, results: Sequence[StepResult]) -> None:
        """One result of each data-parallel rank came; the loop takes it in its next turn."""
        self._results.append(results)
        self._wake.set()

    def lost(self, loss: Exception) -> None:
        """The worker's stream is lost: the epoch ends in the loop's next turn."""
        self._loss = loss
        self._wake.set()

    async def drive(self, claimed: ClaimedGroup) -> None:
        """Serves until the epoch ends; raises the error that ended it."""
        puts = GrammarPuts(self.planner, claimed.stream, self.notify)
        calls = TransferCalls(
            self.planner,
            claimed.stream,
            lambda: self.group.addresses,
            self.reservations.answers,
            self.notify,
            self._clock,
        )
        fetches = FetchCalls(self.planner, claimed.stream, self.notify)
        try:
            await self._drive_with(claimed, puts, calls, fetches)
        finally:
            puts.cancel()
            calls.cancel()
            fetches.cancel()

    async def _drive_with(
        self, claimed: ClaimedGroup, puts: GrammarPuts, calls: TransferCalls, fetches: FetchCalls
    ) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._results:
                self.take(self._results.popleft())
            if self.has_first_tokens and (self.planner.num_in_flight or not self.planner.num_going_on):
                # The worker has its next step, or nothing to do: first tokens leave before anything else is done.
                await asyncio.sleep(0)
            self.has_first_tokens = False
            self.settle()
            if self._loss is not None:
                raise self._loss
            if self._held is not None:
                self._held.cancel()
                self._held = None
            if held_s := await self.sender.send_plans(claimed.stream):
                self._held = asyncio.get_running_loop().call_later(held_s, self._wake.set)
            puts.start(self.planner.grammars.take_wanted())
            calls.start()
            fetches.start()
            self.deliver()
            oldest = self._oldest_step()
            self._timeout.check(oldest, self._clock())
            num_pending = max(self.planner.num_in_flight, self.planner.num_live)
            # A long step is no stall, unless it computes nothing while requests wait.
            steps = self.planner.state.in_flight.steps() if self.planner.state is not None else []
            is_computing = any(step.plan.has_forward for step in steps)
            self._progress.work_pending(num_pending, patience_s=self._timeout.limit_s(oldest) if is_computing else 0.0)

    def take(self, results: Sequence[StepResult]) -> None:
        """One result of each data-parallel rank: its tokens are on their way to routers, all else is settle()'s."""
        result = self.planner.joined(results)
        now = self._clock()
        self._timeout.heard(now)
        oldest = self._oldest_step()
        if oldest is not None and oldest.plan.chunks:
            log.debug("step_result_came", step=result.step_id)
        self.planner.take_result(result)
        self.streams.deliver(self.planner.take_outputs())
        self.has_first_tokens |= oldest is not None and bool(oldest.plan.chunks)
        self._taken.append(_Taken(result, oldest, now, self._clock() - now))

    def settle(self) -> None:
        """Does what results leave to be done once their tokens are on their way."""
        if not self._taken:
            return
        start = self._clock()
        for taken in self._taken:
            if taken.step is not None:
                self.sender.answered(taken.result, taken.step, taken.at_s)
        self.planner.settle_results()
        settle_s = (self._clock() - start) / len(self._taken)
        for result, step, at_s, take_s in self._taken:
            if self._step_metrics is not None:
                if step is not None:
                    self._step_metrics.answered(at_s - step.sent_s)
                self._step_metrics.processed(result, len(result.counts), take_s + settle_s)
            # A heartbeat is no progress of those who wait.
            if step is None or step.plan.has_forward or not self.planner.num_live:
                self._progress.completed()
        self._taken.clear()

    def _oldest_step(self) -> PlannedStep | None:
        state = self.planner.state
        return state.in_flight.oldest if state is not None else None

    async def _tick(self) -> None:
        """Time-driven work: router streams that left, deadlines, loads, heartbeats, hangs."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._pass_time(self._clock())
            except Exception:
                # A bug, of one request as a rule. Without ticks no router hears of us, and no hang is noticed.
                log.exception("tick_failed")

    def _pass_time(self, now: float) -> None:
        for owner in self.streams.expired(now):
            num = self.planner.abort_owner(owner)
            if num:
                log.info("router_gone", aborted=num)
        if self.group_state is GroupState.STANDBY:
            self._drop_all()
        if self.planner.state is None:
            self.planner.plan(now)  # Expires deadlines while nothing runs.
            self._progress.work_pending(0)
        self._loads.if_due(now)
        # By a clock of its own: a load that changes is told as it changes, and then never comes due here.
        if self._step_metrics is not None and now - self._last_export_s >= _EXPORT_S:
            self._last_export_s = now
            self._step_metrics.export(self.planner, now)
        self.notify()

    def _check_identity(self) -> None:
        """Outputs that one model began are not continued by another, whatever name both have."""
        served = self.group.identity.SerializeToString(deterministic=True)
        if self._served not in (b"", served):
            log.warning("other_model", model=self.group.identity.name)
            message = "the worker group serves another model now: connect again"
            self.streams.close_all(MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": "other_model"}))
            self._drop_all()
        self._served = served

    def _drop_all(self) -> None:
        # Their routers were told to go elsewhere: kept, they would run twice, or be continued by another model.
        for owner in self.planner.owners():
            self.planner.abort_owner(owner)

    def _count_loss(self, error: MeshError | None) -> None:
        if self._metrics is not None:
            self._metrics.restarts.labels("worker").inc()
            if error is not None:
                self._metrics.refusals.labels(error.reason_name).inc()
