"""A network that drafts inside the steps of a GPU: it follows what the target computes, and drafts a chain or a tree.

    chunks      features of their tokens are kept, and the network computes its own KV   with the target's forward
    propose     tokens that it lacks, the last one with them, give the first draft;      before the target's forward
                then a row a draft, or the frontier of a tree, level by level (`network_trees.py`)
    computed    features of what the target verified are kept; its KV there is stale     behind the target's forward

All of it is launches of captured steps: which tokens are lacking is found on the device (kernels/sampling/follow.py).
A step computes a column more of a row than it drafts, which is what a step may yield. What lapsed while steps did not
draft is computed ahead of the next one that does, at most MOST_BEHIND tokens of a row: by a graph of its own for a few
rows, since kernel by kernel it takes the host as long as several steps of a small model; of more rows kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention, DeviceStep
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.drafting.lapsed_rows import LapsedRows
from radixmesh.daemons.worker.cuda.drafting.network import DraftNetwork
from radixmesh.daemons.worker.cuda.drafting.network_trees import NetworkTrees, scratch_tokens
from radixmesh.daemons.worker.cuda.step.device_drafter import DeviceDrafter
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.step_graphs import StepGraphs
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.daemons.worker.speculation.draft_tree import TreeShape
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND, Drafter, DraftRow
from radixmesh.kernels.attention.split_pieces import Tails
from radixmesh.kernels.rope_kv import KvTarget
from radixmesh.kernels.sampling.draft_trees import TreeRows
from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths
from radixmesh.kernels.sampling.follow import chain_rows, follow_chunks, follow_rows, tokens_written, write_entries
from radixmesh.kernels.sampling.grow_trees import BranchRows
from radixmesh.kernels.sampling.network_rows import ChainRows, FreshTokens, NetworkRows, NetworkShape
from radixmesh.kernels.sampling.sample import TokenTarget

LEAST_CHUNKS = 32
"""As of `verify_steps`."""
CATCH_UP_ROWS = (1, 2, 4, 8)
"""Rows of the catch-ups that are captured."""


class DeviceNetwork(DeviceDrafter):
    """pool: the network's KV, by token, and one token more for padding; with trees the tokens before that one are those
    of branches, `scratch_tokens()` for as many rows as there are slots. max_rows: of a catch-up, as of a step."""

    has_levels = True

    def __init__(
        self,
        device: Device,
        network: DraftNetwork,
        pool: KvPool,
        attention: DeviceAttention,
        slots: SlotState,
        tables_SL: torch.Tensor,
        *,
        hidden_layers: tuple[int, ...],
        num_features: int,
        dtype: torch.dtype,
        page_size: int,
        max_total_len: int,
        max_rows: int,
        max_chain: int,
        tree: TreeShape | None = None,
    ) -> None:
        """tables_SL: int32, memory for the network's own page tables, which the attention reads. page_size: of the
        target's pages. dtype: of features. max_chain: most drafts of a row, of those that a step verifies: grammars may
        force more. tree: shape of the drafts of a row; None: they are a chain."""
        where = device.torch_device
        self.hidden_layers = hidden_layers
        self._device, self._network, self.pool, self._attention = device, network, pool, attention
        self._slots, self._page_size, self._max_chain = slots, page_size, max_chain
        self._most_lagging = max(1, max_rows // MOST_BEHIND)
        self._tree, self.has_trees = tree, tree is not None
        num_tokens = pool.num_pages + 1
        self._shape = NetworkShape(1 if num_features else 0, page_size, max_total_len, pool.zero_slot)
        self.features_NF = torch.zeros(num_tokens, num_features, dtype=dtype, device=where) if num_features else None
        num_slots = len(slots.lengths)
        self.fresh = FreshTokens(
            torch.zeros(num_tokens, dtype=torch.int8, device=where),
            torch.zeros(num_slots, dtype=torch.int32, device=where),
            torch.zeros(num_slots, dtype=torch.int32, device=where),
            tables_SL.fill_(pool.zero_slot),
        )
        self._new_slots: list[int] = []
        # Of each slot: decodes since it drafted last, looks at it that are left after steps without a draft of it, and
        # whether its length has been sent.
        self._behind = np.zeros(num_slots, np.int32)
        self._looks = np.zeros(num_slots, np.int32)
        self._is_known: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def begin(self, state: SlotLengths, sampler: SlotSampler, *, max_rows: int, max_drafts: int) -> None:
        where = self._device.torch_device
        self._state, self._sampler, self._most = state, sampler, min(max_drafts, self._max_chain)
        self._columns = max_drafts + 1
        self._rows = NetworkRows.allocate(max_rows * self._columns, max_rows, where)
        self._chain = ChainRows.allocate(max_rows, where)
        self._attention.reserve(max_rows * max(self._columns, 1 if self._tree is None else self._tree.topk))
        self._trees: NetworkTrees | None = None
        if self._tree is not None:
            self._trees = NetworkTrees(
                self._tree,
                self._network,
                self._shape,
                sampler,
                max_rows=max_rows,
                scratch_first=self.pool.zero_slot - scratch_tokens(self._tree, max_rows),
                dummy_slot=self._slots.dummy_slot,
                has_features=self.features_NF is not None,
                device=where,
            )
        self._sampled_1B = torch.zeros(1, max_rows, dtype=torch.int32, device=where)
        self._zero_1 = torch.zeros(1, dtype=torch.int32, device=where)
        self._no_last_S = torch.zeros_like(state.last_tokens)

    def warm_up(self, *, is_captured: bool) -> None:
        sizes = [size for size in CATCH_UP_ROWS if size <= self._most_lagging] if is_captured else []
        self._catch_ups = StepGraphs(self._device, tuple(sizes))
        self._lapsed = LapsedRows.allocate(max(sizes, default=1), self._device.torch_device)
        if not sizes:
            self._catch_up(np.array([self._slots.dummy_slot], np.int32))
        self._lapsed.inputs.slots.fill_(self._slots.dummy_slot)
        for size in reversed(sizes):
            self._catch_ups.capture(size, "", partial(self._compute_lapsed, self._lapsed.of(size)))

    def propose(self, inputs: DraftInputs, state: SlotLengths) -> None:
        num_rows, network = len(inputs.slots), self._network
        rows, chain = self._rows.of(num_rows * self._columns, num_rows), self._chain.of(num_rows)
        inputs = inputs._replace(window_WB=inputs.window_WB[: self._most])
        write_entries(inputs, state)
        follow_rows(inputs, state, self.fresh, self._shape, rows, chain)
        output = self._compute(rows, num_rows, self._columns).index_select(0, chain.last_rows)
        if self._trees is not None:
            self._trees.grow(output, inputs, chain, self._forward_branches)
            return
        sampled_B = self._sampled_1B[0, :num_rows]
        target = TokenTarget(ring_RT=self._sampled_1B, ring_index_1=self._zero_1, last_tokens_S=self._no_last_S)
        most = len(inputs.window_WB)
        for number in range(most):
            self._sampler.sample_unfiltered(network.logits(output), chain.sample_slots, chain.sample_positions, target)
            chain_rows(sampled_B, inputs, number, self._slots.dummy_slot, self._shape, chain)
            if number + 1 < most:
                features_BF = None if self.features_NF is None else output
                step = self._step(chain.slots, chain.positions, decodes=(chain.slots, chain.kv_lens))
                output = network.forward(
                    sampled_B, features_BF, self._target(chain.positions, chain.slots), self._attention.begin(step, "")
                )

    def computed(self, rows: DraftRows, hidden: HiddenStates, trees: TreeRows | None = None) -> None:
        tokens_T = None if trees is None else trees.tokens_T
        written_T = tokens_written(rows.positions, rows.slots, self._state, self.fresh, self._page_size, tokens_T)
        self._keep(written_T, hidden)

    def kept_planes(self) -> list[torch.Tensor]:
        # The network's own KV of these tokens is stale since the target wrote them.
        return [] if self.features_NF is None else [self.features_NF[None]]

    def computed_chunks(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: DeviceStep, hidden: HiddenStates
    ) -> None:
        chunks = (step.chunk_slots, step.chunk_row_starts, step.chunk_kv_lens)
        rows = NetworkRows.allocate(len(ids_T), step.num_chunks, ids_T.device)._replace(tokens=ids_T)
        written_T = follow_chunks(chunks, positions_T, step.page_tables, self.fresh, self._shape, rows)
        self._keep(written_T, hidden)
        self._compute(rows, 0, step.max_chunk_len)

    def admitted(self, admit: Admit) -> None:
        slot = admit.slot
        self._new_slots.append(slot)
        self._behind[slot], self._is_known[slot] = 0, False
        # Tokens that it finds in the cache may have lapsed before.
        self._looks[slot] = 2 + (len(admit.prompt_ids) + len(admit.output_ids)) // MOST_BEHIND

    def send(self) -> None:
        if self._new_slots:
            numbers = np.array(self._new_slots, np.int32)
            slots = torch.empty(len(numbers), dtype=torch.int32, device=self._device.torch_device)
            self._device.upload(numbers, slots)
            for lens_S in (self.fresh.fresh_lens_S, self.fresh.tabled_lens_S):
                lens_S.index_fill_(0, slots.long(), 0)
            self._new_slots.clear()

    def launching(self, slots: IntArray, *, has_drafts: bool) -> None:
        if not has_drafts:
            self._behind[slots] += 1
        else:
            # Of a slot that was just taken the device does not have the length yet.
            is_lagging = (self._behind[slots] > self._columns) & self._is_known[slots]
            if is_lagging.any():
                lagging, most = slots[is_lagging], self._most_lagging
                for first in range(0, len(lagging), most):
                    self._catch_up(lagging[first : first + most])
            self._behind[slots] = np.where(is_lagging, np.maximum(self._behind[slots] - MOST_BEHIND, 0), 0)
        self._is_known[slots] = True

    def launched(self, slots: IntArray, counts: IntArray, num_drafts: IntArray) -> None:
        """A row without drafts lacks tokens that it found in the cache, or has none to draft for another reason."""
        has_none = (counts > 0) & (num_drafts == 0) & (self._looks[slots] > 0)
        self._looks[slots[num_drafts > 0]] = 0
        self._looks[slots[has_none]] -= 1
        self._behind[slots[has_none]] = MOST_BEHIND

    def copied(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of a page of the target's are on another page too."""
        to, since = (slice(page * self._page_size, page * self._page_size + num_tokens) for page in (target, source))
        self.pool.copy_tokens(since, to)
        self.fresh.is_fresh_N[to] = self.fresh.is_fresh_N[since]
        if self.features_NF is not None:
            self.features_NF[to] = self.features_NF[since]

    def received(self, tokens: torch.Tensor, *, has_features: bool = False) -> None:
        """KV that was computed elsewhere, or earlier, is on these tokens, int64. has_features: with what there was of
        them here, as from host memory; hidden states do not come from other workers."""
        self.fresh.is_fresh_N[tokens] = 0
        if self.features_NF is not None and not has_features:
            self.features_NF[tokens] = 0

    def cleared(self) -> None:
        """Nothing is on any page."""
        self.pool.clear()
        for numbers in self.fresh[:3]:
            numbers.zero_()

    def _catch_up(self, slots: IntArray) -> None:
        """Computes tokens that the network lacks, but for the last ones: those come with the step that drafts."""
        size = self._catch_ups.captured(len(slots))
        if size is None:
            lapsed = LapsedRows.allocate(len(slots), self._device.torch_device)
            self._device.upload(slots, lapsed.inputs.slots)
            self._compute_lapsed(lapsed)
            return
        padded = np.full(size, self._slots.dummy_slot, np.int32)
        padded[: len(slots)] = slots
        self._device.upload(padded, self._lapsed.inputs.slots)
        self._catch_ups.replay(size, "")

    def _compute_lapsed(self, lapsed: LapsedRows) -> torch.Tensor:
        follow_rows(lapsed.inputs, self._state, self.fresh, self._shape, lapsed.rows, None)
        return self._compute(lapsed.rows, 0, MOST_BEHIND)

    def _compute(self, rows: NetworkRows, num_rows: int, max_chunk_len: int) -> torch.Tensor:
        """Rows from the target's tokens and features, [T, *]. num_rows: few of them are decodes each; 0: chunks."""
        decodes = (rows.slots, rows.kv_lens) if 0 < num_rows < LEAST_CHUNKS else None
        step = self._step(rows.slots, rows.positions, decodes=decodes, chunks=rows, max_chunk_len=max_chunk_len)
        features_TF = None if self.features_NF is None else self.features_NF.index_select(0, rows.features)
        target = self._target(rows.positions, rows.slots)
        return self._network.forward(rows.tokens, features_TF, target, self._attention.begin(step, ""))

    def _step(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        decodes: tuple[torch.Tensor, torch.Tensor] | None,
        chunks: NetworkRows | None = None,
        max_chunk_len: int = 0,
        tails: Tails | None = None,
    ) -> DeviceStep:
        nothing = slots[:0]
        decode_slots, decode_kv_lens = decodes or (nothing, nothing)
        has_chunks = decodes is None and chunks is not None
        return DeviceStep(
            page_tables=self.fresh.tables_SL,
            row_slots=slots,
            row_positions=positions,
            decode_slots=decode_slots,
            decode_kv_lens=decode_kv_lens,
            chunk_slots=chunks.chunk_slots if has_chunks and chunks is not None else nothing,
            chunk_row_starts=chunks.chunk_row_starts if has_chunks and chunks is not None else nothing,
            chunk_kv_lens=chunks.chunk_kv_lens if has_chunks and chunks is not None else nothing,
            max_chunk_len=max_chunk_len if has_chunks else 0,
            tails=tails,
            is_from_host=False,
        )

    def _forward_branches(self, rows: BranchRows, features_TF: torch.Tensor | None) -> torch.Tensor:
        step = self._step(rows.slots, rows.positions, decodes=(rows.slots, rows.kv_lens), tails=rows.tails)
        target = self._target(rows.positions, rows.slots)._replace(tokens_T=rows.tokens)
        return self._network.forward(rows.ids, features_TF, target, self._attention.begin(step, ""))

    def _target(self, positions: torch.Tensor, slots: torch.Tensor) -> KvTarget:
        return KvTarget(positions, slots, self.fresh.tables_SL, 1)

    def _keep(self, written_T: torch.Tensor, hidden: HiddenStates) -> None:
        if self.features_NF is not None:
            states = tuple(hidden.by_layer[layer] for layer in self.hidden_layers)
            self.features_NF.index_copy_(0, written_T, self._network.features(states))


class NetworkDrafter(Drafter):
    """Drafts on the device alone."""

    def __init__(self, network: DeviceNetwork) -> None:
        self._network = network

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        return [empty_ints()] * len(rows)

    def on_device(self) -> DeviceNetwork:
        return self._network


NetworkCreator = Callable[[SlotState], DeviceNetwork]
"""Makes the network that drafts for a model, over the slots of its runner."""
