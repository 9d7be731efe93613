"""Runs plans: checks one whole, applies it in contract order, has the runner compute, and writes down what came out.

One thread calls it. It knows no streams and no epochs' order: whoever feeds it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.step import Grant, PageRecords, StepPlan, StepResult
from radixmesh.daemons.worker.forward_batch import ForwardBatch, Row
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.page_records import PageRecordTable
from radixmesh.daemons.worker.plan_check import check_plan
from radixmesh.daemons.worker.result_builder import ResultBuilder
from radixmesh.daemons.worker.runner import ModelRunner, StepOutput
from radixmesh.daemons.worker.slot_table import SlotTable


class StepExecutor:
    """Slots, page records and a model, driven by plans.

    max_tokens_per_step: chunks and decodes of one forward together.
    """

    def __init__(self, runner: ModelRunner, *, num_slots: int, max_tokens_per_step: int) -> None:
        self.limits = Limits(
            page_size=runner.page_size,
            num_pages=runner.num_pages,
            num_slots=num_slots,
            vocab_size=runner.vocab_size,
            max_total_len=runner.max_total_len,
            max_tokens_per_step=max_tokens_per_step,
            tasks=frozenset(runner.tasks),
        )
        self.runner = runner
        self.table = SlotTable(self.limits)
        self.records = PageRecordTable(self.limits)
        self.weights_version = 1
        self._epoch = 0
        self._group_generation = 0
        self._last_step = 0

    def begin_epoch(self, epoch: int, group_generation: int = 0) -> None:
        """Frees all slots; KV and page records stay. Steps count from 1 again."""
        self.table.clear()
        self._epoch, self._group_generation, self._last_step = epoch, group_generation, 0

    def run(self, plan: StepPlan, *, ready_ns: int = 0) -> StepResult:
        """Runs one plan whole, or raises the MeshError that refuses it with nothing changed.

        `ready_ns`: when the plan was there, on the runner's clock. Any other exception: the step died half-way, the
        tables and KV are undefined from then on.
        """
        self._check_order(plan)
        check_plan(plan, self.limits, self.table, self.records)
        self._apply(plan)
        self._last_step = plan.step_id
        builder = ResultBuilder(plan, self.weights_version)
        if not plan.has_forward:
            return builder.build(at_ns=ready_ns)
        batch = ForwardBatch.of(plan, self.table, self.limits.page_size)
        output = self.runner.step(batch.rows, batch.segments, ready_ns)
        self._complete(batch, output)
        return builder.build_forward(batch, output, self.table)

    def snapshot(self) -> tuple[Sequence[PageRecords], Sequence[str]]:
        """Records of all pages in ascending ranges, and the namespaces they index."""
        return list(self.records.snapshot()), self.records.namespaces

    def _check_order(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch:
            raise MeshError(
                ErrorReason.ERROR_REASON_EPOCH_FENCED,
                f"the plan is of epoch {plan.epoch}, the worker in {self._epoch}: claim it anew",
                {"epoch": str(self._epoch)},
            )
        if plan.group_generation != self._group_generation:
            raise MeshError(
                ErrorReason.ERROR_REASON_GROUP_GENERATION,
                f"the plan is for group generation {plan.group_generation}: claim the worker anew",
                {"group_generation": str(self._group_generation)},
            )
        if plan.step_id != self._last_step + 1:
            raise MeshError(
                ErrorReason.ERROR_REASON_STEP_GAP,
                f"step {plan.step_id} follows step {self._last_step}: steps have no gaps",
                {"expected": str(self._last_step + 1), "got": str(plan.step_id)},
            )

    def _apply(self, plan: StepPlan) -> None:
        """Everything up to the forward. The order is the contract's."""
        table, records = self.table, self.records
        for _ in plan.barrier_ops:  # The check let flush_cache pass and nothing else.
            records.flush()
            self.runner.clear()
        for release in plan.releases:
            table.release(release.slot, release.generation)
        for admit in plan.admits:
            table.admit(admit, can_batch=self.runner.can_batch(admit.sampling))
        if plan.grants:
            self._grant(plan.grants)
        for copy in plan.page_copies:
            self.runner.copy_page(copy.source_page, copy.target_page, copy.num_tokens)
            records.copy(copy.source_page, copy.target_page, copy.num_tokens)
        if plan.decode_set is not None:
            table.decode_set = plan.decode_set

    def _grant(self, grants: Sequence[Grant]) -> None:
        slots = np.array([grant.slot for grant in grants])
        counts = np.array([len(grant.pages) for grant in grants])
        pages = np.concatenate([grant.pages for grant in grants])
        self.records.grant(
            pages,
            counts,
            previous_pages=self.table.last_pages(slots),
            namespaces=[self.table.occupant(grant.slot).cache_namespace for grant in grants],
            weights_version=self.weights_version,
        )
        self.table.append_pages(slots, counts, pages)

    def _complete(self, batch: ForwardBatch, output: StepOutput) -> None:
        """Lengths, tokens and records take in what the step computed."""
        rows = batch.rows
        if len(rows.slots):
            self._record(
                rows.page_tables[rows.slots, rows.positions // self.limits.page_size], rows.positions, rows.ids
            )
            self.table.tokens[rows.slots, rows.positions + 1] = output.tokens
            self.table.computed_len[rows.slots] = rows.positions + 1
            self.table.total_len[rows.slots] = rows.positions + 2
        for row, segment, got in zip(batch.segment_rows, batch.segments, output.segments, strict=True):
            positions = np.arange(segment.start, segment.start + len(segment.ids), dtype=np.int32)
            self._record(segment.pages[positions // self.limits.page_size], positions, segment.ids)
            self.table.computed_len[row.slot] = segment.start + len(segment.ids)
            if segment.sample is not None:
                assert got.token is not None, f"the runner drew no token for slot {row.slot}"
                self._append(row, got.token)

    def _record(self, pages: IntArray, positions: IntArray, ids: IntArray) -> None:
        self.records.extend(pages, positions % self.limits.page_size, ids)

    def _append(self, row: Row, token: int) -> None:
        assert 0 <= token < self.limits.vocab_size, f"the runner drew {token} for slot {row.slot}"
        total_len = int(self.table.total_len[row.slot])
        self.table.tokens[row.slot, total_len] = token
        self.table.total_len[row.slot] = total_len + 1
