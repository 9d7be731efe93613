"""Steps of decodes that verify drafts: a row computes its last token and up to k drafts, and yields 1 to k + 1 tokens.

    stage     windows of drafts, behind the tokens that the host knows, where the host drafts: some steps late
    graph     fetch -> propose, where the device drafts -> expand by the lengths on the device
              -> forward of B x (k + 1) positions -> sample -> accept: lengths, last tokens, counts
    behind    logprobs where a row asks for them; where one has filters, penalties or a grammar, all sample again, and
              are accepted here alone; so are trees, with KV of the accepted path to where its positions lie

A launch from Python takes as long as several kernels of a small model: a step of rows without such options is one
launch, with drafts and without. Else a worker whose drafts do not pay would be slower than one that drafts nothing.

Exact lengths live on the device beside the last tokens, so the next step may be launched before this one has run. What
a position samples is what a decode would sample there, with the noise of its position: drafts change no token.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.daemons.worker.runner import DecodeRows, RowBounds, SampleInput
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
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
_COLUMNS = 7
LEAST_CHUNKS = 32
"""Rows from which on the positions of a row are one chunk, which reads the KV once. Fewer rows fill the device only if
each position is a decode of its own, whose KV is split."""


class Verifying(NamedTuple):
    """A launched step. padded: its rows and those of padding. num_positions: of a row. asking: the rows that ask for
    logprobs; positions: the positions of these rows. has_trees: tokens come with the positions that they were sampled
    at."""

    slots: IntArray
    padded: int
    num_positions: int
    asking: Asking
    positions: Asking
    has_trees: bool

    @property
    def num_ints(self) -> int:
        """Of the step in the ring: tokens, counts and numbers of drafts, and of trees the positions."""
        return self.padded * (self.num_positions * (2 if self.has_trees else 1) + 2)


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
        lengths: DraftLengths | None = None,
        chains: SlotChains | None = None,
        kv_planes: list[torch.Tensor],
    ) -> None:
        """lengths: says before each step whether it drafts; None: all do. chains: masks of the slots that follow
        grammars, which are drafted from there; None: none does. kv_planes: the pool's, [layers, tokens, ...]."""
        self._device = device
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
        # The device drafts behind the tokens that it has; it writes where the host's window would be.
        steps_ahead = _STEPS_AHEAD if self._on_device is None else 0
        self._window = max_drafts + steps_ahead * self._num_positions
        slots.keeps_lengths = True
        max_rows = slots.dummy_slot
        self._staging = StagingBuffer(device, max_rows=max_rows, num_columns=_COLUMNS + self._window)
        self.graphs = StepGraphs(device, graph_rows)
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
        widths = {1 + max_drafts} if lengths is None else {1, 1 + max_drafts}
        self._rows = {width: DraftRows.allocate(max_rows, width, device.torch_device) for width in widths}
        self._sampled_1T = torch.zeros_like(self._rows[1 + max_drafts].tokens)[None]
        self._zero_1 = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        # Rows of one slot all sample: none of their tokens is the slot's last one before it is accepted.
        self._no_last_S = torch.zeros_like(slots.last_tokens)
        self._state = SlotLengths(slots.last_tokens, slots.lengths, slots.page_tables, sampler.tokens_SL)
        self._admits: dict[int, Admit] = {}
        # Views of a step's memory by its rows, and its width: to make them takes longer than to launch a graph.
        self._inputs_of: dict[int, tuple[DraftInputs, torch.Tensor]] = {}
        self._drafted_of: dict[tuple[int, int], DraftRows] = {}
        if self._follower is not None:
            self._follower.begin(self._state, sampler, max_rows=max_rows, max_drafts=max_drafts)

    def capture(self, dtype: torch.dtype) -> None:
        """Compiles and captures, largest first: smaller graphs reuse its memory. dtype: of logits."""
        if self._chains is not None:
            self._chains.warm_up(dtype, self._model.vocab_size, self._sampler.tokens_SL)
        for width in sorted(self._rows, reverse=True):
            for num_rows in sorted(self.graphs.sizes, reverse=True):
                stage = partial(self._stage, None, num_rows, width)
                self.graphs.capture(num_rows, str(width), partial(self._forward, num_rows, width), stage)
            self._warm_up(width)
        if self._has_trees:
            self._sampler.warm_up_branches(dtype, self._trees.of(1).branches)
        if self._follower is not None:
            self._follower.warm_up()

    def _warm_up(self, width: int) -> None:
        """Compiles what follows the forward, and has graphs run once: else the first step that drafts looks as if
        drafts were slow."""
        for num_rows in self.graphs.sizes:
            self._stage(None, num_rows, width)
            self.graphs.replay(num_rows, str(width))
            self._staging.fence(self._device.record_event())
        num_rows = min(self.graphs.sizes, default=1)
        if not self.graphs.sizes:
            self._stage(None, num_rows, width)
            self._forward(num_rows, width)
        rows = self._drafted(num_rows, width)
        masks = (None,) if self._chains is None else (None, self._chains.taken(len(rows.slots)))
        for taken_T in masks:
            self._accept(num_rows, width, taken_T)

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
        num_rows = len(rows.slots)
        bucket = self.graphs.bucket(num_rows)
        padded, lengths = bucket or num_rows, self._lengths
        width = self._num_positions if lengths is None else 1 + lengths.choose(rows.slots, is_alone=is_alone)
        if self._follower is not None:
            self._follower.launching(rows.slots, has_drafts=width > 1)
        is_guided = self._chains is not None and self._chains.is_guided(rows.slots)
        waits = is_guided or not self._sampler.is_unfiltered(rows.slots)
        self._stage(rows, padded, width, waits=waits)
        logits_TV = self._forward(padded, width) if bucket is None else self.graphs.replay(bucket, str(width))
        asking = self._sampler.asking(rows.slots)
        positions = _positions_of(asking, width) if asking.rows else NOBODY
        has_trees = self._has_trees and width > 1
        if waits or asking.rows or has_trees:
            self._finish(logits_TV, rows.slots, padded, width, positions, is_guided=is_guided, waits=waits)
        return Verifying(rows.slots, padded, width, asking, positions, has_trees)

    def _finish(
        self,
        logits_TV: torch.Tensor,
        host_slots: IntArray,
        padded: int,
        width: int,
        positions: Asking,
        *,
        is_guided: bool,
        waits: bool,
    ) -> None:
        """The rest of a step, behind its graph: rows that sample again, trees, logprobs of positions that ask."""
        drafted, target = self._drafted(padded, width), self._target(padded, width)
        has_trees = self._has_trees and width > 1
        as_they_were_TV, taken_T = logits_TV, None
        if is_guided:
            assert self._chains is not None
            if positions.rows:
                as_they_were_TV = logits_TV.clone()
            self._chains.apply(logits_TV, drafted.slots, drafted.kv_lens)
        if waits:
            branches = self._trees.of(padded).branches if has_trees else None
            self._sampler.sample(
                *(logits_TV, drafted.slots, drafted.kv_lens, host_slots, target),
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
            self._accept(padded, width, taken_T)

    def fetch(self, verifying: Verifying, done: DeviceEvent) -> StepHandle[Fetched]:
        """Sampled tokens of all positions, then counts and numbers of drafts, and of trees the positions of the tokens;
        logprobs by position."""
        self._staging.fence(done)
        return self._ring.fetch(verifying.num_ints, done, verifying.positions)

    def tokens_of(self, verifying: Verifying, ints: IntArray) -> IntArray:
        """Of each row, int32 [rows, positions], those that it yielded first and then -1. ints: as fetched."""
        count, size, padded = len(verifying.slots), verifying.num_positions, verifying.padded
        counts = ints[padded * size : padded * size + count]
        is_yielded = np.arange(size) < counts[:, None]
        return np.where(is_yielded, ints[: count * size].reshape(count, size), np.int32(-1))

    def yielded(self, verifying: Verifying, fetched: Fetched) -> Yielded:
        """Outcome of the rows."""
        count, size, padded = len(verifying.slots), verifying.num_positions, verifying.padded
        if size == 1 and not verifying.asking.rows:
            tokens, counts = fetched.tokens[:count], fetched.tokens[padded : padded + count]
            return Yielded(tokens if counts.all() else tokens[counts > 0], counts, None, {})
        tokens = fetched.tokens[: count * size].reshape(count, size)
        counts, num_drafts = fetched.tokens[padded * size :][: 2 * padded].reshape(2, padded)[:, :count]
        places: IntArray = np.broadcast_to(np.arange(size, dtype=np.int32), (count, size))
        if verifying.has_trees:
            places = fetched.tokens[padded * (size + 2) :][: count * size].reshape(count, size)
        logprobs = {
            row: _joined([fetched.logprobs[row * size + number] for number in places[row, : counts[row]].tolist()])
            for row in verifying.asking.rows
            if counts[row]
        }
        return Yielded(tokens[np.arange(size) < counts[:, None]], counts, num_drafts, logprobs)

    def observe(self, verifying: Verifying, got: Yielded, times: tuple[int, int] | None) -> None:
        """The step ran between these times; None: chunks were in it too."""
        if self._follower is not None and got.num_drafts is not None and verifying.num_positions > 1:
            self._follower.launched(verifying.slots, got.counts, got.num_drafts)
        if self._lengths is not None:
            most = verifying.num_positions - 1
            self._lengths.observe(verifying.slots, got.counts, most, times, got.num_drafts)

    def _stage(self, rows: DecodeRows | None, num_rows: int, width: int, *, waits: bool = False) -> None:
        """Fills the next staging slot, for a step of so many positions a row; None: rows of padding alone. waits: what
        the graph samples is not accepted there."""
        count = 0 if rows is None else len(rows.slots)
        entries = _NO_ENTRIES
        if rows is not None and not rows.is_repeat:
            entries = self._slots.new_entries(rows.slots, rows.page_tables, rows.num_pages)
            if len(entries) > self._staging.max_entries:
                self._slots.send_entries(entries)
                entries = entries[:0]
        columns = self._staging.stage(num_rows, entries, self._ring.take())
        slots, max_lens, tokens, lengths, starts, counts, waiting = columns[:_COLUMNS]
        waiting[:] = waits
        slots[count:], max_lens[count:], tokens[count:], lengths[count:] = self._slots.dummy_slot, 0, -1, -1
        starts[count:] = counts[count:] = 0
        if rows is None:
            return
        assert rows.bounds is not None, "a row that verifies drafts has bounds"
        slots[:count], max_lens[:count] = rows.slots, rows.bounds.max_lens
        tokens[:count] = lengths[:count] = -1
        if self._slots.has_new_tokens:
            tokens[:count], lengths[:count] = self._slots.row_states(rows.slots)
        if width == 1:
            starts[:count] = counts[:count] = 0
            return
        if self._on_device is not None:
            starts[:count], counts[:count] = -1, width - 1
            return
        starts[:count] = rows.bounds.known_lens
        wanted = [self._draft_row(slot, row, rows.bounds) for row, slot in enumerate(rows.slots.tolist())]
        for row, drafts in enumerate(drafts_of(self._drafter, wanted, self._model.vocab_size)):
            counts[row] = len(drafts)
            columns[_COLUMNS : _COLUMNS + len(drafts), row] = drafts

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

    def _inputs(self, num_rows: int) -> tuple[DraftInputs, torch.Tensor]:
        """Of a step of so many rows, and which of them wait for another sampling: the same memory for every one."""
        if num_rows not in self._inputs_of:
            columns, staging = self._staging.columns(num_rows), self._staging
            slots, max_lens, tokens, lengths, starts, counts, waits = (
                column[:num_rows] for column in columns[:_COLUMNS]
            )
            inputs = DraftInputs(
                slots=slots,
                max_lens=max_lens,
                tokens=tokens,
                lengths=lengths,
                starts=starts,
                counts=counts,
                window_WB=columns[_COLUMNS:],
                entries_E2=staging.entries_E2(num_rows),
                num_entries_1=staging.num_entries_1,
                parents_WB=self._parents_WB,
            )
            self._inputs_of[num_rows] = inputs, waits
        return self._inputs_of[num_rows]

    def _drafted(self, num_rows: int, width: int) -> DraftRows:
        if (num_rows, width) not in self._drafted_of:
            self._drafted_of[num_rows, width] = self._rows[width].of(num_rows)
        return self._drafted_of[num_rows, width]

    def _accept(
        self, num_rows: int, width: int, taken_T: torch.Tensor | None, waits_B: torch.Tensor | None = None
    ) -> None:
        """Advances the slots by what was sampled. taken_T: masks of the positions. waits_B: rows that do not advance
        yet."""
        (inputs, _), sampled_T = self._inputs(num_rows), self._target(num_rows, width).ring_RT[0]
        to = sampled_T, inputs.slots, self._drafted(num_rows, width), self._state, self._ring.rows
        if not self._has_trees or width == 1:
            accept_drafts(*to, self._staging.ring_index_1, taken_T, waits_B=waits_B)
            return
        trees = self._trees.of(num_rows)
        accept_drafts(*to, self._staging.ring_index_1, taken_T, inputs.parents_WB, trees.paths_BP)
        move_paths(self._moved, trees)

    def _target(self, num_rows: int, width: int) -> TokenTarget:
        sampled_1T = self._sampled_1T[:, : num_rows * width]
        return TokenTarget(ring_RT=sampled_1T, ring_index_1=self._zero_1, last_tokens_S=self._no_last_S)

    def _forward(self, num_rows: int, width: int) -> torch.Tensor:
        """A step whose inputs are staged, all positions sampled without filters: their logits. Graphs record it."""
        self._staging.fetch(num_rows)
        rows = self._drafted(num_rows, width)
        inputs, waits_B = self._inputs(num_rows)
        if self._on_device is not None and width > 1:
            self._on_device.propose(inputs, self._state)
        expand_drafts(inputs, self._state, rows)
        tables, nothing = self._slots.page_tables, rows.slots[:0]
        trees: TreeRows | None = None
        if self._has_trees and width > 1:
            trees = self._trees.of(num_rows)
            branch_rows(inputs, self._state, rows, trees, self._page_size)
        is_chunked = num_rows >= LEAST_CHUNKS and width > 1 and trees is None
        step = DeviceStep(
            page_tables=tables,
            row_slots=rows.slots,
            row_positions=rows.positions,
            decode_slots=nothing if is_chunked else rows.slots,
            decode_kv_lens=nothing if is_chunked else rows.kv_lens,
            chunk_slots=rows.chunk_slots if is_chunked else nothing,
            chunk_row_starts=rows.chunk_row_starts if is_chunked else nothing,
            chunk_kv_lens=rows.chunk_kv_lens if is_chunked else nothing,
            max_chunk_len=width if is_chunked else 0,
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
        if follower is not None:
            follower.computed(rows, states or HiddenStates(()), trees)
        logits_TV = self._model.logits(hidden_TD)
        self._sampler.sample_unfiltered(logits_TV, rows.slots, rows.kv_lens, self._target(num_rows, width))
        if trees is None:
            self._accept(num_rows, width, None, waits_B)
        return logits_TV


def _positions_of(asking: Asking, width: int) -> Asking:
    rows = [row * width + number for row in asking.rows for number in range(width)]
    return Asking(rows, [num_top for num_top in asking.num_top for _ in range(width)])


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(
        own=np.concatenate([part.own for part in parts]),
        num_top=parts[0].num_top,
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )
