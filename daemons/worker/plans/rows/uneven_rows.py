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
    """Takes in what the rows of a launched step computed; returns the batch with their exact positions.

    A row whose slot moved on since the launch changes nothing, and tells no logprobs.
    """
    assert output.counts is not None, "rows with bounds yield counts"
    rows, counts = batch.rows, output.counts
    if not output.logprobs and _settle_single(batch, output, table, records, page_size):
        return batch
    positions, logprobs_starts = rows.positions.copy(), batch.row_logprobs_starts.copy()
    is_same = table.is_occupied[rows.slots] & (table.generations[rows.slots] == batch.row_generations)
    logprobs_starts[~is_same] = _NEVER
    # All rows at once: steps of some hundreds of them follow each other within milliseconds.
    slots, num = rows.slots[is_same], counts[is_same]
    computed_len, total_len = table.computed_len[slots], table.total_len[slots]
    positions[is_same] = computed_len
    ends = total_len + num
    assert (ends <= table.max_total_len[slots]).all(), (slots, ends, table.max_total_len[slots])
    of_tokens = np.repeat(slots, num)
    number = np.arange(len(of_tokens), dtype=np.int32) - np.repeat(np.cumsum(num) - num, num)
    table.tokens[of_tokens, np.repeat(total_len, num) + number] = output.tokens[np.repeat(is_same, counts)]
    table.total_len[slots] = table.known_len[slots] = ends
    written = np.repeat(computed_len, num) + number
    pages = table.page_tables[of_tokens, written // page_size]
    records.extend(pages, written % np.int32(page_size), table.tokens[of_tokens, written])
    table.computed_len[slots] = computed_len + num
    return replace(batch, rows=replace(rows, positions=positions), row_logprobs_starts=logprobs_starts)


def _settle_single(
    batch: ForwardBatch, output: StepOutput, table: SlotTable, records: PageRecordTable, page_size: int
) -> bool:
    """The same where each row yielded one token and none of their slots moved on, as in nearly all steps that draft
    nothing; False: it is no such step, and nothing was done."""
    slots = batch.rows.slots
    if output.counts is None or output.num_drafts is not None or not bool((output.counts == 1).all()):
        return False
    if not (table.is_occupied[slots] & (table.generations[slots] == batch.row_generations)).all():
        return False
    computed_len, total_len = table.computed_len[slots], table.total_len[slots]
    assert (total_len < table.max_total_len[slots]).all(), (slots, total_len, table.max_total_len[slots])
    table.tokens[slots, total_len] = output.tokens
    table.total_len[slots] = table.known_len[slots] = total_len + np.int32(1)
    pages = table.page_tables[slots, computed_len // page_size]
    records.extend(pages, computed_len % np.int32(page_size), table.tokens[slots, computed_len])
    table.computed_len[slots] = computed_len + np.int32(1)
    return True


def _settle_decode(
    table: SlotTable, records: PageRecordTable, page_size: int, slot: int, tokens: Sequence[int]
) -> None:
    position = int(table.computed_len[slot])
    _append(table, slot, tokens)
    _write(table, records, page_size, slot, position, position + len(tokens))
    table.computed_len[slot] = position + len(tokens)


def _append(table: SlotTable, slot: int, tokens: Sequence[int]) -> None:
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
