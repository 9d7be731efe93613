"""Runs plans: checks one whole, applies it in contract order, has the runner compute, and writes down what came out.

With a runner that is asynchronous the next plan is launched while this one runs: lengths advance at the launch, tokens
and page records at its end.

One thread calls it. It knows no streams and no epochs' order: whoever feeds it does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit, Grant, PageRecords, StepPlan, StepResult
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.guides import Guides, SlotGuides
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.arriving_kv import ArrivingKv
from radixmesh.daemons.worker.plans.barrier_ops import commit
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.plan_check import check_plan
from radixmesh.daemons.worker.plans.rows.forward_batch import ForwardBatch, Row
from radixmesh.daemons.worker.plans.rows.guided_rows import sampled_tokens, settle_guided, without_late
from radixmesh.daemons.worker.plans.rows.repeated_rows import RepeatedRows
from radixmesh.daemons.worker.plans.rows.result_builder import ResultBuilder
from radixmesh.daemons.worker.plans.rows.uneven_rows import settle_bounded, settle_uneven
from radixmesh.daemons.worker.plans.rows.written import Written
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore
from radixmesh.daemons.worker.plans.slots.slot_blobs import SlotBlobs
from radixmesh.daemons.worker.plans.slots.slot_table import BoolArray, SlotTable
from radixmesh.daemons.worker.plans.tiers.host_tier import HostTier, LoadOrNext
from radixmesh.daemons.worker.runner import ModelRunner, StepOutput
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent, StepHandle


class StepExecutor:
    """Slots, page records and a model, driven by plans.

    max_tokens_per_step: chunks and decodes of one forward together. blobs: what slots may name; None: nothing.
    grammars: reads those of them that are grammars; None: requests that follow one are refused. guides: move outputs on
    through their grammars; None: threads of this process do.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_slots: int,
        max_tokens_per_step: int,
        blobs: BlobStore | None = None,
        grammars: GrammarStore | None = None,
        guides: Guides | None = None,
    ) -> None:
        self.limits = Limits(
            page_size=runner.page_size,
            num_pages=runner.num_pages,
            num_slots=num_slots,
            vocab_size=runner.vocab_size,
            max_total_len=runner.max_total_len,
            max_tokens_per_step=max_tokens_per_step,
            max_tokens_per_row=runner.max_tokens_per_row,
            tasks=frozenset(runner.tasks),
            takes_grammars=runner.takes_grammars and blobs is not None and grammars is not None,
        )
        self.runner = runner
        self.table = SlotTable(self.limits)
        self._repeated = RepeatedRows(self.table, runner.page_size)
        self.records = PageRecordTable(self.limits)
        self.host = HostTier(runner.host_pool, self.limits) if runner.host_pool is not None else None
        """None: KV is on the device alone."""
        self._waiting: LoadOrNext | None = None
        """Of the last plan, if that had no forward."""
        self.blobs = SlotBlobs(blobs)
        self._grammars = grammars
        # Guides without a slot are empty, and false.
        self.guides = SlotGuides(runner.vocab_size, runner.max_tokens_per_row - 1) if guides is None else guides
        self.arriving = ArrivingKv()
        self.weights_version = 1
        # Lengths of decoding slots are settled when a step is done; until then the device alone has them.
        self._is_bounded = runner.max_tokens_per_row > 1 and runner.is_asynchronous
        self._epoch = 0
        self._group_generation = 0
        self.last_step = 0
        self._launched: dict[int, StepHandle[StepResult]] = {}
        self._last_sampled = np.zeros(num_slots, np.int32)
        # The last step of the epoch that had a row of each slot, 0 = none.
        self._last_steps = np.zeros(num_slots, np.int64)

    def begin_epoch(self, epoch: int, group_generation: int = 0) -> None:
        """Frees all slots; KV and page records stay. Steps count from 1 again."""
        self.finish_all()
        self.arriving.begin_epoch()
        if self.host is not None:
            self.host.begin_epoch(self.records)
        if self.runner.expert_moves is not None:
            self.runner.expert_moves.drop()
        self.table.clear()
        self.guides.clear()
        self.blobs.begin_epoch()
        self._epoch, self._group_generation, self.last_step = epoch, group_generation, 0
        self._last_steps[:] = 0

    @property
    def epoch(self) -> int:
        """The one that plans are of."""
        return self._epoch

    def reset(self, *, keeps_kv: bool = False) -> None:
        """Empties slots, KV and page records: the group was formed anew. No step runs. keeps_kv: only as the next epoch
        does; records are those of completed steps."""
        assert not self._launched, "steps that were aborted have been finished"
        self.arriving.finish_all()
        if keeps_kv:
            return
        self.table.clear()
        self.guides.clear()
        self.blobs.begin_epoch()
        self.records.reset()
        if self.host is not None:
            self.host.reset()
        self.runner.clear()

    def run(self, plan: StepPlan, *, ready_ns: int = 0) -> StepResult:
        """Launches one plan and waits for it."""
        return self.launch(plan, ready_ns=ready_ns).result()

    def launch(self, plan: StepPlan, *, ready_ns: int = 0) -> StepHandle[StepResult]:
        """Starts one plan whole, or raises the MeshError that refuses it with nothing changed.

        `ready_ns`: when the plan was there, on the runner's clock. Any other exception, here or of the step's result():
        a step died half-way, the tables and KV are undefined from then on.
        """
        if self._waiting is not None:
            self._waiting.pass_on()
            self._waiting = None
        step = self._start(plan, ready_ns)
        host = self.host
        if host is None:
            return step
        if plan.has_forward:
            return StepHandle(step.event, partial(self._with_loaded, host, step))
        self._waiting = waiting = LoadOrNext(host.next_event)
        return StepHandle(waiting, partial(self._with_loaded, host, step, waiting))

    def _start(self, plan: StepPlan, ready_ns: int) -> StepHandle[StepResult]:
        self._check_order(plan)
        self.arriving.ahead_of(plan, is_asynchronous=self.runner.is_asynchronous)
        if not self.guides.has_errors and (repeated := self._repeated.next(plan)) is not None:
            self.last_step = plan.step_id
            return self._launch(plan, repeated, ready_ns)
        check_plan(plan, self.limits, self.table, self.records, self.runner, self.host)
        spent_ns = self._apply(plan)
        self.last_step = plan.step_id
        if not plan.has_forward:
            build = partial(self._builder(plan).build, start_ns=ready_ns, end_ns=ready_ns + spent_ns)
            return StepHandle(DONE, build)
        most = self.runner.max_tokens_per_row
        batch = ForwardBatch.of(plan, self.table, self.limits.page_size, most, is_bounded=self._is_bounded)
        if self._launched and self._needs_tokens(batch):
            self.finish_all()
            # Rows that yielded nothing have taken back the length that they were counted with.
            batch = ForwardBatch.of(plan, self.table, self.limits.page_size, most, is_bounded=self._is_bounded)
        if len(self.guides):
            batch = self._with_masks(batch)
        if most == 1 or (self._is_bounded and not len(self.guides)):
            self._repeated.ran(batch)
        return self._launch(plan, batch, ready_ns)

    def _with_loaded(
        self, host: HostTier, step: StepHandle[StepResult], waiting: LoadOrNext | None = None
    ) -> StepResult:
        """A step's result with the loads that have completed by now. waiting: for the first of them, while no other
        plan is there: its request need not wait for those behind it."""
        result = step.result()
        if waiting is not None:
            waiting.wait()
        loaded = host.take_loaded(self.records)
        return replace(result, loaded_ops=loaded) if loaded else result

    def _launch(self, plan: StepPlan, batch: ForwardBatch, ready_ns: int) -> StepHandle[StepResult]:
        most, builder = self.runner.max_tokens_per_row, self._builder(plan)
        self.runner.set_dispatch_mode(
            plan.dispatch, plan.max_tokens_per_rank, may_have_chunks=plan.may_have_chunks or bool(plan.chunks)
        )
        if self.host is not None:
            self._last_steps[batch.rows.slots] = plan.step_id
            for segment in batch.segments:
                self._last_steps[segment.slot] = plan.step_id
        running = self.runner.launch(batch.rows, batch.segments, ready_ns)
        followed = None
        if running.tokens is not None:
            slots = batch.rows.slots
            if batch.segments:
                sampled = [segment.slot for segment in batch.segments if segment.sample is not None]
                slots = np.concatenate([slots, np.array(sampled, np.int32)])
            followed = self.guides.launched(slots, running.tokens)
        if most > 1 and not batch.rows.is_repeat:
            self.table.is_bounded[self.table.decode_set] = True
        if most > 1 and not self._is_bounded:
            output = running.result()
            settle_uneven(batch, output, self.table, self.records, self.limits.page_size)
            if len(self.guides):
                self.guides.follow(sampled_tokens(batch, output, None, self.table))
            return StepHandle.of(builder.build_forward(batch, output))
        is_asynchronous = self.runner.is_asynchronous
        written = Written.by(batch, self.table, self.records, self.limits.page_size, is_asynchronous=is_asynchronous)
        settle = partial(self._settle, plan.step_id, running, batch, written, builder, followed)
        self._advance(batch)
        step = self._launched[plan.step_id] = StepHandle(running.event, settle)
        return step

    def close(self) -> None:
        """The worker ends."""
        self.guides.close()

    def finish_all(self) -> None:
        """Waits for every launched step, and for KV that arrives beside them; their results stay with them."""
        while self._launched:
            next(iter(self._launched.values())).result()
        self.arriving.finish_all()

    def settle(self, step_id: int) -> None:
        """Waits for launched steps up to this one. Raises what the first of them died of."""
        while self._launched and (step := next(iter(self._launched))) <= step_id:
            self._launched[step].result()

    def snapshot(self) -> tuple[Sequence[PageRecords], Sequence[str]]:
        """Records of all pages in ascending ranges, and the namespaces they index, after all launched steps."""
        self.finish_all()
        if self.host is not None:
            self.host.finish(self.records)
        return list(self.records.snapshot()), self.records.namespaces

    def host_snapshot(self) -> tuple[Sequence[PageRecords], Sequence[str]] | None:
        """As snapshot(), of host pages; None: there is no host tier."""
        if self.host is None:
            return None
        self.host.finish(self.records)
        return list(self.host.records.snapshot()), self.host.records.namespaces

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
        if plan.step_id != self.last_step + 1:
            raise MeshError(
                ErrorReason.ERROR_REASON_STEP_GAP,
                f"step {plan.step_id} follows step {self.last_step}: steps have no gaps",
                {"expected": str(self.last_step + 1), "got": str(plan.step_id)},
            )

    def _apply(self, plan: StepPlan) -> int:
        """Everything up to the forward, in the contract's order; nanoseconds that the barrier ops took."""
        table, records = self.table, self.records
        start_ns = self.runner.now_ns() if plan.barrier_ops else 0
        for op in plan.barrier_ops:
            self.finish_all()
            if self.host is not None:
                self.host.finish(records)
            commit(op, self.runner, records, self.host)
        spent_ns = self.runner.now_ns() - start_ns if plan.barrier_ops else 0
        if self.host is not None and plan.saves:
            self.host.save(plan.saves, records, self.weights_version)
        for release in plan.releases:
            if self.host is not None:
                self.host.used(table.pages(release.slot), int(self._last_steps[release.slot]))
            if table.release(release.slot, release.generation):
                self.blobs.released(release.slot)
                self.guides.released(release.slot)
        for admit in plan.admits:
            is_guided, guide = self._guide_of(admit)
            table.admit(
                admit,
                can_batch=self.runner.can_batch(admit.sampling),
                is_suppressed_by_runner=self.runner.suppresses_rows,
                guide=guide,
                is_uncertain=self.runner.is_asynchronous and (is_guided or self.runner.skips_rows),
            )
            self.runner.admitted(admit)
        if plan.grants:
            self._grant(plan.grants)
        if self.host is not None and plan.loads:
            self.overwritten(np.concatenate([move.device_pages for move in plan.loads]))
            self.host.load(plan.loads, records, self.weights_version, self.event_of)
        for copy in plan.page_copies:
            if self.host is not None:
                self.host.written_beside(as_ints([copy.source_page, copy.target_page]))
            self.runner.copy_page(copy.source_page, copy.target_page, copy.num_tokens)
            records.copy(copy.source_page, copy.target_page, copy.num_tokens)
        if plan.decode_set is not None:
            table.decode_set = plan.decode_set
        return spent_ns

    def overwritten(self, pages: IntArray) -> None:
        """Pages that were granted: what is launched next waits for copies that read them."""
        if self.runner.kv_device is not None:
            self.runner.kv_device.overwritten(pages)

    def event_of(self, step_id: int) -> DeviceEvent:
        """Behind all that steps up to this one do on the device: a step may have no forward, and those before it may
        still run."""
        newest = max((launched for launched in self._launched if launched <= step_id), default=None)
        return DONE if newest is None else self._launched[newest].event

    def _guide_of(self, admit: Admit) -> tuple[bool, Guide | None]:
        """True if a request follows a grammar, and its guide if the step thread reads its masks; where it cannot be
        followed, its slot has failed."""
        blob = self.blobs.admitted(admit)
        if not blob or self._grammars is None:
            return False, None
        try:
            return True, self.guides.admitted(admit, blob, self._grammars, self.runner.mask_sink(admit))
        except MeshError as error:
            self.blobs.fail(admit.slot, admit.generation, error)
            return False, None

    def _with_masks(self, batch: ForwardBatch) -> ForwardBatch:
        """Waits shortly for masks of tokens that are sampled now, fails outputs that cannot go on, and leaves out those
        whose mask is late."""
        guides = self.guides
        sampled = [segment.slot for segment in batch.segments if segment.sample is not None]
        guides.wait(sampled, self.runner.mask_wait_s)
        for slot, error in guides.errors():
            self.blobs.fail(slot, int(self.table.generations[slot]), error)
        return without_late(batch, guides.is_late)

    def _builder(self, plan: StepPlan) -> ResultBuilder:
        return ResultBuilder(plan, self.weights_version, self.blobs.take_errors(), tuple(self.blobs.failed))

    def _grant(self, grants: Sequence[Grant]) -> None:
        slots = np.array([grant.slot for grant in grants])
        counts = np.array([len(grant.pages) for grant in grants])
        pages = np.concatenate([grant.pages for grant in grants])
        if self.host is not None:
            self.host.pool.overwritten(pages)
        self.overwritten(pages)
        self.records.grant(
            pages,
            counts,
            previous_pages=self.table.last_pages(slots),
            namespaces=[self.table.occupant(grant.slot).cache_namespace for grant in grants],
            weights_version=self.weights_version,
        )
        self.table.append_pages(slots, counts, pages)

    def _needs_tokens(self, batch: ForwardBatch) -> bool:
        """True if a segment begins with a token, or is sampled after tokens, that the host does not know yet."""
        slots = [segment.slot for segment in batch.segments]
        return bool((self.table.known_len[slots] < self.table.total_len[slots]).any())

    def _advance(self, batch: ForwardBatch) -> None:
        """Lengths, as the step will leave them."""
        table, rows = self.table, batch.rows
        if not self._is_bounded:
            table.computed_len[rows.slots] = rows.positions + 1
            table.total_len[rows.slots] = rows.positions + 2
        for segment in batch.segments:
            table.computed_len[segment.slot] = segment.start + len(segment.ids)
            if segment.sample is not None:
                table.total_len[segment.slot] = segment.sample.position + 1

    def _settle(
        self,
        step_id: int,
        running: StepHandle[StepOutput],
        batch: ForwardBatch,
        written: Written,
        builder: ResultBuilder,
        followed: threading.Lock | None,
    ) -> StepResult:
        """Tokens and records take in what the step computed; those of slots and pages that moved on do not. followed:
        of a step with masks behind it, as of `SlotGuides.launched`.

        Steps settle in the order of their launches.
        """
        assert next(iter(self._launched)) == step_id, "steps settle in the order of their launches"
        del self._launched[step_id]
        output = running.result()
        self.arriving.settle()
        if followed is not None:
            self.guides.let_follow(followed)
        # A row whose token was not known at the launch computed the one that the step before sampled for its slot. The
        # slot may have moved on since, and its tokens with it: they are taken from where nothing but results are kept.
        if len(written.pages):
            ids = np.where(written.is_known, written.row_ids, self._last_sampled[written.row_slots])
            if batch.segments:
                ids = np.concatenate((*(written.segment_ids or [segment.ids for segment in batch.segments]), ids))
            self.records.extend_if(written.pages, written.page_generations, written.offsets, ids)
        tokens: IntArray | None = None
        if self._is_bounded:
            batch = settle_bounded(batch, output, self.table, self.records, self.limits.page_size)
            tokens = output.tokens
        elif batch.is_certain is not None:
            is_certain, size = batch.is_certain, self.limits.page_size
            batch, tokens = settle_guided(batch, output, ~is_certain, self.table, self.records, size)
            if is_certain.any():
                self._learn_rows(batch, tokens, is_certain)
        else:
            self._learn_rows(batch, output.tokens, None)
        for row, segment, got in zip(batch.segment_rows, batch.segments, output.segments, strict=True):
            if segment.sample is not None:
                assert got.token is not None, f"the runner sampled no token for slot {row.slot}"
                self._learn(row, segment.sample.position, got.token)
        if len(self.guides) and running.tokens is None:
            self.guides.follow(sampled_tokens(batch, output, tokens, self.table))
        return builder.build_forward(batch, output)

    def _learn_rows(self, batch: ForwardBatch, tokens: IntArray, is_certain: BoolArray | None) -> None:
        """is_certain: the rows that are learned; None: all."""
        rows, table = batch.rows, self.table
        slots, positions = rows.slots, rows.positions + 1
        is_same = table.generations[slots] == batch.row_generations
        if is_certain is not None:
            self._last_sampled[slots[is_certain]] = tokens[is_certain]
            is_same &= is_certain
        else:
            self._last_sampled[slots] = tokens
        if not is_same.all():
            slots, positions, tokens = slots[is_same], positions[is_same], tokens[is_same]
        table.tokens[slots, positions] = tokens
        table.known_len[slots] = positions + 1

    def _learn(self, row: Row, position: int, token: int) -> None:
        assert 0 <= token < self.limits.vocab_size, f"the runner sampled {token} for slot {row.slot}"
        self._last_sampled[row.slot] = token
        if self.table.generations[row.slot] == row.generation:
            self.table.tokens[row.slot, position] = token
            self.table.known_len[row.slot] = position + 1
