"""Takes a step's result into the requests it belongs to: lengths, tokens, ends, logprobs.

Fast path: nearly all rows get exactly one token and belong to a sequence that is still in its slot; they are processed
as whole columns. Slow path, one by one: rows of sequences that were retracted after the plan was sent (they still
count), rows of sequences that have ended (dropped), rows with no token or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.steps.step import NoToken, SlotLogprobs, StepResult, TokenLogprobs
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable
from radixmesh.daemons.scheduler.results.draft_counts import check_drafts
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep, Rows
from radixmesh.daemons.scheduler.results.outputs import (
    Outputs,
    OutputVector,
    PromptLogprobs,
    TokenRow,
    TokenRows,
    rows_of,
)
from radixmesh.daemons.scheduler.results.stop_conditions import SequenceEnd, StopWatch, end_of
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.sequence_observer import SequenceObserver

# A worker whose store is too small for what runs drops it each time.
_MAX_BLOB_MISSES = 3

_Logprobs = dict[tuple[int, int], TokenLogprobs]


class Prefilled(NamedTuple):
    """A request whose prompt was computed."""

    slot: int
    generation: int


class ResultReader:
    """finish: ends a request that is live. leave: takes a running one out of its slot, to be admitted again."""

    def __init__(
        self,
        finish: Callable[[Sequence, SequenceEnd, MeshError | None], None],
        leave: Callable[[EpochState, Sequence], None],
        observer: SequenceObserver,
        blob_missed: Callable[[str], None],
    ) -> None:
        self._finish = finish
        self._leave = leave
        self._observer = observer
        self._blob_missed = blob_missed

    def read(
        self, state: EpochState, step: PlannedStep, result: StepResult, watch: StopWatch, outputs: Outputs
    ) -> list[Prefilled]:
        """Applies a result to the state and says in `outputs` what it brought. Returns whose prompt it completed: the
        caller shares them, once nobody waits for the tokens.

        Raises, before anything is changed, TOKEN_OUT_OF_VOCABULARY for ids that no sampler can have sampled, and
        PROTOCOL_VIOLATION for rows of more tokens or drafts than the worker said a row may have, and for logprobs that
        are not those of the rows, or of a prompt.
        """
        ids = result.ids
        # Negative ids are large ones without a sign.
        if len(ids) and ids.view(np.uint32).max() >= state.group.vocab_size:
            message = f"step {result.step_id} returned ids outside the vocabulary of {state.group.vocab_size}"
            raise MeshError(ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY, message)
        _check_counts(state, result)
        check_drafts(result, state.table.max_tokens_per_row)
        _check_logprobs(state, step, result)
        _advance_chunks(state, step)
        _take_prompt_logprobs(state, result, outputs)
        if len(result.drafted):
            _take_drafted(state, step, result)
        prompts: list[Prefilled] = []
        if len(step.rows):
            self._take_rows(state, step, result, watch, outputs, prompts)
        self._take_vectors(state, result, outputs)
        for failed in result.slot_errors:
            sequence = _live_sequence(state, failed.slot, failed.generation)
            if sequence is not None:
                self._take_error(state, sequence, failed.error)
        return prompts

    def _take_error(self, state: EpochState, sequence: Sequence, error: MeshError) -> None:
        """A request failed alone. One whose blob was dropped is admitted again, a few times."""
        if error.reason == ErrorReason.ERROR_REASON_UNKNOWN_BLOB and sequence.num_blob_misses < _MAX_BLOB_MISSES:
            sequence.num_blob_misses += 1
            if sequence.submission.grammar is not None:
                self._blob_missed(sequence.submission.grammar.hash)
            if sequence.lifecycle is Lifecycle.RUNNING:
                self._leave(state, sequence)
            return
        self._finish(sequence, SequenceEnd(FinishReason.ERROR), error)

    def _take_rows(
        self,
        state: EpochState,
        step: PlannedStep,
        result: StepResult,
        watch: StopWatch,
        outputs: Outputs,
        prompts: list[Prefilled],
    ) -> None:
        table, rows, counts, ids = state.table, step.rows, result.counts, result.ids
        logprobs = {(entry.slot, entry.generation): entry.logprobs for entry in result.logprobs}
        is_fast = (table.live.take(rows.slots) == rows.generations) & (counts == 1)
        slow: list[tuple[int, IntArray]] = []
        num_decodes = step.num_decodes
        decoded = Rows.none()
        if table.max_tokens_per_row > 1:
            decoded = Rows(rows.slots[:num_decodes], rows.generations[:num_decodes]).still_in(table)
            table.num_decodes_ahead[decoded.slots] -= 1
        if np.count_nonzero(is_fast) != len(rows):
            fast = np.flatnonzero(is_fast)
            starts = np.cumsum(counts) - counts
            slow = [(row, ids[starts[row] : starts[row] + counts[row]]) for row in np.flatnonzero(~is_fast).tolist()]
            num_decodes = int(np.count_nonzero(is_fast[: step.num_decodes]))
            rows = Rows(rows.slots[fast], rows.generations[fast])
            ids = ids[starts[fast]]
        if len(rows):
            self._take_fast_path(state, rows, num_decodes, ids, logprobs, watch, outputs)
            prompts += map(Prefilled, rows.slots[num_decodes:].tolist(), rows.generations[num_decodes:].tolist())
        for row, row_ids in slow:
            if not len(row_ids) and len(result.no_token_reasons) and result.no_token_reasons[row] == NoToken.NO_MASK:
                _take_late_mask(state, step, row)
            num_accepted = int(result.accepted[row]) if len(result.accepted) else 0
            self._take_slow_path(state, step, row, row_ids, num_accepted, logprobs, outputs)
            if row >= step.num_decodes:
                prompts.append(Prefilled(int(step.rows.slots[row]), int(step.rows.generations[row])))
        if len(decoded):
            table.bound(decoded.still_in(table).slots)

    def _take_fast_path(
        self,
        state: EpochState,
        rows: Rows,
        num_decodes: int,
        ids: IntArray,
        logprobs: _Logprobs,
        watch: StopWatch,
        outputs: Outputs,
    ) -> None:
        """One token each for requests in their slots; the first num_decodes rows are decodes."""
        table, slots = state.table, rows.slots
        table.append_tokens(slots, ids)
        lengths = table.total_len.take(slots)
        outputs.rows.append(
            TokenRows(
                owners=table.owner.take(slots),
                handles=table.handle.take(slots),
                attempts=table.attempt.take(slots),
                firsts=lengths - table.prompt_len.take(slots),
                counts=np.ones(len(slots), np.int32),
                ids=ids,
                logprobs=_by_row(rows, logprobs) if logprobs else {},
            )
        )
        # A decode computes the token that was the last one.
        table.computed_len[slots[:num_decodes]] = lengths[:num_decodes]
        lengths += 1
        table.total_len[slots] = lengths
        for slot in slots[num_decodes:].tolist():
            self._observer.prefilled(_occupant(table, slot))
        may_end = watch.is_watched(ids) | (lengths >= table.max_total_len.take(slots))
        if np.count_nonzero(may_end):
            for slot in slots[may_end].tolist():
                sequence = _occupant(table, slot)
                table.settle(slot)
                ending = end_of(sequence)
                if ending is not None:
                    self._finish(sequence, ending, None)

    def _take_slow_path(
        self,
        state: EpochState,
        step: PlannedStep,
        row: int,
        ids: IntArray,
        num_accepted: int,
        logprobs: _Logprobs,
        outputs: Outputs,
    ) -> None:
        table = state.table
        slot, generation = int(step.rows.slots[row]), int(step.rows.generations[row])
        is_decode = row < step.num_decodes
        sequence = table.sequences[slot] if table.live[slot] == generation else state.retracting.get((slot, generation))
        if sequence is None:
            return
        is_running = sequence.lifecycle is Lifecycle.RUNNING
        if is_running:
            table.settle(slot)
        first, ending = len(sequence.output), None
        for token in ids.tolist():
            sequence.output.append(token)
            ending = end_of(sequence)
            if ending is not None:
                break
        taken = len(sequence.output) - first
        # Accepted drafts are a row's first tokens; those behind an end are not the request's.
        sequence.accepted_tokens += min(taken, num_accepted)
        if is_running:
            table.total_len[slot] += taken
        if is_running and is_decode:
            # Tokens behind an end do not belong to the request, and neither does their KV.
            table.computed_len[slot] += taken
            if table.max_tokens_per_row == 1:  # Planned as one token.
                table.planned_len[slot] += taken - 1
                if not taken:
                    state.decode_set.rejoin(slot)
        if taken and not is_decode:
            self._observer.prefilled(sequence)
        if taken:
            given = logprobs.get((slot, generation))
            if given is not None and taken < len(ids):
                given = _first(given, taken)
            row_ids = ids[:taken]
            outputs.rows.append(
                rows_of([TokenRow(sequence.owner, sequence.handle, sequence.submission.attempt, first, row_ids, given)])
            )
        if ending is not None:
            self._finish(sequence, ending, None)

    def _take_vectors(self, state: EpochState, result: StepResult, outputs: Outputs) -> None:
        for entry in result.vectors:
            sequence = _live_sequence(state, entry.slot, entry.generation)
            if sequence is not None:
                outputs.vectors.append(OutputVector(owner=sequence.owner, handle=sequence.handle, values=entry.values))
                self._finish(sequence, SequenceEnd(FinishReason.STOP), None)


def share_prompts(state: EpochState, prompts: Iterable[Prefilled]) -> None:
    """Gives the computed pages of those that still run to the cache, so that others find them."""
    table = state.table
    for slot, generation in prompts:
        sequence = table.sequences[slot]
        if sequence is not None and table.live.item(slot) == generation:
            state.pages_of(slot).share(sequence)


def _take_drafted(state: EpochState, step: PlannedStep, result: StepResult) -> None:
    """Counts the drafts of each request, also of one that ends with this result."""
    rows = np.flatnonzero(result.drafted)
    slots, generations = step.rows.slots[rows].tolist(), step.rows.generations[rows].tolist()
    for slot, generation, num in zip(slots, generations, result.drafted[rows].tolist(), strict=True):
        sequence = _live_sequence(state, slot, generation)
        if sequence is not None:
            sequence.drafted_tokens += num


def _occupant(table: SequenceTable, slot: int) -> Sequence:
    sequence = table.sequences[slot]
    assert sequence is not None, slot
    return sequence


def _take_late_mask(state: EpochState, step: PlannedStep, row: int) -> None:
    """The prompt's last chunk came without its last token, because the mask of the first one sampled was not there: the
    slot decodes that token next."""
    slot, generation = int(step.rows.slots[row]), int(step.rows.generations[row])
    table = state.table
    if row >= step.num_decodes and table.live[slot] == generation:
        table.computed_len[slot] -= 1
        table.target_len[slot] -= 1
        if table.max_tokens_per_row == 1:
            table.planned_len[slot] -= 1
        else:  # The chunk left bounds by which an output of one token more has all of them in flight.
            table.bound(as_ints([slot]))
        state.decode_set.rejoin(slot)


def _check_counts(state: EpochState, result: StepResult) -> None:
    """Pages were granted for so many."""
    most = state.table.max_tokens_per_row
    if most > 1 and result.counts.max(initial=0) > most:
        message = (
            f"step {result.step_id} returned {result.counts.max()} tokens for a row: the worker said {most} at most"
        )
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message, {"max": str(most)})


def _check_logprobs(state: EpochState, step: PlannedStep, result: StepResult) -> None:
    """Routers take what is not a token's own logprob for a broken stream: who sent it is known here only."""
    if result.logprobs:
        keys = zip(step.rows.slots.tolist(), step.rows.generations.tolist(), strict=True)
        lengths = dict(zip(keys, result.counts.tolist(), strict=True))
        for entry in result.logprobs:
            if len(entry.logprobs.own) != lengths.get((entry.slot, entry.generation)) or not _has_width(state, entry):
                raise _wrong_logprobs(result, entry)
    for entry in result.prompt_logprobs:
        sequence = _live_sequence(state, entry.slot, entry.generation)
        end = entry.first_position + len(entry.logprobs.own)
        if sequence is not None and (end > sequence.prompt_len or not _has_width(state, entry)):
            raise _wrong_logprobs(result, entry)


