"""From a plan's message to its answer: decode, launch, wait, encode. Runs on the step thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.forward_shape import HAVE_CHUNKS
from radixmesh.daemons.runtime.steps.result_codec import records_to_proto, refusal_to_proto, result_to_proto
from radixmesh.daemons.runtime.steps.step import PageRecords, Refusal, StepResult
from radixmesh.daemons.runtime.steps.step_codec import plan_from_proto
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_transfer.transfer_pins import TransferPins
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.files.plan_dump import PlanDump
from radixmesh.daemons.worker.plans.slots.slot_traces import SlotTraces, TracedChunk
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted, RankLost
from radixmesh.daemons.worker.step_handle import StepHandle
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

# Of a few hundred bytes at most: well below the largest message.
_NAMES_A_MESSAGE = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Outcome of a plan: a result, a refusal, or neither (its epoch had ended). `died`: why the step died. `lost`: the
    rank without which it could not be computed."""

    step_id: int
    response: worker_pb2.ExecuteResponse | None = None
    result: StepResult | None = None
    refusal: MeshError | None = None
    died: BaseException | None = None
    lost: RankLost | None = None


class PlanRunner:
    """Runs messages through an executor and remembers that a refusal ended the epoch."""

    def __init__(
        self,
        executor: StepExecutor,
        dump: PlanDump,
        on_step: Callable[[], None],
        traces: SlotTraces | None = None,
        dp_rank: int = 0,
        pins: TransferPins | None = None,
    ) -> None:
        self._pins = pins or TransferPins()
        self._dp_rank = dp_rank
        self._traces = traces
        self.executor = executor
        self._dump = dump
        self._on_step = on_step
        self._is_epoch_over = True
        self._died_step: int | None = None
        self._refused_step: int | None = None
        """One that was launched, whose result must not leave."""
        self._running: deque[StepHandle[StepResult]] = deque()

    def begin_epoch(self, epoch: int, group_generation: int) -> None:
        """All slots are free, plans of `epoch` run."""
        if self._died_step is None:
            if self._traces is not None:
                self._traces.begin_epoch()
            self._pins.begin_epoch()
            self.executor.begin_epoch(epoch, group_generation)
            self._is_epoch_over = False
            self._refused_step = None

    def reset(self, experts: worker_pb2.ExpertPlacement | None = None, *, keeps_kv: bool = False) -> None:
        """Empties slots, KV and page records; plans run from the next epoch on. experts: placement of those that ranks
        share, None: as they were loaded. keeps_kv: no other rank has a part of it, and records name what completed
        steps have written alone. Raises INVALID_ARGUMENT or BAD_CHECKPOINT."""
        self._is_epoch_over = True
        if self._died_step is None:
            self.executor.reset(keeps_kv=keeps_kv)
            if self.executor.runner.expert_moves is not None:
                self.executor.runner.expert_moves.adopt(experts)

    def launch(self, plan: worker_pb2.StepPlan, ready_ns: int, fault: Exception | None) -> StepHandle[Answer]:
        """Starts one plan; the handle's result is its answer and does not raise.

        `fault`: what it meets with instead, a MeshError that refuses it unseen or what its step dies of.
        """
        epoch, step_id = plan.header.epoch, plan.header.step_id
        if self._is_epoch_over:
            return StepHandle.of(Answer(step_id=step_id))
        try:
            if fault is not None:
                raise fault
            step_plan = plan_from_proto(plan, self._dp_rank)
            traced = self._traces.launched(step_plan) if self._traces is not None else ()
            step = self.executor.launch(step_plan, ready_ns=ready_ns)
            if step_plan.chunks:
                log.debug("step_launched", step=step_id)
        except MeshError as error:
            self._is_epoch_over = True
            return StepHandle.of(Answer(step_id=step_id, response=_refusal(epoch, step_id, error), refusal=error))
        except CollectiveAborted as error:
            return StepHandle.of(self._aborted(step_id, error))
        except Exception as error:
            if self._has_one_died():
                self._is_epoch_over = True
                return StepHandle.of(Answer(step_id=step_id))
            return StepHandle.of(self._died(plan, error))
        self._running.append(step)
        return StepHandle(step.event, partial(self._finish, plan, step, traced))

    def _finish(self, plan: worker_pb2.StepPlan, step: StepHandle[StepResult], traced: Sequence[TracedChunk]) -> Answer:
        """The answer to a launched plan; waits for it. None of its own if a step before it died."""
        step_id = plan.header.step_id
        oldest = self._running.popleft()
        assert oldest is step, "steps finish in the order of their launches"
        if self._died_step is not None and step_id > self._died_step:
            return Answer(step_id=step_id)
        try:
            result = step.result()
        except CollectiveAborted as error:
            return self._aborted(step_id, error)
        except Exception as error:
            return self._died(plan, error)
        if self._refused_step is not None:
            return Answer(step_id=step_id)
        if (unsound := self.executor.arriving.error) is not None:
            self._is_epoch_over, self._refused_step = True, step_id
            epoch = plan.header.epoch
            return Answer(step_id=step_id, response=_refusal(epoch, step_id, unsound), refusal=unsound)
        if plan.header.shape.mode in HAVE_CHUNKS:
            log.debug("step_over", step=step_id, device_ms=(result.device_end_ns - result.device_start_ns) / 1e6)
        for chunk in traced:
            chunk.ran(result)
        self._on_step()
        if released := self._pins.take_released():
            result = replace(result, released_transfers=released)
        response = worker_pb2.ExecuteResponse(result=result_to_proto(result))
        return Answer(step_id=step_id, response=response, result=result)

    def snapshot(self) -> Sequence[worker_pb2.SnapshotCacheResponse]:
        """The page records as messages, those of the device first, the last one with is_last."""
        messages = self._tier_messages(*self.executor.snapshot())
        if (host := self.executor.host_snapshot()) is not None:
            messages += self._tier_messages(*host, worker_pb2.KV_TIER_HOST)
        return [
            records_to_proto(
                records,
                is_last=i == len(messages) - 1,
                namespaces=names,
                pinned=self._pins.held() if i == len(messages) - 1 else None,
                tier=tier,
            )
            for i, (records, names, tier) in enumerate(messages)
        ]

    @staticmethod
    def _tier_messages(
        ranges: Sequence[PageRecords],
        namespaces: Sequence[str],
        tier: worker_pb2.KvTier = worker_pb2.KV_TIER_UNSPECIFIED,
    ) -> list[tuple[PageRecords, tuple[str, ...], worker_pb2.KvTier]]:
        """Records and namespaces of one tier, message by message."""
        parts: list[tuple[PageRecords, tuple[str, ...]]] = [(records, ()) for records in ranges]
        num_pages = sum(len(records.filled) for records in ranges)
        if len(namespaces) <= _NAMES_A_MESSAGE:
            parts[-1] = (ranges[-1], tuple(namespaces))
        else:
            starts = range(0, len(namespaces), _NAMES_A_MESSAGE)
            nothing = _empty_range(num_pages)
            parts += [(nothing, tuple(namespaces[start : start + _NAMES_A_MESSAGE])) for start in starts]
        return [(records, names, tier) for records, names in parts]

    def _has_one_died(self) -> bool:
        """True if one of the steps that still run died: it may be what made the launch behind it fail.

        Waits for them all; those that did not die answer as ever.
        """
        for step in self._running:
            try:
                step.result()
            except Exception:
                return True
        return False

    def _aborted(self, step_id: int, error: CollectiveAborted) -> Answer:
        # If the group was left, its scheduler was fenced out, or knows: nobody waits for an answer.
        self._is_epoch_over = True
        return Answer(step_id=step_id, lost=error if isinstance(error, RankLost) else None)

    def _died(self, plan: worker_pb2.StepPlan, error: Exception) -> Answer:
        self._is_epoch_over = True
        epoch, step_id = plan.header.epoch, plan.header.step_id
        self._died_step = step_id
        path = self._dump.write(plan, error)
        failure = MeshError(
            ErrorReason.ERROR_REASON_STEP_FAILED,
            f"step {step_id} died ({type(error).__name__}: {error}); the worker restarts, its KV is lost",
            {"dump": path},
        )
        return Answer(step_id=step_id, response=_refusal(epoch, step_id, failure), refusal=failure, died=error)


def _empty_range(first_page: int) -> PageRecords:
    none = empty_ints()
    return PageRecords(
        first_page=first_page,
        generations=none,
        filled=none,
        previous_pages=none,
        previous_generations=none,
        namespace_indexes=none,
        weights_versions=none,
        ids=none,
    )


def _refusal(epoch: int, step_id: int, error: MeshError) -> worker_pb2.ExecuteResponse:
    refusal = Refusal(epoch=epoch, step_id=step_id, error=error)
    return worker_pb2.ExecuteResponse(refusal=refusal_to_proto(refusal))
