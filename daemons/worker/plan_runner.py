"""From a plan's message to its answer: decode, run, encode. Runs on the step thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.result_codec import records_to_proto, refusal_to_proto, result_to_proto
from radixmesh.daemons.runtime.step import PageRecords, Refusal, StepResult
from radixmesh.daemons.runtime.step_codec import plan_from_proto
from radixmesh.daemons.worker.executor import StepExecutor
from radixmesh.daemons.worker.plan_dump import PlanDump
from radixmesh.worker.v1 import worker_pb2

# Of a few hundred bytes at most: well below the largest message.
_NAMES_A_MESSAGE = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a plan: a result, a refusal, or neither (its epoch had ended). `died`: why the step died."""

    step_id: int
    response: worker_pb2.ExecuteResponse | None = None
    result: StepResult | None = None
    refusal: MeshError | None = None
    died: BaseException | None = None


class PlanRunner:
    """Runs messages through an executor and remembers that a refusal ended the epoch."""

    def __init__(self, executor: StepExecutor, dump: PlanDump, on_step: Callable[[], None]) -> None:
        self._executor = executor
        self._dump = dump
        self._on_step = on_step
        self._is_epoch_over = True
        self._is_dead = False

    def begin_epoch(self, epoch: int, group_generation: int) -> None:
        """All slots are free, plans of `epoch` run."""
        if not self._is_dead:
            self._executor.begin_epoch(epoch, group_generation)
            self._is_epoch_over = False

    def run(self, plan: worker_pb2.StepPlan, ready_ns: int, refuse: MeshError | None) -> Answer:
        """Answers one plan. `refuse`: an error that refuses it unseen."""
        epoch, step_id = plan.header.epoch, plan.header.step_id
        if self._is_epoch_over:
            return Answer(step_id=step_id)
        try:
            if refuse is not None:
                raise refuse
            result = self._executor.run(plan_from_proto(plan), ready_ns=ready_ns)
        except MeshError as error:
            self._is_epoch_over = True
            return Answer(step_id=step_id, response=_refusal(epoch, step_id, error), refusal=error)
        except Exception as error:
            return self._died(plan, error)
        self._on_step()
        response = worker_pb2.ExecuteResponse(result=result_to_proto(result))
        return Answer(step_id=step_id, response=response, result=result)

    def snapshot(self) -> Sequence[worker_pb2.SnapshotCacheResponse]:
        """The page records as messages, the last one with is_last."""
        ranges, namespaces = self._executor.snapshot()
        parts: list[tuple[PageRecords, tuple[str, ...]]] = [(records, ()) for records in ranges]
        num_pages = sum(len(records.filled) for records in ranges)
        if len(namespaces) <= _NAMES_A_MESSAGE:
            parts[-1] = (ranges[-1], tuple(namespaces))
        else:
            starts = range(0, len(namespaces), _NAMES_A_MESSAGE)
            nothing = _empty_range(num_pages)
            parts += [(nothing, tuple(namespaces[start : start + _NAMES_A_MESSAGE])) for start in starts]
        last = len(parts) - 1
        return [
            records_to_proto(records, is_last=i == last, namespaces=names) for i, (records, names) in enumerate(parts)
        ]

    def _died(self, plan: worker_pb2.StepPlan, error: Exception) -> Answer:
        self._is_epoch_over = self._is_dead = True
        epoch, step_id = plan.header.epoch, plan.header.step_id
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