def _has_width(state: EpochState, entry: SlotLogprobs) -> bool:
    sequence = _live_sequence(state, entry.slot, entry.generation)
    return sequence is None or entry.logprobs.num_top <= (sequence.submission.sampling.num_top_logprobs or 0)


def _wrong_logprobs(result: StepResult, entry: SlotLogprobs) -> MeshError:
    message = f"step {result.step_id} returned logprobs of slot {entry.slot} that are not those of its tokens"
    return MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)


def _advance_chunks(state: EpochState, step: PlannedStep) -> None:
    live, computed_len = state.table.live, state.table.computed_len
    for slot, generation, length in step.chunks:
        if live.item(slot) == generation:
            computed_len[slot] = computed_len.item(slot) + length


def _take_prompt_logprobs(state: EpochState, result: StepResult, outputs: Outputs) -> None:
    for entry in result.prompt_logprobs:
        sequence = _live_sequence(state, entry.slot, entry.generation)
        if sequence is None:
            continue
        outputs.prompt_logprobs.append(
            PromptLogprobs(
                owner=sequence.owner,
                handle=sequence.handle,
                first_position=entry.first_position,
                logprobs=entry.logprobs,
            )
        )
        # Delivered: a replay need not compute them again.
        sequence.logprobs_start = max(sequence.logprobs_start, entry.first_position + len(entry.logprobs.own))


def _live_sequence(state: EpochState, slot: int, generation: int) -> Sequence | None:
    if 0 <= slot < state.table.num_slots and state.table.live[slot] == generation:
        return state.table.sequences[slot]
    return state.retracting.get((slot, generation))


def _first(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    """Those of the first `count` tokens."""
    return TokenLogprobs(
        own=logprobs.own[:count],
        num_top=logprobs.num_top,
        top_ids=logprobs.top_ids[:count],
        top=logprobs.top[:count],
    )


def _by_row(rows: Rows, logprobs: _Logprobs) -> dict[int, TokenLogprobs]:
    keys = zip(rows.slots.tolist(), rows.generations.tolist(), strict=True)
    return {row: logprobs[key] for row, key in enumerate(keys) if key in logprobs}
