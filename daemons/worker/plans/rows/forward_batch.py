"""Batch of one forward: the decode set and the chunks of a plan, as rows and segments for the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import StepPlan, Task
from radixmesh.daemons.worker.plans.slots.slot_table import BoolArray, SlotTable
from radixmesh.daemons.worker.runner import DecodeRows, RowBounds, SampleInput, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Destination of a segment's output: `index` is its result row, -1 for a chunk that does not finish its prefill.

    `generation` is the slot's; logprobs of positions before `logprobs_start` were delivered by an earlier attempt.
    """

    slot: int
    index: int
    generation: int
    logprobs_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """`num_results` result rows: `row_indexes` int32 are those of `rows`, `segment_rows` stand beside `segments`.

    row_generations, row_logprobs_starts: int32 [rows] of their slots. A result row that appears in neither had no room.
    """

    rows: DecodeRows
    row_indexes: IntArray
    row_generations: IntArray
    row_logprobs_starts: IntArray
    segments: Sequence[Segment]
    segment_rows: Sequence[Row]
    num_results: int
    late_rows: Sequence[Row] = ()
    """Result rows that were left out, because the mask of their token is not there yet."""
    is_certain: BoolArray | None = None
    """Of each row: whether it yields a token in any case; None: all do, or have bounds."""

    @classmethod
    def of(
        cls, plan: StepPlan, table: SlotTable, page_size: int, max_tokens_per_row: int = 1, *, is_bounded: bool = False
    ) -> ForwardBatch:
        """The batch of a checked and applied plan. Segments hold views of the table's arrays, rows hold copies.

        is_bounded: lengths of the table are the least that decoding slots have by now. Rows without room are among the
        rows, unless already the least length leaves them none.
        """
        decode_set = table.decode_set
        if is_bounded:
            return cls._bounded(plan, table, page_size)
        room = table.room(decode_set, max_tokens_per_row) if max_tokens_per_row > 1 else None
        has_room = table.has_room(decode_set) if room is None else room > 0
        is_batched = has_room & (table.total_len[decode_set] >= table.batch_from_len[decode_set])
        segments: list[Segment] = []
        segment_rows: list[Row] = []
        for index in np.flatnonzero(has_room & ~is_batched).tolist():
            slot = int(decode_set[index])
            max_tokens = None if room is None else int(room[index])
            segments.append(_segment(table, slot, 1, page_size, max_tokens))
            segment_rows.append(_row(table, slot, index))
        chunks, chunk_rows, num_results = _chunks(plan, table, page_size)
        segments += chunks
        segment_rows += chunk_rows
        row_indexes = np.flatnonzero(is_batched).astype(np.int32)
        slots = decode_set[row_indexes]
        return cls(
            rows=_decode_rows(table, slots, None if room is None else room[row_indexes]),
            row_indexes=row_indexes,
            row_generations=table.generations[slots],
            row_logprobs_starts=table.logprobs_start[slots],
            is_certain=~table.is_uncertain[slots] if table.is_uncertain[slots].any() else None,
            segments=segments,
            segment_rows=segment_rows,
            num_results=num_results,
        )

    @classmethod
    def _bounded(cls, plan: StepPlan, table: SlotTable, page_size: int) -> ForwardBatch:
        decode_set = table.decode_set
        has_room = table.total_len[decode_set] < table.max_total_len[decode_set]
        slots = decode_set[has_room]
        assert (table.total_len[slots] >= table.batch_from_len[slots]).all(), "bounds are of rows, not of segments"
        chunks, chunk_rows, num_results = _chunks(plan, table, page_size)
        with_pages = table.num_pages[slots].astype(np.int64) * page_size + 1
        bounds = RowBounds(
            max_lens=np.minimum(with_pages, table.max_total_len[slots]).astype(np.int32),
            known_lens=table.known_len[slots],
            tokens=table.tokens,
        )
        return cls(
            rows=replace(_decode_rows(table, slots, None), bounds=bounds),
            row_indexes=np.flatnonzero(has_room).astype(np.int32),
            row_generations=table.generations[slots],
            row_logprobs_starts=table.logprobs_start[slots],
            segments=chunks,
            segment_rows=chunk_rows,
            num_results=num_results,
        )


