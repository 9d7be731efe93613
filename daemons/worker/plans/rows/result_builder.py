"""Turns what the runner computed into the StepResult: rows in the contract's order, logprobs where undelivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import (
    NoToken,
    SlotError,
    SlotLogprobs,
    SlotVector,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from radixmesh.daemons.worker.plans.rows.forward_batch import ForwardBatch, Row
from radixmesh.daemons.worker.plans.rows.guided_rows import late_indexes
from radixmesh.daemons.worker.runner import StepOutput

_NOTHING = empty_ints()


class ResultBuilder:
    """Builds the result of one plan.

    errors: of slots that failed in it, to be told. failed_slots: whose rows have no token, as long as they are held.
    """

    def __init__(
        self,
        plan: StepPlan,
        weights_version: int,
        errors: tuple[SlotError, ...] = (),
        failed_slots: tuple[int, ...] = (),
    ) -> None:
        self._plan = plan
        self._weights_version = weights_version
        self._errors = errors
        self._failed_slots = failed_slots

    def build(self, *, start_ns: int, end_ns: int) -> StepResult:
        """The result of a plan without a forward: no rows. Between the times its barrier ops ran."""
        return self._result(counts=empty_ints(), ids=empty_ints(), start_ns=start_ns, end_ns=end_ns)

    def build_forward(self, batch: ForwardBatch, output: StepOutput) -> StepResult:
        """The result of a forward."""
        if self._is_plain(batch, output):
            counts = np.ones(batch.num_results, np.int32) if output.counts is None else output.counts
            drafted = accepted = _NOTHING
            if output.num_drafts is not None and output.num_drafts.any():
                # A row's last token is sampled, all before it were drafts.
                drafted, accepted = output.num_drafts, counts - np.int32(1)
            return self._result(
                counts=counts,
                ids=output.tokens,
                start_ns=output.start_ns,
                end_ns=output.end_ns,
                drafted=drafted,
                accepted=accepted,
            )
        counts = np.zeros(batch.num_results, np.int32)
        ids = np.zeros(batch.num_results, np.int32)
        is_uneven = output.counts is not None or any(got.more_tokens for got in output.segments)
        counts[batch.row_indexes] = 1 if output.counts is None else output.counts
        if output.counts is None:
            ids[batch.row_indexes] = output.tokens
        for row, got in zip(batch.segment_rows, output.segments, strict=True):
            if got.token is not None:
                counts[row.index] = len(got.tokens)
                ids[row.index] = got.token
        logprobs, prompt_logprobs = _logprobs(batch, output)
        drafted, accepted = _drafts(batch, output, counts)
        late = late_indexes(batch, output)
        result = self._result(
            counts=counts,
            ids=_all_ids(batch, output, counts) if is_uneven else ids[counts > 0],
            start_ns=output.start_ns,
            end_ns=output.end_ns,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            vectors=_vectors(batch, output),
            no_token_reasons=_reasons(counts, late) if late else _NOTHING,
            drafted=drafted,
            accepted=accepted,
            expert_rows=() if output.expert_rows is None else (output.expert_rows,),
            expert_loads=_NOTHING if output.expert_loads is None else output.expert_loads,
        )
        return _without_slots(result, batch, self._failed_slots) if self._failed_slots else result

    def _is_plain(self, batch: ForwardBatch, output: StepOutput) -> bool:
        """Every result row is a decode row with a token or more, and there is nothing else to tell but drafts."""
        return (
            not (batch.segments or batch.late_rows or output.logprobs or self._failed_slots)
            and len(batch.row_indexes) == batch.num_results
            and (output.counts is None or bool(output.counts.all()))
            and output.expert_rows is None
            and output.expert_loads is None
        )

    def _result(
        self,
        *,
        counts: IntArray,
        ids: IntArray,
        start_ns: int,
        end_ns: int,
        logprobs: tuple[SlotLogprobs, ...] = (),
        prompt_logprobs: tuple[SlotLogprobs, ...] = (),
        vectors: tuple[SlotVector, ...] = (),
        no_token_reasons: IntArray = _NOTHING,
        drafted: IntArray = _NOTHING,
        accepted: IntArray = _NOTHING,
        expert_rows: tuple[int, ...] = (),
        expert_loads: IntArray = _NOTHING,
    ) -> StepResult:
        return StepResult(
            epoch=self._plan.epoch,
            step_id=self._plan.step_id,
            counts=counts,
            ids=ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            vectors=vectors,
            device_start_ns=start_ns,
            device_end_ns=end_ns,
            weights_version=self._weights_version,
            slot_errors=self._errors,
            no_token_reasons=no_token_reasons,
            drafted=drafted,
            accepted=accepted,
            expert_rows=expert_rows,
            expert_loads=expert_loads,
        )


def _reasons(counts: IntArray, late: Sequence[int] = ()) -> IntArray:
    """Of all rows why they have no token; late: indexes of those that have none for want of a mask."""
    reasons = np.where(counts == 0, NoToken.NO_ROOM, NoToken.HAS_TOKENS).astype(np.int32)
    reasons[list(late)] = NoToken.NO_MASK
    return reasons


def _drafts(batch: ForwardBatch, output: StepOutput, counts: IntArray) -> tuple[IntArray, IntArray]:
    """The number of drafts that each row computed, and of those among its tokens; nothing where no row had any."""
    if output.num_drafts is None and not any(got.num_drafts for got in output.segments):
        return _NOTHING, _NOTHING
    drafted = np.zeros(batch.num_results, np.int32)
    if output.num_drafts is not None:
        drafted[batch.row_indexes] = output.num_drafts
    for row, got in zip(batch.segment_rows, output.segments, strict=True):
        if got.num_drafts:
            drafted[row.index] = got.num_drafts
    if not drafted.any():
        return _NOTHING, _NOTHING
    # A row's last token is sampled, all before it were drafts.
    return drafted, np.where(drafted > 0, np.maximum(counts - 1, 0), 0).astype(np.int32)


def _without_slots(result: StepResult, batch: ForwardBatch, slots: tuple[int, ...]) -> StepResult:
    """The same with no token for the rows of these slots, and nothing else of theirs."""
    is_failed = np.zeros(batch.num_results, np.bool_)
    is_failed[batch.row_indexes] = np.isin(batch.rows.slots, slots)
    for row in (*batch.segment_rows, *batch.late_rows):
        if row.index >= 0:
            is_failed[row.index] = row.slot in slots
    reasons = result.no_token_reasons if len(result.no_token_reasons) else _reasons(result.counts)
    return replace(
        result,
        counts=np.where(is_failed, 0, result.counts).astype(np.int32),
        ids=result.ids[np.repeat(~is_failed, result.counts)],
        no_token_reasons=np.where(is_failed, NoToken.SLOT_ERROR, reasons).astype(np.int32),
        accepted=np.where(is_failed, 0, result.accepted).astype(np.int32) if len(result.accepted) else result.accepted,
        logprobs=tuple(entry for entry in result.logprobs if entry.slot not in slots),
        prompt_logprobs=tuple(entry for entry in result.prompt_logprobs if entry.slot not in slots),
        vectors=tuple(entry for entry in result.vectors if entry.slot not in slots),
    )


def _all_ids(batch: ForwardBatch, output: StepOutput, counts: IntArray) -> IntArray:
    """The tokens of all result rows, row after row, where rows have any number of them."""
    ids = np.zeros(int(counts.sum()), np.int32)
    ends = np.cumsum(counts)
    row_counts = counts[batch.row_indexes]
    firsts = ends[batch.row_indexes] - row_counts
    within = np.arange(len(output.tokens)) - np.repeat(np.cumsum(row_counts) - row_counts, row_counts)
    ids[np.repeat(firsts, row_counts) + within] = output.tokens
    for row, got in zip(batch.segment_rows, output.segments, strict=True):
        if got.token is not None:
            ids[ends[row.index] - counts[row.index] : ends[row.index]] = got.tokens
    return ids


def _logprobs(batch: ForwardBatch, output: StepOutput) -> tuple[tuple[SlotLogprobs, ...], tuple[SlotLogprobs, ...]]:
    """Of output tokens and of prompt tokens; those before logprobs_start were delivered by an earlier attempt."""
    of_output: list[SlotLogprobs] = []
    of_prompt: list[SlotLogprobs] = []
    starts, generations = batch.row_logprobs_starts, batch.row_generations
    for index, logprobs in output.logprobs.items():
        slot, position = int(batch.rows.slots[index]), int(batch.rows.positions[index]) + 1
        if position >= starts[index]:
            generation = int(generations[index])
            of_output.append(SlotLogprobs(slot=slot, generation=generation, first_position=position, logprobs=logprobs))
    for row, segment, got in zip(batch.segment_rows, batch.segments, output.segments, strict=True):
        sample = segment.sample
        is_wanted = sample is not None and sample.sampling.num_top_logprobs is not None
        if sample is not None and got.logprobs is not None and is_wanted and sample.position >= row.logprobs_start:
            of_output.append(_slot_logprobs(row, sample.position, got.logprobs))
        if got.prompt_logprobs is not None and segment.prompt_logprobs is not None:
            of_prompt.append(_slot_logprobs(row, segment.prompt_logprobs.start, got.prompt_logprobs))
    return tuple(of_output), tuple(of_prompt)


def _slot_logprobs(row: Row, first_position: int, logprobs: TokenLogprobs) -> SlotLogprobs:
    return SlotLogprobs(slot=row.slot, generation=row.generation, first_position=first_position, logprobs=logprobs)


def _vectors(batch: ForwardBatch, output: StepOutput) -> tuple[SlotVector, ...]:
    return tuple(
        SlotVector(slot=row.slot, generation=row.generation, values=got.vector)
        for row, got in zip(batch.segment_rows, output.segments, strict=True)
        if got.vector is not None
    )
