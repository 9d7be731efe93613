"""Forwards of steps with chunks in them, beside decodes or alone.

A step of few rows is launched faster than it runs only as a graph. Since all that tells one mix of decodes and chunks
from another is read on the device, a graph for a number of rows serves any of them, with rows of padding at the end:
how many chunks there are, how long, behind which prefix, and how many decodes. Larger steps take the device longer
than the host, which launches them kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.drafting.device_network import DeviceNetwork
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.step.host_step import host_step
from radixmesh.daemons.worker.cuda.step.inputs.prompt_arrays import PromptBuffer, PromptShape, PromptViews, SampledRows
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.step_graphs import StepGraphs, sizes_to_compile
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.daemons.worker.runner import DecodeRows, Segment
from radixmesh.kernels.rope_kv import KvTarget

# A graph's grids have room for so many chunks at least; a larger one has for chunks of `_LEAST_CHUNK` rows each.
_LEAST_CHUNKS = 16
_LEAST_CHUNK = 16
# Rows of captured steps: GEMMs are computed in tiles of 64 rows and more.
_ROWS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896)
_MOST_ROWS = 1024
# Prompts that are launched kernel by kernel once before anybody asks: kernels are chosen by the longest chunk, and
# libraries load theirs when they first take them.
WARM_LENGTHS = (1, 17, 100, 128, 1000, 1100, 1536, 2048, 3000, 4096, 6000, 8191)


@dataclass(frozen=True, slots=True)
class PromptForward:
    """hidden_TD: rows as the step has them, decodes first; `is_overwritten` by the next step's. chunk_ends: the row
    after the last one of each chunk. sampled: the rows that tokens are sampled from."""

    hidden_TD: torch.Tensor
    is_overwritten: bool
    chunk_ends: IntArray
    sampled: SampledRows


class PromptSteps:
    """sizes: rows of the steps that are captured, ascending, none where nothing is."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        attention: DeviceAttention,
        slots: SlotState,
        masks: SlotMasks,
        *,
        page_size: int,
        max_tokens: int,
        max_total_len: int,
        sizes: tuple[int, ...],
        network: DeviceNetwork | None = None,
    ) -> None:
        """network: drafts, and follows what chunks compute; None: none does."""
        self._model, self._network = model, network
        self._attention = attention
        self._slots, self._masks = slots, masks
        self._page_size = page_size
        self._max_tokens = max_tokens
        self._max_total_len = max_total_len
        self._max_decodes = slots.dummy_slot
        self._graphs = StepGraphs(device, sizes if attention.captures_chunks else ())
        self.buffer = PromptBuffer(
            device, max_slots=self._max_decodes, max_rows=max(max_tokens, *sizes, 0), dummy_slot=slots.dummy_slot
        )

    def capture(self, *, is_recorded: bool = True) -> None:
        """Compiles and captures, largest first: smaller graphs reuse its memory. is_recorded: False runs them alone."""
        take = self._graphs.capture if is_recorded else self._graphs.run
        self._attention.forget()
        for size, variant, work in self._captured(self._graphs.sizes):
            take(size, variant, work)

    def drop(self) -> None:
        """Forgets what `capture` has made."""
        self._graphs.drop()

    def launch_all(self) -> None:
        """Launches what `capture` captures, kernel by kernel, and what `warm_up` runs: for compiling."""
        for _, _, work in self._captured(sizes_to_compile(self._graphs.sizes)):
            work()
        self.warm_up()

    def _captured(self, sizes: Sequence[int]) -> Iterator[tuple[int, str, Callable[[], torch.Tensor]]]:
        """Rows, variant and work of each graph, whose inputs have been sent when it comes."""
        for size in sorted(sizes, reverse=True):
            shape, rows = self.shape_of(size), no_rows()
            step = host_step(rows, (), shape.num_decodes)
            self._attention.plan(step)
            self.buffer.upload(shape, step, rows, ())
            views = self.buffer.views(shape)
            for variant in self._attention.variants(shape.num_decodes):
                yield size, variant, partial(self._run, views, size, variant)

    def warm_up(self) -> None:
        """Runs chunks of the dummy slot, whose KV goes to the dummy page, that are not captured."""
        most = min(self._max_tokens, self._max_total_len - 1)
        for length in sorted({min(length, most) for length in WARM_LENGTHS}):
            segment = Segment(
                slot=self._slots.dummy_slot, ids=np.zeros(length, np.int32), start=0, pages=np.zeros(0, np.int32)
            )
            self.forward(no_rows(), (segment,), is_captured=False)

    def forward(
        self,
        rows: DecodeRows,
        segments: Sequence[Segment],
        sampled: Sequence[int] = (),
        *,
        ring_index: int = 0,
        admissions: int = 0,
        is_captured: bool = True,
    ) -> PromptForward:
        """Launches or replays a step; page tables are on the device. sampled: indexes of the segments whose
        tokens are sampled behind it, into row `ring_index` of the token ring.

        is_captured: False has it launched kernel by kernel.
        """
        num_decodes, num_chunks = len(rows.slots), len(segments)
        num_rows = num_decodes + sum(len(segment.ids) for segment in segments)
        size = self._bucket(num_rows, num_chunks) if is_captured else None
        shape = PromptShape(num_rows, num_decodes, num_chunks) if size is None else self.shape_of(size)
        step = host_step(rows, segments, shape.num_decodes, admissions)
        variant = self._attention.plan(step)
        sampled_rows = self.buffer.upload(shape, step, rows, segments, sampled, ring_index)
        if size is None:
            hidden_TD = self._run(self.buffer.views(shape), int(step.chunk_lens.max()), variant)
        else:
            hidden_TD = self._graphs.replay(size, variant)
        chunk_ends = num_decodes + np.cumsum(step.chunk_lens)
        return PromptForward(hidden_TD, size is not None, chunk_ends, sampled_rows)

    def _run(self, views: PromptViews, max_chunk_len: int, variant: str) -> torch.Tensor:
        """Hidden states of all rows, [T, D]. What a graph records."""
        tables = self._slots.page_tables
        views.clamp(self._masks)
        target = KvTarget(views.positions, views.slots, tables, self._page_size)
        step, ids_T, network = views.attention(tables, max_chunk_len), views.ids(self._slots.last_tokens), self._network
        attention = self._attention.begin(step, variant)
        if network is None:
            return self._model.layers(self._model.embed(ids_T), target, attention)
        states = HiddenStates(network.hidden_layers)
        shown = states if network.hidden_layers else None
        hidden_TD = self._model.layers(self._model.embed(ids_T), target, attention, shown)
        network.computed_chunks(ids_T, views.positions, step, states)
        return hidden_TD

    def _bucket(self, num_rows: int, num_chunks: int) -> int | None:
        """Rows of the captured graph for a step, None if there is none. One chunk more may be of padding."""
        sizes = (size for size in self._graphs.sizes if self._graphs.of_size(size))
        return next((size for size in sizes if size >= num_rows and self.shape_of(size).num_chunks > num_chunks), None)

    def shape_of(self, size: int) -> PromptShape:
        return PromptShape(size, min(size, self._max_decodes), max(_LEAST_CHUNKS, size // _LEAST_CHUNK))


def default_prompt_rows(max_tokens: int) -> tuple[int, ...]:
    """Sizes up to max_tokens: close where a row of padding costs much. Larger steps take the device longer than the
    host takes to launch them."""
    most = min(max_tokens, _MOST_ROWS)
    sizes = {*_ROWS, most}
    return tuple(sorted(size for size in sizes if size <= most))


def no_rows() -> DecodeRows:
    none = np.zeros(0, np.int32)
    return DecodeRows(
        slots=none,
        ids=none,
        positions=none,
        page_tables=none.reshape(0, 0),
        num_pages=none,
        seeds=none.astype(np.uint64),
        is_sampled=none.astype(np.bool_),
    )
