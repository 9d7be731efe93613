"""Steps of decodes alone: inputs staged by the host, a captured forward, and greedy samples of all rows in it."""

from __future__ import annotations

from functools import partial

import torch

from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention
from radixmesh.daemons.worker.cuda.device import Device, DeviceClock, TimedEvent
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.step.decode_buffer import DecodeBuffer
from radixmesh.daemons.worker.cuda.step.decode_graphs import DecodeGraphs, sizes_to_compile
from radixmesh.daemons.worker.cuda.step.host_step import host_step
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.cuda.step.slot_masks import SlotMasks
from radixmesh.daemons.worker.cuda.step.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.token_ring import Fetched, TokenRing
from radixmesh.daemons.worker.runner import DecodeRows
from radixmesh.daemons.worker.step_handle import StepHandle
from radixmesh.kernels.rope_kv import KvTarget
from radixmesh.kernels.scatter_embed import scatter_embed


class DecodeSteps:
    """graph_rows: sizes of the steps that are captured, ascending; others are launched kernel by kernel. use_pdl: the
    first and the last kernels may begin before those ahead of them have ended (Hopper)."""

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
    ) -> None:
        self._device = device
        self._model = model
        self._attention = attention
        self._slots = slots
        self._masks = masks
        self._tokens = tokens
        self._page_size = page_size
        self._use_pdl = use_pdl
        self._buffer = DecodeBuffer(device, max_rows=slots.dummy_slot, dummy_slot=slots.dummy_slot)
        self.graphs = DecodeGraphs(device, graph_rows)

    def capture(self, sampler: SlotSampler) -> None:
        """Compiles and captures all sizes, largest first: smaller graphs reuse its memory."""
        rows = no_rows()
        for num_rows in sorted(self.graphs.sizes, reverse=True):
            self._attention.plan(host_step(rows, (), num_rows))
            stage = partial(self._stage, rows, num_rows)
            for variant in self._attention.variants(num_rows):
                self.graphs.capture(num_rows, variant, partial(self._compute, sampler, num_rows, variant), stage)

    def launch_all(self, sampler: SlotSampler) -> None:
        """Launches the kernels of all steps that capture() captures, for compiling."""
        for num_rows in sizes_to_compile(self.graphs.sizes):
            for variant in self._attention.variants(num_rows):
                self._compute(sampler, num_rows, variant)

    def launch(
        self, rows: DecodeRows, sampler: SlotSampler, clock: DeviceClock, num_admissions: int
    ) -> tuple[TimedEvent, TimedEvent, StepHandle[Fetched]]:
        """A step of at least one row: its start, its end and its tokens. num_admissions: so far, see host_step()."""
        num_rows = len(rows.slots)
        bucket = self.graphs.bucket(num_rows)
        step = host_step(rows, (), bucket or num_rows, num_admissions)
        variant = self._attention.plan(step)
        self._stage(rows, step.num_rows)
        start = clock.begin(self._device)
        if bucket is None:
            logits_TV = self._compute(sampler, step.num_rows, variant)
        else:
            logits_TV = self.graphs.replay(step.num_rows, variant)
        views = self._buffer.views(step.num_rows)
        target = self._tokens.target(views.ring_index_1, self._slots.last_tokens)
        logprobs = self._tokens.logprobs
        asking = sampler.tokens_of(
            logits_TV, views.slots, views.kv_lens, rows.slots, target, logprobs, has_highest=True
        )
        end = clock.end(self._device)
        self._buffer.fence(end)
        return start, end, self._tokens.fetch(num_rows, end, asking)

    def _stage(self, rows: DecodeRows, num_rows: int) -> None:
        """Stages a step's inputs; `num_rows` with padding."""
        entries = self._slots.new_entries(rows.slots, rows.page_tables, rows.num_pages)
        if len(entries) > self._buffer.max_entries:
            self._slots.send_entries(entries)
            entries = entries[:0]
        self._buffer.stage(rows, num_rows, self._slots.row_tokens(rows.slots), entries, self._tokens.take())

    def _compute(self, sampler: SlotSampler, num_rows: int, variant: str) -> torch.Tensor:
        """A step whose inputs are staged, with all rows sampled greedily: its logits. Graphs record it."""
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
        attention = self._attention.begin(views.attention(tables), variant)
        target = KvTarget(views.positions, views.slots, tables, self._page_size)
        logits_TV = self._model.logits(self._model.layers(x_TD, target, attention))
        # The token of a row is at the position that follows its KV.
        to = self._tokens.target(views.ring_index_1, self._slots.last_tokens)
        sampler.sample_greedily(logits_TV, views.slots, views.kv_lens, to, use_pdl=self._use_pdl)
        return logits_TV
