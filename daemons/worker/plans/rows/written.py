"""Positions at which a step writes KV, noted at its launch for the page records that it extends at its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.rows.forward_batch import ForwardBatch
from radixmesh.daemons.worker.plans.slots.slot_table import BoolArray, SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """int32 [tokens] each: segments' tokens, then rows'. Also tells if pages are still those of the launch.

    segment_ids: copies of the segments' ids; None where the step is done by now.
    """

    pages: IntArray
    page_generations: IntArray
    offsets: IntArray
    segment_ids: list[IntArray] | None
    row_slots: IntArray
    """Slots of the rows whose positions are known at the launch: all of them, or none where rows have bounds."""
    row_ids: IntArray
    is_known: BoolArray
    """Of each row: whether its token was known at the launch, and row_ids holds it."""

    @classmethod
    def by(
        cls, batch: ForwardBatch, table: SlotTable, records: PageRecordTable, page_size: int, *, is_asynchronous: bool
    ) -> Written:
        """By the step of a batch: segments first, rows after them. Their ids are known once it is done."""
        rows = batch.rows
        if rows.bounds is not None and not batch.segments:
            return _NOTHING
        slots, row_positions = rows.slots, rows.positions
        if rows.bounds is not None:
            slots, row_positions = empty_ints(), empty_ints()
        if batch.is_certain is not None:  # The others' are settled from counts.
            slots, row_positions = slots[batch.is_certain], row_positions[batch.is_certain]
        all_pages, positions = rows.page_tables[slots, row_positions // page_size], row_positions
        if batch.segments:
            spans = [np.arange(s.start, s.start + len(s.ids), dtype=np.int32) for s in batch.segments]
            pages = [s.pages[at // page_size] for s, at in zip(batch.segments, spans, strict=True)]
            all_pages, positions = np.concatenate((*pages, all_pages)), np.concatenate((*spans, row_positions))
        return cls(
            pages=all_pages,
            page_generations=records.generations[all_pages],
            offsets=positions % np.int32(page_size),
            segment_ids=[segment.ids.copy() for segment in batch.segments] if is_asynchronous else None,
            # Read anew: the rows' own ids are older than what was finished since.
            row_slots=slots,
            row_ids=table.tokens[slots, row_positions],
            is_known=table.known_len[slots] > row_positions,
        )


_NOTHING = Written(
    pages=empty_ints(),
    page_generations=empty_ints(),
    offsets=empty_ints(),
    segment_ids=None,
    row_slots=empty_ints(),
    row_ids=empty_ints(),
    is_known=np.zeros(0, np.bool_),
)
