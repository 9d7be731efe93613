"""Rows of outputs that follow a grammar: those whose mask is late yield nothing in a step.

No other row waits for long: a launch gives all masks together 50 ms on a CPU, and 2 ms on a GPU.

    decode segment, mask late        left out of the forward: nothing is computed
    last chunk of a prompt, late     computes all tokens but the last one, which the next step decodes
    decode row of a device           the device sees whether the mask is there; the host learns it from the counts

Until a device's step is done the table has the length that each of its rows leaves if it yields a token; a row that did
not takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.rows.forward_batch import ForwardBatch, Row
from radixmesh.daemons.worker.plans.slots.slot_table import BoolArray, SlotTable
from radixmesh.daemons.worker.runner import Segment, StepOutput

_NEVER = np.int32(2**31 - 1)


def without_late(batch: ForwardBatch, is_late: Callable[[int], bool]) -> ForwardBatch:
    """The batch without the tokens of segments that would be sampled now and whose slots are late."""
    if not any(segment.sample is not None and is_late(segment.slot) for segment in batch.segments):
        return batch
    segments: list[Segment] = []
    rows: list[Row] = []
    late: list[Row] = []
    for segment, row in zip(batch.segments, batch.segment_rows, strict=True):
        if segment.sample is None or not is_late(segment.slot):
            segments.append(segment)
            rows.append(row)
            continue
        late.append(row)
        if len(segment.ids) > 1:
            segments.append(_shortened(segment))
            rows.append(replace(row, index=-1))
    return replace(batch, segments=segments, segment_rows=rows, late_rows=late)


def _shortened(segment: Segment) -> Segment:
    """All but the last token, of which nothing is sampled."""
    wanted = segment.prompt_logprobs
    end = segment.start + len(segment.ids) - 1
    if wanted is not None:
        wanted = range(wanted.start, min(wanted.stop, end + 1))
    return replace(
        segment,
        ids=segment.ids[:-1],
        sample=None,
        prompt_logprobs=wanted if wanted else None,
        is_last_chunk=False,
    )


def settle_guided(
    batch: ForwardBatch,
    output: StepOutput,
    is_uncertain: BoolArray,
    table: SlotTable,
    records: PageRecordTable,
    page_size: int,
) -> tuple[ForwardBatch, IntArray]:
    """Takes in what the uncertain rows of a launched step yielded: a token, or none. Returns the batch with their exact
    positions, and the token of each row, -1 where there is none.

    A row whose slot moved on since the launch changes nothing, and tells no logprobs.
    """
    assert output.counts is not None, "a runner that lets rows be late tells counts"
    rows, tokens = batch.rows, output.tokens
    if len(tokens) < len(rows.slots):
        tokens = np.full(len(rows.slots), -1, np.int32)
        tokens[output.counts > 0] = output.tokens
    is_same = table.is_occupied[rows.slots] & (table.generations[rows.slots] == batch.row_generations)
    chosen = is_uncertain & is_same
    logprobs_starts = batch.row_logprobs_starts
    if chosen.all():  # Nearly every step of outputs that all follow grammars.
        slots, of_slots = rows.slots, tokens
        positions = at = table.known_len[slots] - 1
    else:
        slots, of_slots = rows.slots[chosen], tokens[chosen]
        at = table.known_len[slots] - 1
        positions, logprobs_starts = rows.positions.copy(), logprobs_starts.copy()
        positions[chosen] = at
        logprobs_starts[is_uncertain & ~is_same] = _NEVER
    if len(output.tokens) < len(tokens):
        is_late = of_slots < 0
        table.total_len[slots[is_late]] -= 1
        table.computed_len[slots[is_late]] -= 1
        slots, at, of_slots = slots[~is_late], at[~is_late], of_slots[~is_late]
    pages = table.page_tables[slots, at // page_size]
    records.extend(pages, at % np.int32(page_size), table.tokens[slots, at])
    table.tokens[slots, at + 1] = of_slots
    table.known_len[slots] = at + 2
    return replace(batch, rows=replace(rows, positions=positions), row_logprobs_starts=logprobs_starts), tokens


def late_indexes(batch: ForwardBatch, output: StepOutput) -> Sequence[int]:
    """Indexes of the result rows that have no token because their mask was late."""
    indexes = [row.index for row in batch.late_rows]
    if output.counts is not None and batch.is_certain is not None:
        indexes += batch.row_indexes[(output.counts == 0) & ~batch.is_certain].tolist()
    if output.counts is not None and batch.rows.bounds is not None:
        has_room = batch.rows.positions + 1 < batch.rows.bounds.max_lens
        indexes += batch.row_indexes[(output.counts == 0) & has_room].tolist()
    return indexes


def sampled_tokens(
    batch: ForwardBatch, output: StepOutput, tokens: IntArray | None, table: SlotTable
) -> list[tuple[int, Sequence[int]]]:
    """Tokens of slots that may follow a grammar and still hold the request of the launch. tokens: of the
    rows, -1 where there is none, or of rows with bounds all of them; None: no row follows one."""

    def is_same(slot: int, generation: int) -> bool:
        # A released slot keeps its generation.
        return bool(table.is_occupied[slot] and table.generations[slot] == generation)

    sampled: list[tuple[int, Sequence[int]]] = []
    for row, segment, got in zip(batch.segment_rows, batch.segments, output.segments, strict=True):
        if segment.sample is not None and is_same(row.slot, row.generation):
            sampled.append((row.slot, got.tokens))
    if tokens is not None and batch.rows.bounds is not None and output.counts is not None:
        ends = np.cumsum(output.counts).tolist()
        rows = zip(batch.rows.slots.tolist(), batch.row_generations.tolist(), output.counts.tolist(), ends, strict=True)
        sampled += [
            (slot, tokens[end - count : end].tolist())
            for slot, generation, count, end in rows
            if count and is_same(slot, generation)
        ]
    elif tokens is not None and batch.is_certain is not None:
        slots = batch.rows.slots
        is_occupant = table.is_occupied[slots] & (table.generations[slots] == batch.row_generations)
        chosen = ~batch.is_certain & (tokens >= 0) & is_occupant
        pairs = zip(slots[chosen].tolist(), tokens[chosen].tolist(), strict=True)
        sampled += [(slot, (token,)) for slot, token in pairs]
    return sampled
