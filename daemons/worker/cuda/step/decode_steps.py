"""Steps of decodes alone: inputs staged by the host, a captured forward, and samples of all rows in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention, DeviceStep
from radixmesh.daemons.worker.cuda.device import Device, DeviceClock, TimedEvent
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.model.half_batches import HalfBatch, rows_of, take_turns
from radixmesh.daemons.worker.cuda.step.host_step import host_step
from radixmesh.daemons.worker.cuda.step.inputs.decode_buffer import DecodeBuffer
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import NOBODY, Asking, Fetched, TokenRing
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.step_graphs import StepGraphs, sizes_to_compile
from radixmesh.daemons.worker.runner import DecodeRows
from radixmesh.daemons.worker.step_handle import StepHandle
from radixmesh.kernels.rope_kv import KvTarget
from radixmesh.kernels.scatter_embed import scatter_embed

_NO_ENTRIES = np.empty((0, 2), np.int32)


class _Layout(NamedTuple):
    """Of a step: its rows with padding, its variant of attention, whether a graph was captured for it, and whether what
    its forward samples is all that its rows ask for."""

    num_rows: int
    variant: str
    is_captured: bool
    is_done: bool


class SecondHalf(NamedTuple):
    """Steps with room for at least min_rows rows of a rank run as two halves. attention: of the second one."""

    attention: DeviceAttention
    min_rows: int


class DecodeSteps:
    """graph_rows: sizes of the steps that are captured, ascending; others are launched kernel by kernel. use_pdl: the
    first and the last kernels may begin before those ahead of them have ended (Hopper). experts: carries rows to the
    ranks that share the experts: all of them run steps that are captured for the same room, or none does. second: for
    steps that run as two halves; None: none does."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        attention: DeviceAttention,
        slots: SlotState,
        masks: SlotMasks,
        tokens: TokenRing,
        *,
        page_size: int,
        graph_rows: tuple[int, ...],
        use_pdl: bool,
        experts: DeviceDispatch | None = None,
        second: SecondHalf | None = None,
    ) -> None:
        self._device = device
        self._model = model
        self._attention = attention
        self._slots = slots
        self._masks = masks
        self._tokens = tokens
        self._page_size = page_size
        self._use_pdl = use_pdl
        self._experts, self._second = experts, second
        self._buffer = DecodeBuffer(device, max_rows=slots.dummy_slot, dummy_slot=slots.dummy_slot)
        self.graphs = StepGraphs(device, graph_rows)
        self.may_replay = True
        """False: the next step of ranks that share experts is launched kernel by kernel, as on all of them."""
        self._before: _Layout | None = None

    def capture(self, sampler: SlotSampler, sizes: Sequence[int] | None = None, *, is_recorded: bool = True) -> None:
        """Compiles and captures sizes, largest first: smaller graphs reuse its memory. sizes: None for all.
        is_recorded: False runs the steps alone. Where steps were launched before, all of them are over."""
        rows, experts = no_rows(), self._experts
        room = 0 if experts is None else experts.room
        take = self.graphs.capture if is_recorded else self.graphs.run
        self._attention.forget()
        for num_rows in sorted(self.graphs.sizes if sizes is None else sizes, reverse=True):
            self._attention.plan(host_step(rows, (), num_rows))
            if experts is not None:
                experts.room = num_rows
            stage = partial(self._stage, rows, num_rows)
            for variant in ("",) if self.is_cut() else self._attention.variants(num_rows):
                take(num_rows, variant, partial(self._compute, sampler, num_rows, variant), stage)
        if experts is not None:
            experts.room = room
        self._before = None

    def launch_all(self, sampler: SlotSampler) -> None:
        """Launches the kernels of all steps that capture() captures, for compiling."""
        for num_rows in sizes_to_compile(self.graphs.sizes):
            for variant in self._attention.variants(num_rows):
                self._compute(sampler, num_rows, variant)

    def launch(
        self, rows: DecodeRows, sampler: SlotSampler, clock: DeviceClock, num_admissions: int
    ) -> tuple[TimedEvent, TimedEvent, StepHandle[Fetched]]:
        """A step: its start, its end and its tokens. num_admissions: so far, see host_step(). There is at least one
        row, or the experts here compute those of other ranks."""
        num_rows, before, experts = len(rows.slots), self._before, self._experts
        # Lengths on the host are exact, and so is the plan of those of the step before, where attention asks for none.
        if experts is not None or not rows.is_repeat or before is None or self._attention.needs_exact_lengths:
            if experts is None:
                bucket = self.graphs.captured(num_rows)
            else:
                bucket = self.graphs.of_size(experts.room) if self.may_replay else None
            is_cut = self.is_cut()
            # Halves are as long on all ranks.
            least = experts.room if experts is not None and is_cut else 1
            step = host_step(rows, (), bucket or max(num_rows, least), num_admissions)
            variant, is_done = "" if is_cut else self._attention.plan(step), sampler.is_done_unfiltered(rows.slots)
            self._before = before = _Layout(step.num_rows, variant, bucket is not None, is_done)
        num_padded, variant = before.num_rows, before.variant
        self._stage(rows, num_padded)
        start = clock.begin(self._device)
        if before.is_captured:
            logits_TV = self.graphs.replay(num_padded, variant)
        else:
            logits_TV = self._compute(sampler, num_padded, variant)
        asking = NOBODY if before.is_done else self._sample(sampler, logits_TV, rows, num_padded)
        end = clock.end(self._device)
        self._buffer.fence(end)
        return start, end, self._tokens.fetch(num_rows, end, asking)

    def _sample(self, sampler: SlotSampler, logits_TV: torch.Tensor, rows: DecodeRows, num_padded: int) -> Asking:
        """Samples anew where rows have filters, penalties or masks; returns those that ask for logprobs."""
        views = self._buffer.views(num_padded)
        target = self._tokens.target(views.ring_index_1, self._slots.last_tokens)
        return sampler.tokens_of(
            logits_TV, views.slots, views.kv_lens, rows.slots, target, self._tokens.logprobs, is_sampled=True
        )

    def _stage(self, rows: DecodeRows, num_rows: int) -> None:
        """Stages a step's inputs; `num_rows` with padding."""
        if rows.is_repeat and not self._slots.has_new_tokens:
            self._buffer.stage(rows, num_rows, None, _NO_ENTRIES, self._tokens.take())
            return
        entries = self._slots.new_entries(rows.slots, rows.page_tables, rows.num_pages)
        if len(entries) > self._buffer.max_entries:
            self._slots.send_entries(entries)
            entries = entries[:0]
        self._buffer.stage(rows, num_rows, self._slots.row_tokens(rows.slots), entries, self._tokens.take())

    def _compute(self, sampler: SlotSampler, num_rows: int, variant: str) -> torch.Tensor:
        """A step whose inputs are staged, with all rows sampled without filters: its logits. Graphs record it."""
        views, tables = self._buffer.fetch(num_rows), self._slots.page_tables
        self._masks.clamp(views.slots, views.positions, views.kv_lens)
        x_TD = scatter_embed(
            views.slots,
            views.tokens,
            views.entries_E2,
            views.num_entries_1,
            tables,
            self._slots.last_tokens,
            self._model.embedding_VD,
            use_pdl=self._use_pdl,
        )
        if self.is_cut():
            hidden_TD = self._in_halves(x_TD, views.attention(tables))
        else:
            attention = self._attention.begin(views.attention(tables), variant)
            target = KvTarget(views.positions, views.slots, tables, self._page_size)
            hidden_TD = self._model.layers(x_TD, target, attention)
        logits_TV = self._model.logits(hidden_TD)
        # The token of a row is at the position that follows its KV.
        to = self._tokens.target(views.ring_index_1, self._slots.last_tokens)
        sampler.sample_unfiltered(logits_TV, views.slots, views.kv_lens, to, use_pdl=self._use_pdl)
        return logits_TV

    def is_cut(self) -> bool:
        """True if the next step runs as two halves: the same on all ranks, which have agreed on its room."""
        experts, second = self._experts, self._second
        return experts is not None and second is not None and experts.room >= max(2, second.min_rows)

    def _in_halves(self, x_TD: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """As the model's layers."""
        experts, second, num_rows = self._experts, self._second, len(x_TD)
        assert experts is not None and second is not None and num_rows == experts.room, (num_rows, experts)
        cut = -(-num_rows // 2)
        parts = [(0, cut, self._attention), (cut, num_rows, second.attention)]
        halves = []
        for start, end, attention in parts:
            half = rows_of(step, start, end)
            target = KvTarget(half.row_positions, half.row_slots, half.page_tables, self._page_size)
            halves.append(HalfBatch(x_TD[start:end], target, attention.begin(half, "")))

        def begin_turn(index: int) -> None:
            half = halves[index]
            experts.room = len(half.x_TD)
            experts.next_rows(half.target.row_slots_T, self._slots.dummy_slot)

        experts.is_cut = True
        try:
            return torch.cat(take_turns([self._model.stages(half) for half in halves], begin_turn))
        finally:
            experts.room, experts.is_cut = num_rows, False
