"""The results of one step on all data-parallel ranks as one, in the slots of the scheduler's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import NoToken, StepResult
from radixmesh.daemons.scheduler.group.rank_results import summed_loads
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep


def joined_in(state: EpochState, results: Sequence[StepResult]) -> StepResult:
    """As `joined`, of the oldest step in flight; a result that is no answer to one comes back as it is.

    Pages whose transfers are over can be granted again.
    """
    if results[0].epoch != state.epoch:
        return results[0]
    for pages, result in zip(state.ranks, results, strict=False):
        if result.released_transfers:
            pages.end_lease(pages.leases.end(result.released_transfers))
    if len(results) == 1 or state.in_flight.oldest is None:
        return results[0]
    return joined(results, state.in_flight.oldest, state.table.slots_per_rank)


def joined(results: Sequence[StepResult], step: PlannedStep, slots_per_rank: int) -> StepResult:
    """Rows of all ranks, decodes of rank 0 first, then those of rank 1, ..., then the finishing prefills likewise.

    The device times are those of a step as long as the longest rank's. Raises PROTOCOL_VIOLATION for results of
    different steps, and for ranks with other rows than the plan gave them.
    """
    first = results[0]
    if any((other.epoch, other.step_id) != (first.epoch, first.step_id) for other in results):
        raise _violation(f"the ranks answered with steps {[result.step_id for result in results]}")
    if first.step_id != step.plan.step_id:
        return first  # Told by process().
    num = len(results)
    ranks = step.rows.slots // slots_per_rank
    num_decodes = np.bincount(ranks[: step.num_decodes], minlength=num).tolist()
    num_rows = np.bincount(ranks, minlength=num).tolist()
    decodes: list[StepResult] = []
    for rank, result in enumerate(results):
        if len(result.counts) != num_rows[rank] or not _fits(result):
            raise _violation(
                f"result {result.step_id} of rank {rank} has {len(result.counts)} rows and {len(result.ids)} ids, its"
                f" plan {num_rows[rank]} rows"
            )
        decodes.append(result)
    # Of each rank, its ids of decodes end where those of its finishing prefills begin.
    cuts = [
        decode_rows if len(result.ids) == len(result.counts) else int(result.counts[:decode_rows].sum())
        for result, decode_rows in zip(results, num_decodes, strict=True)
    ]
    rows = list(zip(results, num_decodes, strict=True))
    both = list(zip(results, cuts, strict=True))
    longest = max(result.device_end_ns - result.device_start_ns for result in results)
    return replace(
        first,
        counts=_joined([r.counts[:n] for r, n in rows] + [r.counts[n:] for r, n in rows]),
        ids=_joined([r.ids[:n] for r, n in both] + [r.ids[n:] for r, n in both]),
        no_token_reasons=_reasons(results, num_decodes),
        drafted=_beside_counts(results, "drafted", num_decodes),
        accepted=_beside_counts(results, "accepted", num_decodes),
        logprobs=_of_slots(results, "logprobs", slots_per_rank),
        prompt_logprobs=_of_slots(results, "prompt_logprobs", slots_per_rank),
        vectors=_of_slots(results, "vectors", slots_per_rank),
        slot_errors=_of_slots(results, "slot_errors", slots_per_rank),
        device_end_ns=first.device_start_ns + longest,
        expert_rows=tuple(num for result in results for num in result.expert_rows),
        expert_loads=summed_loads(results),
        loaded_ops=tuple(op_id for result in results for op_id in result.loaded_ops),
    )


def _fits(result: StepResult) -> bool:
    if len(result.ids) == len(result.counts) == np.count_nonzero(result.counts == 1):
        return True
    return bool(result.counts.min(initial=0) >= 0 and result.counts.sum() == len(result.ids))


def _joined(parts: Sequence[IntArray]) -> IntArray:
    whole: IntArray = np.concatenate(parts)
    return whole


def _reasons(results: Sequence[StepResult], num_decodes: Sequence[int]) -> IntArray:
    if not any(len(result.no_token_reasons) for result in results):
        return results[0].no_token_reasons
    each = [
        result.no_token_reasons
        if len(result.no_token_reasons)
        else np.where(result.counts == 0, NoToken.NO_ROOM, NoToken.HAS_TOKENS).astype(np.int32)
        for result in results
    ]
    rows = list(zip(each, num_decodes, strict=True))
    return _joined([reasons[:n] for reasons, n in rows] + [reasons[n:] for reasons, n in rows])


def _beside_counts(results: Sequence[StepResult], name: str, num_decodes: Sequence[int]) -> IntArray:
    """The numbers of all ranks; a rank that sent none has 0 in every row."""
    if not any(len(getattr(result, name)) for result in results):
        return empty_ints()
    each = [
        getattr(result, name) if len(getattr(result, name)) else np.zeros(len(result.counts), np.int32)
        for result in results
    ]
    rows = list(zip(each, num_decodes, strict=True))
    return _joined([numbers[:n] for numbers, n in rows] + [numbers[n:] for numbers, n in rows])


def _of_slots(results: Sequence[StepResult], name: str, slots_per_rank: int):  # type: ignore[no-untyped-def]
    """Entries that name a slot of their rank, with that of the table. A slot that no rank has is nobody's."""
    return tuple(
        replace(entry, slot=entry.slot + rank * slots_per_rank if 0 <= entry.slot < slots_per_rank else -1)
        for rank, result in enumerate(results)
        for entry in getattr(result, name)
    )


def _violation(what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, f"{what}: check the versions of both ends")