def _chunks(plan: StepPlan, table: SlotTable, page_size: int) -> tuple[list[Segment], list[Row], int]:
    """The chunks of a plan, where their outputs go, and how many result rows the plan has with those of decodes."""
    segments: list[Segment] = []
    segment_rows: list[Row] = []
    num_results = len(table.decode_set)
    for chunk in plan.chunks:
        is_last = table.computed_len[chunk.slot] + chunk.length == table.total_len[chunk.slot]
        index = num_results if is_last else -1
        num_results += bool(is_last)
        if is_last and not _can_finish(table, chunk.slot):
            continue
        segments.append(_segment(table, chunk.slot, chunk.length, page_size))
        segment_rows.append(_row(table, chunk.slot, index))
    return segments, segment_rows, num_results


def _row(table: SlotTable, slot: int, index: int) -> Row:
    generation, logprobs_start = int(table.generations[slot]), table.occupant(slot).logprobs_start
    return Row(slot=slot, index=index, generation=generation, logprobs_start=logprobs_start)


def _decode_rows(table: SlotTable, slots: IntArray, max_tokens: IntArray | None) -> DecodeRows:
    positions = table.total_len[slots] - 1
    return DecodeRows(
        slots=slots,
        ids=table.tokens[slots, positions],
        positions=positions,
        page_tables=table.page_tables,
        num_pages=table.num_pages,
        seeds=table.seeds[slots],
        is_sampled=table.is_sampled[slots],
        max_tokens=max_tokens,
    )


def _can_finish(table: SlotTable, slot: int) -> bool:
    """True if a token may follow the slot's last one; embed and score tasks need none."""
    return table.occupant(slot).task is not Task.GENERATE or bool(table.total_len[slot] < table.max_total_len[slot])


def _segment(table: SlotTable, slot: int, length: int, page_size: int, max_tokens: int | None = None) -> Segment:
    occupant = table.occupant(slot)
    start, total_len = int(table.computed_len[slot]), int(table.total_len[slot])
    end = start + length
    is_last = end == total_len
    prompt_len = int(table.prompt_len[slot])
    sample = None
    if is_last and occupant.task is Task.GENERATE:
        num_suppressed = prompt_len + occupant.min_tokens - total_len
        is_suppressed = num_suppressed > 0
        if max_tokens is not None and is_suppressed and len(occupant.suppressed_ids):
            # All tokens of one step are sampled under the same rule.
            max_tokens = min(max_tokens, num_suppressed)
        sample = SampleInput(
            sampling=occupant.sampling,
            prompt_ids=occupant.prompt_ids,
            output_ids=table.tokens[slot, prompt_len:total_len],
            position=total_len,
            suppressed_ids=occupant.suppressed_ids if is_suppressed else occupant.suppressed_ids[:0],
            guide=occupant.guide,
        )
    wanted = _prompt_logprobs(occupant.sampling.prompt_logprobs, occupant.logprobs_start, start, end, prompt_len)
    return Segment(
        slot=slot,
        ids=table.tokens[slot, start:end],
        start=start,
        pages=table.page_tables[slot, : -(-(end + (max_tokens or 1) - 1) // page_size)],
        max_tokens=max_tokens,
        sample=sample,
        prompt_logprobs=wanted,
        prompt_ids=occupant.prompt_ids if wanted is not None else occupant.prompt_ids[:0],
        prompt_num_top=occupant.sampling.num_top_logprobs or 0 if wanted is not None else 0,
        task=occupant.task,
        is_last_chunk=is_last,
    )


def _prompt_logprobs(is_wanted: bool, logprobs_start: int, start: int, end: int, prompt_len: int) -> range | None:
    """Undelivered prompt positions that computing [start, end) predicts: within [start + 1, end]."""
    if not is_wanted:
        return None
    wanted = range(max(start + 1, logprobs_start), min(end + 1, prompt_len))
    return wanted if len(wanted) else None
