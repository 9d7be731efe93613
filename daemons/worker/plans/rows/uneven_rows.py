"""Settles a step whose decode rows yielded any number of tokens: tokens, lengths and page records, from the counts.

    row that yields n > 0 tokens     KV of [position, position + n)         tokens at [position + 1, position + 1 + n)
    row that yields none             nothing was written, nothing changes

A runner that is done when the launch returns settles there (`settle_uneven`): the next plan starts from the lengths
that this leaves. An asynchronous one settles when its result is asked for (`settle_bounded`): until then the table has
the least lengths that slots may have by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.rows.forward_batch import ForwardBatch
from radixmesh.daemons.worker.plans.slots.slot_table import SlotTable
from radixmesh.daemons.worker.runner import StepOutput

_NEVER = np.int32(2**31 - 1)


def settle_uneven(
    batch: ForwardBatch, output: StepOutput, table: SlotTable, records: PageRecordTable, page_size: int
) -> None:
    """Takes in what the step computed. `batch` is that of the plan that was applied last."""
    counts = np.ones(len(batch.rows.slots), np.int32) if output.counts is None else output.counts
    starts = np.cumsum(counts) - counts
    for row, slot in enumerate(batch.rows.slots.tolist()):
        tokens = output.tokens[starts[row] : starts[row] + counts[row]].tolist()
        _settle_decode(table, records, page_size, slot, tokens)
    for segment, got in zip(batch.segments, output.segments, strict=True):
        if segment.max_tokens is not None:
            _settle_decode(table, records, page_size, segment.slot, got.tokens)
            continue
        slot, end = segment.slot, segment.start + len(segment.ids)
        _write(table, records, page_size, slot, segment.start, end)
        table.computed_len[slot] = end
        if segment.sample is not None:
            assert len(got.tokens) == 1, f"a prefill yields one token, slot {slot} has {len(got.tokens)}"
            _append(table, slot, got.tokens)


def settle_bounded(
    batch: ForwardBatch, output: StepOutput, table: SlotTable, records: PageRecordTable, page_size: int
) -> ForwardBatch:
    """Takes in what the rows of a launched step computed; returns the batch with their exact positions, where somebody
    asks for these: logprobs do, and rows that yielded nothing.

    A row whose slot moved on since the launch changes nothing, and tells no logprobs.
    """
    assert output.counts is not None, "rows with bounds yield counts"
    rows, counts = batch.rows, output.counts
    needs_positions = bool(output.logprobs) or not counts.all()
    if len(counts) == 1 and not needs_positions:
        slot = int(rows.slots[0])
        if table.is_occupied[slot] and table.generations[slot] == batch.row_generations[0]:
            _settle_decode(table, records, page_size, slot, output.tokens)
        return batch
    # All rows at once: steps of some hundreds of them follow each other within milliseconds.
    slots, num, tokens = rows.slots, counts, output.tokens
    is_same = table.is_occupied[slots] & (table.generations[slots] == batch.row_generations)
    if not is_same.all():
        slots, num, tokens = slots[is_same], counts[is_same], tokens[np.repeat(is_same, counts)]
    if needs_positions:
        positions, logprobs_starts = rows.positions.copy(), batch.row_logprobs_starts.copy()
        positions[is_same] = table.computed_len[slots]
        logprobs_starts[~is_same] = _NEVER
        batch = replace(batch, rows=replace(rows, positions=positions), row_logprobs_starts=logprobs_starts)
    _settle_rows(table, records, page_size, slots, num, tokens)
    return batch


def _settle_rows(
    table: SlotTable, records: PageRecordTable, page_size: int, slots: IntArray, num: IntArray, tokens: IntArray
) -> None:
    """Rows yielded so many tokens each. The last token of a slot that decodes is the one without KV."""
    total_len = table.total_len[slots]
    ends = total_len + num
    assert (ends <= table.max_total_len[slots]).all(), (slots, ends, table.max_total_len[slots])
    written, of_tokens = total_len - np.int32(1), slots
    if len(tokens) != len(slots) or not num.all():
        of_tokens = np.repeat(slots, num)
        before_each = np.cumsum(num, dtype=np.int32) - num
        written = np.repeat(written - before_each, num) + np.arange(len(tokens), dtype=np.int32)
    table.tokens[of_tokens, written + np.int32(1)] = tokens
    pages = table.page_tables[of_tokens, written // page_size]
    records.extend(pages, written % np.int32(page_size), table.tokens[of_tokens, written])
    table.total_len[slots] = table.known_len[slots] = ends
    table.computed_len[slots] = ends - np.int32(1)


def _settle_decode(
    table: SlotTable, records: PageRecordTable, page_size: int, slot: int, tokens: Sequence[int] | IntArray
) -> None:
    start = int(table.computed_len[slot])
    end = start + len(tokens)
    _append(table, slot, tokens)
    # Few tokens: numpy's calls for all of them take longer than a page or two on their own.
    for index in range(start // page_size, -(-end // page_size)):
        first, last = max(start, index * page_size), min(end, (index + 1) * page_size)
        page, offset = int(table.page_tables[slot, index]), first - index * page_size
        records.extend_page(page, offset, table.tokens[slot, first:last])
    table.computed_len[slot] = end


def _append(table: SlotTable, slot: int, tokens: Sequence[int] | IntArray) -> None:
    start = int(table.total_len[slot])
    end = start + len(tokens)
    assert end <= table.max_total_len[slot], f"slot {slot} has room up to {table.max_total_len[slot]}, not {end}"
    table.tokens[slot, start:end] = tokens
    table.total_len[slot] = table.known_len[slot] = end


def _write(table: SlotTable, records: PageRecordTable, page_size: int, slot: int, start: int, end: int) -> None:
    """KV of the slot's tokens [start, end) was written."""
    positions = np.arange(start, end, dtype=np.int32)
    pages = table.page_tables[slot, positions // page_size]
    records.extend(pages, positions % np.int32(page_size), table.tokens[slot, start:end])
