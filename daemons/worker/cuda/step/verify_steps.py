"""Steps of decodes that verify drafts: a row computes its last token and up to k drafts, and yields 1 to k + 1 tokens.

    stage     windows of drafts, behind the tokens that the host knows, where the host drafts: some steps late
    graph     fetch -> propose, where the device drafts -> expand by the lengths on the device
              -> forward of all positions -> sample -> accept: lengths, last tokens, counts; what a drafter keeps of a
              lone position is computed on a second stream, beside its logits
    behind    logprobs where a row asks for them; where one has filters, penalties or a grammar, all sample again, and
              are accepted here alone; so are trees, with KV of the accepted path to where its positions lie

A launch from Python takes as long as several kernels of a small model: a step of rows without such options is one
launch, with drafts and without. Else a worker whose drafts do not pay would be slower than one that drafts nothing.

Rows have as many positions each, or as many as was chosen for them, one row's behind the other's (`verify_shapes.py`).

Exact lengths live on the device beside the last tokens, so the next step may be launched before this one has run. What
a position samples is what a decode would sample there, with the noise of its position: drafts change no token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import Admit, TokenLogprobs
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention, DeviceStep, TreeMasks
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.cuda.step.inputs.staging_buffer import StagingBuffer
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import NOBODY, Asking, Fetched, TokenRing
from radixmesh.daemons.worker.cuda.step.sampling.slot_chains import ForcedDrafts, SlotChains
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.step_graphs import StepGraphs
from radixmesh.daemons.worker.cuda.step.verify_shapes import DraftLayout, StepShape, VerifyShapes, first_positions
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.daemons.worker.runner import DecodeRows, RowBounds, SampleInput
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths
from radixmesh.daemons.worker.speculation.drafter import Drafter, DraftRow, NoDrafts, drafts_of
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle
from radixmesh.kernels.rope_kv import KvTarget
from radixmesh.kernels.sampling.draft_trees import TreeRows, branch_rows, move_paths
from radixmesh.kernels.sampling.drafts import (
    DraftInputs,
    DraftRows,
    SlotLengths,
    accept_drafts,
    expand_drafts,
)
from radixmesh.kernels.sampling.sample import TokenTarget

# Steps whose tokens the host does not know yet when it drafts: the windows are that much longer.
_STEPS_AHEAD = 3
# Columns of the staging buffer, before those of the window.
_SLOTS, _MAX_LENS, _TOKENS, _LENGTHS, _STARTS, _COUNTS, _WAITS, _FIRSTS = range(8)
_COLUMNS = 8
LEAST_CHUNKS = 32
"""Rows from which on the positions of a row are one chunk, which reads the KV once. Fewer rows fill the device only if
each position is a decode of its own, whose KV is split."""


class Verifying(NamedTuple):
    """A launched step. firsts: of each row with its padding the first of its positions; None: each has as many.
    chosen: the drafts of its rows, None: none of them has any, or all have. asking: the rows that ask for logprobs;
    positions: the positions of these rows. has_trees: tokens come with the positions that they were sampled at."""

    slots: IntArray
    shape: StepShape
    firsts: IntArray | None
    chosen: RowLengths | None
    asking: Asking
    positions: Asking
    has_trees: bool

    @property
    def num_ints(self) -> int:
        """Of the step in the ring: tokens, counts and numbers of drafts, and of trees the positions."""
        return self.shape.size * (2 if self.has_trees else 1) + 2 * self.shape.num_rows

    @property
    def tokens_at(self) -> IntArray:
        """Of each position of each row its place among the tokens, [rows, positions]; any, where a row has none."""
        shape, count = self.shape, len(self.slots)
        firsts = np.arange(count) * shape.num_positions if self.firsts is None else self.firsts[:count]
        places: IntArray = np.minimum(firsts[:, None] + np.arange(shape.num_positions), shape.size - 1)
        return places


class Yielded(NamedTuple):
    """Tokens of all rows, int32, row after row; counts and num_drafts int32 [rows], None: no row had any; logprobs by
    row."""

    tokens: IntArray
    counts: IntArray
    num_drafts: IntArray | None
    logprobs: Mapping[int, TokenLogprobs]


NO_ROWS = Yielded(empty_ints(), empty_ints(), empty_ints(), {})
_NO_ENTRIES = np.empty((0, 2), np.int32)


class VerifySteps:
    """max_drafts: k. Page tables, last tokens and lengths are those of `slots`, which keeps lengths from now on."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        attention: DeviceAttention,
        slots: SlotState,
        sampler: SlotSampler,
        drafter: Drafter,
        *,
        max_drafts: int,
        page_size: int,
        graph_rows: tuple[int, ...],
        use_pdl: bool,
        lengths: DraftLengths | None = None,
        chains: SlotChains | None = None,
        kv_planes: list[torch.Tensor],
    ) -> None:
        """use_pdl: as of `DecodeSteps`. lengths: says before each step how many drafts its rows have; None: as many as
        there may be. chains: masks of the slots that follow grammars, which are drafted from there; None: none does.
        kv_planes: the pool's, [layers, tokens, ...]."""
        self._device, self._use_pdl = device, use_pdl
        self._model, self._attention, self._sampler = model, attention, sampler
        self._slots, self._drafter, self._on_device = slots, drafter, drafter.on_device()
        # Without the drafts that grammars force: what may keep something of tokens.
        self._follower = self._on_device
        self._chains = chains
        if chains is not None:
            chains.tokens_SL = sampler.tokens_SL
            assert self._on_device is not None or isinstance(drafter, NoDrafts), "drafts of the host have no masks"
            self._on_device = ForcedDrafts(chains, self._on_device, model.vocab_size)
        self._page_size = page_size
        self._num_positions, self._lengths = 1 + max_drafts, lengths
        self._numbers: IntArray = np.arange(1 + max_drafts, dtype=np.int32)
        # The device drafts behind the tokens that it has; it writes where the host's window would be.
        steps_ahead = _STEPS_AHEAD if self._on_device is None else 0
        self._window = max_drafts + steps_ahead * self._num_positions
        slots.keeps_lengths = True
        max_rows = slots.dummy_slot
        self._staging = StagingBuffer(device, max_rows=max_rows, num_columns=_COLUMNS + self._window)
        self.graphs = StepGraphs(device, graph_rows)
        layout = self._layout_of(lengths)
        self.shapes = VerifyShapes(self.graphs.sizes, max_drafts, layout, has_plain=lengths is not None)
        if lengths is not None and (layout is not DraftLayout.RAGGED or self.graphs.sizes):
            lengths.use_sizes(self.shapes.sizes, is_even=layout is not DraftLayout.RAGGED)
        # Of trees: the parents of drafts, what they are to attention, and what moves with the KV of the accepted path.
        self._has_trees = self._follower is not None and self._follower.has_trees
        self._parents_WB: torch.Tensor | None = None
        if self._has_trees:
            assert self._follower is not None
            where = device.torch_device
            self._parents_WB = torch.zeros(max_drafts, max_rows, dtype=torch.int32, device=where)
            self._trees = TreeRows.allocate(max_rows, 1 + max_drafts, where)
            self._moved = [*kv_planes, *self._follower.kept_planes()]
            attention.reserve_trees(max_rows, 1 + max_drafts)
        # A row of the ring holds the tokens of all positions, then the counts of all rows, then their drafts' number,
        # and of trees the positions of the tokens.
        size = self._num_positions * (2 if self._has_trees else 1) + 2
        self._ring = TokenRing(device, max_rows=max_rows * size)
        self._rows = DraftRows.allocate(max_rows, 1 + max_drafts, device.torch_device)
        self._sampled_1T = torch.zeros_like(self._rows.tokens)[None]
        self._zero_1 = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        # Rows of one slot all sample: none of their tokens is the slot's last one before it is accepted.
        self._no_last_S = torch.zeros_like(slots.last_tokens)
        self._state = SlotLengths(slots.last_tokens, slots.lengths, slots.page_tables, sampler.tokens_SL)
        self._firsts_before: tuple[StepShape, RowLengths | None, IntArray] | None = None
        self._captured = frozenset(self.shapes.captured)
        self._admits: dict[int, Admit] = {}
        # Of the rows of the step before, which those of the next one often are.
        self._is_unfiltered, self._asking = True, NOBODY
        # By the number of rows, where all drafts of each are in every step.
        self._whole_shapes: dict[int, StepShape] = {}
        # Views of a step's memory by its shape: to make them takes longer than to launch a graph.
        self._inputs_of: dict[StepShape, tuple[DraftInputs, torch.Tensor]] = {}
        self._drafted_of: dict[StepShape, DraftRows] = {}
        if self._follower is not None:
            self._follower.begin(self._state, sampler, max_rows=max_rows, max_drafts=max_drafts)

    def capture(self, dtype: torch.dtype) -> None:
        """Compiles and captures, largest first: smaller graphs reuse its memory. dtype: of logits."""
        if self._chains is not None:
            self._chains.warm_up(dtype, self._model.vocab_size, self._sampler.tokens_SL)
        for num_positions in sorted({shape.num_positions for shape in self._warm_shapes()}, reverse=True):
            shapes = [shape for shape in self.shapes.captured if shape.num_positions == num_positions]
            for shape in sorted(shapes, key=lambda shape: shape.size, reverse=True):
                stage = partial(self._stage, None, shape)
                self.graphs.capture(shape.num_rows, shape.variant, partial(self._forward, shape), stage)
            self._warm_up(shapes or [shape for shape in self._warm_shapes() if shape.num_positions == num_positions])
        if self._has_trees:
            self._sampler.warm_up_branches(dtype, self._trees.of(1).branches)
        if self._follower is not None:
            self._follower.warm_up(is_captured=bool(self.graphs.sizes))

    def _layout_of(self, lengths: DraftLengths | None) -> DraftLayout:
        if lengths is None or lengths.is_whole or (self._follower is not None and self._follower.has_trees):
            return DraftLayout.WHOLE
        return DraftLayout.EVEN if self._follower is not None and self._follower.has_levels else DraftLayout.RAGGED

    def _warm_shapes(self) -> list[StepShape]:
        """Those that are captured; where none is, one of each kind."""
        if self.shapes.captured:
            return self.shapes.captured
        num_drafts = [*self.shapes.num_drafts, *([] if self._lengths is None else [0])]
        return [StepShape.even(1, 1 + number) for number in num_drafts]

    def _warm_up(self, shapes: list[StepShape]) -> None:
        """Compiles what follows the forward, and has graphs run once: else the first step that drafts looks as if
        drafts were slow."""
        for shape in shapes:
            self._stage(None, shape)
            if self.graphs.sizes:
                self.graphs.replay(shape.num_rows, shape.variant)
            else:
                self._forward(shape)
            self._staging.fence(self._device.record_event())
        shape = min(shapes, key=lambda shape: shape.size)
        masks = (None,) if self._chains is None else (None, self._chains.taken(shape.size))
        for taken_T in masks:
            self._accept(shape, taken_T)

    def admitted(self, admit: Admit) -> None:
        """A request took a slot: what is drafted for it."""
        self._admits[admit.slot] = admit
        if self._follower is not None:
            self._follower.admitted(admit)
        if self._lengths is not None:
            self._lengths.admitted(admit.slot, is_sampled=not admit.sampling.is_greedy)

    def launch(self, rows: DecodeRows, *, is_alone: bool) -> Verifying:
        """Launches the decodes of a step; pages, last tokens and lengths that are new come with it. is_alone: the step
        has no chunks."""
        num_rows, chosen = len(rows.slots), None
        if self._lengths is not None:
            chosen = self._lengths.choose(rows.slots, is_alone=is_alone)
            shape = self.shapes.of(num_rows, chosen)
        else:
            if num_rows not in self._whole_shapes:
                all_drafts = RowLengths.even(num_rows, self._num_positions - 1)
                self._whole_shapes[num_rows] = self.shapes.of(num_rows, all_drafts)
            shape = self._whole_shapes[num_rows]
        has_drafts = shape.num_positions > 1
        if self._follower is not None:
            self._follower.launching(rows.slots, has_drafts=has_drafts)
        is_guided = self._chains is not None and self._chains.is_guided(rows.slots)
        if not rows.is_repeat:
            self._is_unfiltered = self._sampler.is_unfiltered(rows.slots)
            self._asking = self._sampler.asking(rows.slots)
        waits, asking = is_guided or not self._is_unfiltered, self._asking
        firsts = self._firsts(shape, num_rows, chosen)
        self._stage(rows, shape, chosen, waits=waits)
        if shape in self._captured:
            logits_TV = self.graphs.replay(shape.num_rows, shape.variant)
        else:
            logits_TV = self._forward(shape)
        has_trees = self._has_trees and has_drafts
        verifying = Verifying(rows.slots, shape, firsts, chosen, asking, NOBODY, has_trees)
        if asking.rows:
            verifying = verifying._replace(positions=_positions_of(asking, verifying))
        if waits or asking.rows or has_trees:
            self._finish(logits_TV, verifying, is_guided=is_guided, waits=waits)
        return verifying

    def _finish(self, logits_TV: torch.Tensor, verifying: Verifying, *, is_guided: bool, waits: bool) -> None:
        """The rest of a step, behind its graph: rows that sample again, trees, logprobs of positions that ask."""
        shape, positions, has_trees = verifying.shape, verifying.positions, verifying.has_trees
        drafted, target = self._drafted(shape), self._target(shape)
        as_they_were_TV, taken_T = logits_TV, None
        if is_guided:
            assert self._chains is not None
            if positions.rows:
                as_they_were_TV = logits_TV.clone()
            self._chains.apply(logits_TV, drafted.slots, drafted.kv_lens)
        if waits:
            branches = self._trees.of(shape.num_rows).branches if has_trees else None
            self._sampler.sample(
                *(logits_TV, drafted.slots, drafted.kv_lens, verifying.slots, target),
                has_highest=not is_guided,
                branches=branches,
            )
        if is_guided:
            assert self._chains is not None
            self._chains.settle(drafted.slots, drafted.kv_lens, target, self._sampler.tokens_SL)
            taken_T = self._chains.taken(len(drafted.slots))
        if positions.rows:
            # Read at the ring's index as tokens of a ring are: every row of it is the same memory.
            tokens_RT = target.ring_RT.expand(len(self._ring.rows), -1)
            index_1 = self._staging.ring_index_1
            to = TokenTarget(ring_RT=tokens_RT, ring_index_1=index_1, last_tokens_S=self._no_last_S)
            self._sampler.logprobs(as_they_were_TV, drafted.slots, to, self._ring.logprobs, positions)
        if waits or has_trees:
            self._accept(shape, taken_T)

    def fetch(self, verifying: Verifying, done: DeviceEvent) -> StepHandle[Fetched]:
        """Sampled tokens of all positions, then counts and numbers of drafts, and of trees the positions of the tokens;
        logprobs by position."""
        self._staging.fence(done)
        return self._ring.fetch(verifying.num_ints, done, verifying.positions)

    def tokens_of(self, verifying: Verifying, ints: IntArray) -> IntArray:
        """Of each row, int32 [rows, positions], those that it yielded first and then -1. ints: as fetched."""
        count, shape = len(verifying.slots), verifying.shape
        counts = ints[shape.size : shape.size + count]
        is_yielded = np.arange(shape.num_positions) < counts[:, None]
        return np.where(is_yielded, ints[verifying.tokens_at], np.int32(-1))

    def yielded(self, verifying: Verifying, fetched: Fetched) -> Yielded:
        """Outcome of the rows."""
        count, shape, got = len(verifying.slots), verifying.shape, fetched.tokens
        size, width = shape.size, shape.num_positions
        if width == 1 and not verifying.asking.rows:
            tokens, counts = got[:count], got[size : size + count]
            return Yielded(tokens if counts.all() else tokens[counts > 0], counts, None, {})
        drafted = size + shape.num_rows
        counts, num_drafts = got[size : size + count], got[drafted : drafted + count]
        if count == 1:
            first = 0 if verifying.firsts is None else int(verifying.firsts[0])
            tokens = got[first : first + int(counts[0])]
        elif verifying.firsts is None:
            tokens = got[: count * width].reshape(count, width)[self._numbers[:width] < counts[:, None]]
        else:
            ends = np.cumsum(counts)
            firsts = np.repeat(verifying.firsts[:count] - ends + counts, counts)
            tokens = got[firsts + np.arange(len(firsts))]
        logprobs = self._logprobs(verifying, fetched, counts) if verifying.asking.rows else {}
        return Yielded(tokens, counts, num_drafts, logprobs)

    def _logprobs(self, verifying: Verifying, fetched: Fetched, counts: IntArray) -> dict[int, TokenLogprobs]:
        """Of the tokens that the rows yielded, by row, of those that ask."""
        count, shape, at = len(counts), verifying.shape, verifying.tokens_at
        places: IntArray = np.broadcast_to(self._numbers[: shape.num_positions], (count, shape.num_positions))
        if verifying.has_trees:
            places = fetched.tokens[shape.size + 2 * shape.num_rows :][: places.size].reshape(places.shape)
        return {
            row: _joined([fetched.logprobs[int(at[row, 0]) + number] for number in places[row, : counts[row]].tolist()])
            for row in verifying.asking.rows
            if counts[row]
        }

    def observe(self, verifying: Verifying, got: Yielded, times: tuple[int, int] | None) -> None:
        """The step ran between these times; None: chunks were in it too."""
        if self._follower is not None and got.num_drafts is not None and verifying.shape.num_positions > 1:
            self._follower.launched(verifying.slots, got.counts, got.num_drafts)
        if self._lengths is not None:
            self._lengths.observe(verifying.slots, got.counts, verifying.chosen, times, got.num_drafts)

    def _stage(
        self, rows: DecodeRows | None, shape: StepShape, chosen: RowLengths | None = None, *, waits: bool = False
    ) -> None:
        """Fills the next staging slot. rows: None: of padding alone. chosen: their drafts, None: as many as the shape
        has. waits: what the graph samples is not accepted there."""
        count, num_rows, most = 0 if rows is None else len(rows.slots), shape.num_rows, shape.num_positions - 1
        entries = _NO_ENTRIES
        if rows is not None and not rows.is_repeat:
            entries = self._slots.new_entries(rows.slots, rows.page_tables, rows.num_pages)
            if len(entries) > self._staging.max_entries:
                self._slots.send_entries(entries)
                entries = entries[:0]
        columns = self._staging.stage(num_rows, entries, self._ring.take())
        columns[_TOKENS:_STARTS] = -1
        columns[_STARTS:_WAITS] = 0
        columns[_WAITS] = waits
        columns[_SLOTS, count:], columns[_MAX_LENS, count:] = self._slots.dummy_slot, 0
        if (firsts := self._firsts(shape, count, chosen)) is not None:
            columns[_FIRSTS, :num_rows] = firsts
        if rows is None:
            return
        assert rows.bounds is not None, "a row that verifies drafts has bounds"
        columns[_SLOTS, :count], columns[_MAX_LENS, :count] = rows.slots, rows.bounds.max_lens
        if self._slots.has_new_tokens:
            columns[_TOKENS, :count], columns[_LENGTHS, :count] = self._slots.row_states(rows.slots)
        if not most:
            return
        by_row = None if chosen is None else chosen.by_row
        if self._on_device is not None:
            columns[_STARTS, :count], columns[_COUNTS, :count] = -1, most if by_row is None else by_row
            return
        columns[_STARTS, :count] = rows.bounds.known_lens
        drafting = range(count) if by_row is None else np.flatnonzero(by_row).tolist()
        wanted = [self._draft_row(int(rows.slots[row]), row, rows.bounds) for row in drafting]
        for row, drafts in zip(drafting, drafts_of(self._drafter, wanted, self._model.vocab_size), strict=True):
            columns[_COUNTS, row] = len(drafts)
            columns[_COLUMNS : _COLUMNS + len(drafts), row] = drafts

    def _firsts(self, shape: StepShape, num_rows: int, chosen: RowLengths | None) -> IntArray | None:
        """As of Verifying. Steps of the same rows often have the same drafts."""
        if not self._is_ragged(shape):
            return None
        if self._firsts_before is None or self._firsts_before[0] != shape or self._firsts_before[1] is not chosen:
            num_drafts = shape.num_positions - 1 if chosen is None else chosen.by_row
            self._firsts_before = shape, chosen, first_positions(shape, num_rows, num_drafts)
        return self._firsts_before[2]

    def _is_ragged(self, shape: StepShape) -> bool:
        return self.shapes.layout is DraftLayout.RAGGED and shape.num_positions > 1

    def _draft_row(self, slot: int, row: int, bounds: RowBounds) -> DraftRow:
        """Behind the tokens that the host knows: the device takes those at its own positions."""
        admit, length = self._admits[slot], int(bounds.known_lens[row])
        sample = SampleInput(
            sampling=admit.sampling,
            prompt_ids=admit.prompt_ids,
            output_ids=bounds.tokens[slot, len(admit.prompt_ids) : length],
            position=length,
        )
        return DraftRow(sample=sample, most=self._window)

    def _inputs(self, shape: StepShape) -> tuple[DraftInputs, torch.Tensor]:
        """Of a step of that shape, and which of its rows wait for another sampling: the same memory for every one."""
        if shape not in self._inputs_of:
            num_rows, staging = shape.num_rows, self._staging
            columns = staging.columns(num_rows)
            slots, max_lens, tokens, lengths, starts, counts, waits, firsts = (
                column[:num_rows] for column in columns[:_COLUMNS]
            )
            # The device drafts as many as there are rows of the window.
            most = self._window if self._on_device is None else max(1, shape.num_positions - 1)
            inputs = DraftInputs(
                slots=slots,
                max_lens=max_lens,
                tokens=tokens,
                lengths=lengths,
                starts=starts,
                counts=counts,
                window_WB=columns[_COLUMNS : _COLUMNS + most],
                entries_E2=staging.entries_E2(num_rows),
                num_entries_1=staging.num_entries_1,
                parents_WB=self._parents_WB,
                firsts=firsts if self._is_ragged(shape) else None,
            )
            self._inputs_of[shape] = inputs, waits
        return self._inputs_of[shape]

    def _drafted(self, shape: StepShape) -> DraftRows:
        if shape not in self._drafted_of:
            self._drafted_of[shape] = self._rows.of(shape.num_rows, shape.size)
        return self._drafted_of[shape]

    def _accept(self, shape: StepShape, taken_T: torch.Tensor | None, waits_B: torch.Tensor | None = None) -> None:
        """Advances the slots by what was sampled. taken_T: masks of the positions. waits_B: rows that do not advance
        yet."""
        (inputs, _), sampled_T = self._inputs(shape), self._target(shape).ring_RT[0]
        to = sampled_T, inputs.slots, self._drafted(shape), self._state, self._ring.rows
        if not self._has_trees or shape.num_positions == 1:
            most = None if inputs.firsts is None else shape.num_positions
            index_1, firsts_B = self._staging.ring_index_1, inputs.firsts
            accept_drafts(*to, index_1, taken_T, waits_B=waits_B, firsts_B=firsts_B, num_positions=most)
            return
        trees = self._trees.of(shape.num_rows)
        accept_drafts(*to, self._staging.ring_index_1, taken_T, inputs.parents_WB, trees.paths_BP)
        move_paths(self._moved, trees)

    def _target(self, shape: StepShape) -> TokenTarget:
        sampled_1T = self._sampled_1T[:, : shape.size]
        return TokenTarget(ring_RT=sampled_1T, ring_index_1=self._zero_1, last_tokens_S=self._no_last_S)

    def _forward(self, shape: StepShape) -> torch.Tensor:
        """A step whose inputs are staged, all positions sampled without filters: their logits. Graphs record it."""
        num_rows, has_drafts = shape.num_rows, shape.num_positions > 1
        self._staging.fetch(num_rows)
        rows = self._drafted(shape)
        inputs, waits_B = self._inputs(shape)
        if self._on_device is not None and has_drafts:
            self._on_device.propose(inputs, self._state)
        expand_drafts(inputs, self._state, rows, None if inputs.firsts is None else shape.num_positions)
        tables, nothing = self._slots.page_tables, rows.slots[:0]
        trees: TreeRows | None = None
        if self._has_trees and has_drafts:
            trees = self._trees.of(num_rows)
            branch_rows(inputs, self._state, rows, trees, self._page_size)
        is_chunked = has_drafts and shape.size >= LEAST_CHUNKS * shape.num_positions and trees is None
        step = DeviceStep(
            page_tables=tables,
            row_slots=rows.slots,
            row_positions=rows.positions,
            decode_slots=nothing if is_chunked else rows.slots,
            decode_kv_lens=nothing if is_chunked else rows.kv_lens,
            chunk_slots=rows.chunk_slots if is_chunked else nothing,
            chunk_row_starts=rows.chunk_row_starts if is_chunked else nothing,
            chunk_kv_lens=rows.chunk_kv_lens if is_chunked else nothing,
            max_chunk_len=shape.num_positions if is_chunked else 0,
            tails=None if trees is None else trees.tails,
            masks=None if trees is None else TreeMasks(inputs.slots, trees.prefix_lens_B, trees.masks_T),
            is_from_host=False,
        )
        tokens_T = None if trees is None else trees.tokens_T
        target = KvTarget(rows.positions, rows.slots, tables, self._page_size, tokens_T)
        follower = self._follower
        states = HiddenStates(follower.hidden_layers) if follower is not None and follower.hidden_layers else None
        attention = self._attention.begin(step, "")
        hidden_TD = self._model.layers(self._model.embed(rows.tokens), target, attention, states)
        states = states or HiddenStates(())
        join: Callable[[], None] | None = None
        if follower is not None:
            # A lone position's GEMMs are GEMVs, without a workspace: of a small model, what is kept of it takes as long
            # as several layers.
            if shape.size == 1:
                join = self._device.fork(partial(follower.computed, rows, states, trees))
            else:
                follower.computed(rows, states, trees)
        logits_TV = self._model.logits(hidden_TD)
        self._sampler.sample_unfiltered(logits_TV, rows.slots, rows.kv_lens, self._target(shape), use_pdl=self._use_pdl)
        if join is not None:
            join()
        if trees is None:
            self._accept(shape, None, waits_B)
        return logits_TV


def _positions_of(asking: Asking, verifying: Verifying) -> Asking:
    width, firsts = verifying.shape.num_positions, verifying.firsts
    if firsts is None:
        ranges = [range(row * width, row * width + width) for row in asking.rows]
    else:
        ends = [*firsts[1:].tolist(), verifying.shape.size]
        ranges = [range(int(firsts[row]), ends[row]) for row in asking.rows]
    num_top = [num_top for num_top, of_row in zip(asking.num_top, ranges, strict=True) for _ in of_row]
    return Asking([position for of_row in ranges for position in of_row], num_top)


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(
        own=np.concatenate([part.own for part in parts]),
        num_top=parts[0].num_top,
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )
