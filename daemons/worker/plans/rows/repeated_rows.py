"""Steps of decodes alone that only advance: what stays the same from one to the next is kept.

Taking it from the tables again, and checking it again, costs the host more than a short step takes on a device. Rows
with bounds advance by any number of tokens, and their device knows which of them have no room left.
"""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.steps.step import DispatchMode, StepPlan
from radixmesh.daemons.worker.plans.rows.forward_batch import ForwardBatch
from radixmesh.daemons.worker.plans.slots.slot_table import SlotTable
from radixmesh.daemons.worker.runner import DecodeRows, RowBounds


class RepeatedRows:
    """Told of every step that is launched, in order, by `ran` or by `next`."""

    def __init__(self, table: SlotTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size
        self._batch: ForwardBatch | None = None
        self._decode_set = table.decode_set
        self._steps_left = 0

    def next(self, plan: StepPlan) -> ForwardBatch | None:
        """The batch of a plan whose rows are those of the step before, one token further; None: it is another.

        Such a plan needs no check and no applying: it says nothing, and the step before had the same slots checked.
        """
        before, self._batch = self._batch, None
        if before is None or not self._steps_left or not _says_nothing(plan):
            return None
        if self._decode_set is not self._table.decode_set:  # Another epoch: plans change it by saying so.
            return None
        rows = self._next_rows(before.rows) if before.rows.bounds is None else self._next_bounded(before.rows)
        self._batch = ForwardBatch(
            rows=rows,
            row_indexes=before.row_indexes,
            row_generations=before.row_generations,
            row_logprobs_starts=before.row_logprobs_starts,
            segments=(),
            segment_rows=(),
            num_results=before.num_results,
            is_certain=before.is_certain,
        )
        return self._batch

    def ran(self, batch: ForwardBatch) -> None:
        """A step of `batch` is launched now; its lengths have not advanced yet."""
        table, slots = self._table, batch.rows.slots
        if batch.segments or batch.late_rows or not len(slots) or len(slots) != batch.num_results:
            self._batch = None
            return
        if batch.rows.bounds is not None:
            self._batch, self._decode_set, self._steps_left = batch, table.decode_set, 1
            return
        total_len = table.total_len[slots]
        with_pages = table.num_pages[slots].astype(np.int64) * self._page_size - total_len
        self._steps_left = int(np.minimum(with_pages, table.max_total_len[slots] - 1 - total_len).min())
        self._batch, self._decode_set = batch, table.decode_set

    def _next_rows(self, rows: DecodeRows) -> DecodeRows:
        self._steps_left -= 1
        table, slots = self._table, rows.slots
        positions = table.total_len[slots] - 1
        return DecodeRows(
            slots=slots,
            ids=table.tokens[slots, positions],
            positions=positions,
            page_tables=table.page_tables,
            num_pages=table.num_pages,
            seeds=rows.seeds,
            is_sampled=rows.is_sampled,
            is_repeat=True,
        )

    def _next_bounded(self, rows: DecodeRows) -> DecodeRows:
        """Pages and limits are those of the step before; the host knows more tokens by now."""
        table, bounds = self._table, rows.bounds
        assert bounds is not None
        return DecodeRows(
            slots=rows.slots,
            ids=rows.ids,
            positions=rows.positions,
            page_tables=table.page_tables,
            num_pages=table.num_pages,
            seeds=rows.seeds,
            is_sampled=rows.is_sampled,
            bounds=RowBounds(max_lens=bounds.max_lens, known_lens=table.known_len[rows.slots], tokens=table.tokens),
            is_repeat=True,
        )


def _says_nothing(plan: StepPlan) -> bool:
    """The plan is a forward of what decodes already."""
    return (
        plan.has_forward
        and plan.decode_set is None
        and not (plan.grants or plan.releases or plan.admits or plan.chunks or plan.page_copies or plan.barrier_ops)
        and not (plan.saves or plan.loads or plan.drafts or plan.max_tokens_per_rank)
        and plan.dispatch is DispatchMode.UNSPECIFIED
    )
