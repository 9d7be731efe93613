"""The results of one step on all workers of a data-parallel rank (a tensor-parallel group) as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import NoToken, SlotError, StepResult

_BoolArray = npt.NDArray[np.bool_]
_MOST_PICKS = (1 << 31) - 1


def merged(results: Sequence[StepResult]) -> StepResult:
    """Rank 0's result, once the others agree with it: all ranks sample from the same logits.

    A row with a slot error on any rank is excluded from the comparison and has no token. Raises RANKS_DIVERGED if the
    other rows differ, PROTOCOL_VIOLATION if the results are not of one step.
    """
    first = results[0]
    if len(results) == 1:
        return first
    if any((other.epoch, other.step_id) != (first.epoch, first.step_id) for other in results):
        steps = ", ".join(str(result.step_id) for result in results)
        message = f"the ranks answered with steps {steps}: each answers every plan, in order"
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
    if any(len(other.counts) != len(first.counts) for other in results):
        raise _diverged(first)
    failed = np.zeros(len(first.counts), np.bool_)
    for result in results:
        if len(result.no_token_reasons):
            failed |= result.no_token_reasons == NoToken.SLOT_ERROR
    errors: dict[tuple[int, int], SlotError] = {}
    for result in results:
        for error in result.slot_errors:
            errors.setdefault((error.slot, error.generation), error)
    if failed.any():
        results = [_without_rows(result, failed) for result in results]
    ours = results[0]
    if expert_rows := tuple(num for result in results for num in result.expert_rows):
        ours = replace(ours, expert_rows=expert_rows, expert_loads=summed_loads(results))
    for other in results[1:]:
        if not (np.array_equal(ours.counts, other.counts) and np.array_equal(ours.ids, other.ids)):
            raise _diverged(first)
    if not errors:
        return ours
    # A failed row has no token on any rank, and so no logprobs.
    logprobs = tuple(entry for entry in ours.logprobs if (entry.slot, entry.generation) not in errors)
    return replace(ours, slot_errors=tuple(errors.values()), logprobs=logprobs)


def summed_loads(results: Sequence[StepResult]) -> IntArray:
    """Picks of all ranks. Raises PROTOCOL_VIOLATION if they count different experts."""
    told = [result.expert_loads for result in results if len(result.expert_loads)]
    if len({len(loads) for loads in told}) > 1:
        message = f"the ranks report loads of {[len(loads) for loads in told]} experts: they hold one model"
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
    if not told:
        return empty_ints()
    total: IntArray = np.minimum(np.sum(told, axis=0, dtype=np.int64), _MOST_PICKS).astype(np.int32)
    return total


class TransferReleases:
    """Transfers of former epochs, by id: over when the last rank that still holds their pages says so.

    held: of each rank, the ids that its snapshot lists.
    """

    def __init__(self, held: Sequence[Iterable[str]]) -> None:
        self._ranks: dict[str, set[int]] = {}
        for rank, names in enumerate(held):
            for name in names:
                self._ranks.setdefault(name, set()).add(rank)

    def take(self, results: Sequence[StepResult], merged_result: StepResult) -> StepResult:
        """The merged result of a step, with the transfers that are over on all ranks. Unknown ids are dropped."""
        if not any(result.released_transfers for result in results):
            return merged_result
        over: list[str] = []
        for rank, result in enumerate(results):
            for name in result.released_transfers:
                ranks = self._ranks.get(name, set())
                if rank in ranks:
                    ranks.remove(rank)
                    if not ranks:
                        del self._ranks[name]
                        over.append(name)
        return replace(merged_result, released_transfers=tuple(over))


class CommonLoads:
    """Loads of an epoch: completed when the last worker of the rank says so."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}

    def take(self, results: Sequence[StepResult], merged_result: StepResult) -> StepResult:
        """The merged result of a step, with the loads that are complete on all workers."""
        if len(results) == 1 or not any(result.loaded_ops for result in results):
            return merged_result
        over: list[int] = []
        for result in results:
            for op_id in result.loaded_ops:
                num = self._told.pop(op_id, 0) + 1
                if num == len(results):
                    over.append(op_id)
                else:
                    self._told[op_id] = num
        return replace(merged_result, loaded_ops=tuple(over))


def _without_rows(result: StepResult, failed: _BoolArray) -> StepResult:
    """The same without the tokens of the failed rows."""
    counts: IntArray = np.where(failed, 0, result.counts).astype(np.int32)
    reasons = result.no_token_reasons
    if not len(reasons):
        reasons = np.where(result.counts == 0, NoToken.NO_ROOM, NoToken.HAS_TOKENS).astype(np.int32)
    return replace(
        result,
        counts=counts,
        ids=result.ids[np.repeat(~failed, result.counts)],
        no_token_reasons=np.where(failed, NoToken.SLOT_ERROR, reasons).astype(np.int32),
        accepted=np.where(failed, 0, result.accepted).astype(np.int32) if len(result.accepted) else result.accepted,
    )


def _diverged(result: StepResult) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_RANKS_DIVERGED,
        f"the ranks computed different tokens in step {result.step_id}: the group is formed anew",
        {"step": str(result.step_id)},
    )
