"""Attention by the project's own kernels: decodes are scheduled on the device; the host only says which rows share
a prefix, when that changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention, DeviceStep, HostStep, StepAttention
from radixmesh.daemons.worker.cuda.attention.paged_kernels import PagedInputs, PagedKernels, ProjectedInputs
from radixmesh.daemons.worker.cuda.attention.prefix_watch import LEAST_SHARED_ROWS, PrefixWatch
from radixmesh.kernels.attention.decode_attention import DecodeWorkspace, plan_decode
from radixmesh.kernels.attention.mla_merge import MAX_ROWS
from radixmesh.kernels.attention.mla_prompt import ChunkTokens
from radixmesh.kernels.attention.shared_prefix_attention import plan_shared_decode
from radixmesh.kernels.attention.tree_attention import TreeWorkspace, plan_trees

SHARED = "shared"
LEAST_MASKED_TREES = 4
"""From so many trees of drafts on a step reads the prefix of each once, for all of its positions. Fewer fill the device
only if each position is a decode of its own."""


class TritonAttention(DeviceAttention):
    """windows, attention_chunks: those of the model's layers; has_sinks: some have them. is_deterministic: chunks of
    prompts are computed row by row, as decodes are."""

    captures_chunks = True
    has_triton_alone = True

    def __init__(
        self,
        kernels: PagedKernels,
        *,
        windows: Sequence[int | None],
        max_rows: int,
        is_deterministic: bool,
        use_pdl: bool,
        attention_chunks: Sequence[int] = (),
        has_sinks: bool = False,
    ) -> None:
        """use_pdl: attention begins while RoPE ends, and its plan is made beside the kernel that begins a step
        (Hopper and later)."""
        self.use_pdl = use_pdl
        self.is_batch_invariant = is_deterministic
        self.kernels = kernels
        self._max_rows = max_rows
        self._create_workspace = partial(
            kernels.workspace,
            windows=windows,
            is_batch_invariant=is_deterministic,
            attention_chunks=attention_chunks,
        )
        self.workspace = self._create_workspace(max_rows)
        self._captured: list[DecodeWorkspace] = []
        # A window or a chunk may end within the prefix, the prefix would have the sinks and the rows would too, and a
        # row's bits would depend on who shares it.
        can_share = not (is_deterministic or attention_chunks or has_sinks) and set(windows) == {None}
        self.shared = kernels.shared_workspace(max_rows) if can_share else None
        self._can_share = can_share
        self._trees: dict[int, TreeWorkspace] = {}
        # In deterministic mode a row is computed alike beside any others.
        self.few_rows = None if is_deterministic else kernels.few_rows_workspace()
        self._watch = PrefixWatch(kernels.page_size)
        self._has_groups = False
        self._projected: ChunkTokens | None = None

    def reserve(self, num_rows: int) -> None:
        if num_rows > self._max_rows:
            # Graphs that were captured with the smaller one go on writing to it.
            self._captured.append(self.workspace)
            self.workspace, self._max_rows = self._create_workspace(num_rows), num_rows

    def reserve_trees(self, num_rows: int, num_positions: int) -> None:
        if self._can_share and num_positions not in self._trees:
            workspace = self.kernels.tree_workspace(num_rows, num_positions)
            if workspace is not None:
                self._trees[num_positions] = workspace

    def variants(self, num_rows: int) -> tuple[str, ...]:
        return ("", SHARED) if self.shared is not None and num_rows >= LEAST_SHARED_ROWS else ("",)

    def forget(self) -> None:
        self._watch.forget()
        if self.shared is not None and self._has_groups:
            # Groups that lie on the device name rows, which smaller steps do not have.
            self.shared.set_groups((), ())
            self._has_groups = False

    def plan(self, step: HostStep) -> str:
        self._projected = None if self.is_batch_invariant else self.kernels.projected(step)
        if self.shared is None:
            return ""
        groups, is_new = self._watch.look(step)
        if groups and is_new:
            self.shared.set_groups(groups, step.decode_slots.tolist())
            self._has_groups = True
        return SHARED if groups else ""

    def begin(self, step: DeviceStep, variant: str) -> StepAttention:
        is_all_decodes = not step.num_chunks
        # Of the step that was planned last: one that is captured was planned without chunks.
        projected, self._projected = self._projected, None
        if self.is_batch_invariant and step.num_chunks:
            step = _as_decodes(step)
        # Beside chunks, what comes after the decode rows is not theirs to write.
        skips_empty = step.num_chunks > 0
        trees = None
        if step.masks is not None and len(step.masks.slots_B) >= LEAST_MASKED_TREES:
            trees = self._trees.get(len(step.masks.masks_T) // len(step.masks.slots_B))
        is_few = is_all_decodes and step.tails is None and variant != SHARED and step.num_decodes <= MAX_ROWS
        few_rows = self.few_rows if is_few else None
        if variant == SHARED:
            assert self.shared is not None
            plan_shared_decode(step.decode_kv_lens, self.shared, skips_empty=skips_empty)
        elif trees is not None:
            assert step.masks is not None
            plan_trees(step.masks.prefix_lens_B, trees)
        elif step.num_decodes:
            # Beside the kernel that writes the lengths the plan would be made too early.
            use_pdl = self.use_pdl and is_all_decodes and step.is_from_host
            workspace = few_rows or self.workspace
            plan_decode(step.decode_kv_lens, workspace, skips_empty=skips_empty, use_pdl=use_pdl)
        tokens = None if projected is None else projected.to(step.page_tables.device)
        return _TritonStep(self, step, tokens, few_rows, trees, is_shared=variant == SHARED)


class _TritonStep(StepAttention):
    """tokens: of chunks that are computed in the up-projected form, on the device. few_rows: planned for the step,
    whose rows `attend_expanded` computes then. trees: planned for the step, whose rows are all positions of trees."""

    def __init__(
        self,
        attention: TritonAttention,
        step: DeviceStep,
        tokens: ChunkTokens | None,
        few_rows: DecodeWorkspace | None,
        trees: TreeWorkspace | None,
        *,
        is_shared: bool,
    ) -> None:
        self._attention = attention
        self._step = step
        self._tokens = tokens
        self._few_rows = few_rows
        self._trees = trees
        self._is_shared = is_shared
        self.first_projected = None if tokens is None else step.num_decodes

    def attend(
        self,
        query_THd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        window: int | None,
        *,
        sinks_H: torch.Tensor | None = None,
        attention_chunk: int | None = None,
    ) -> torch.Tensor:
        assert self._few_rows is None
        step, attention = self._step, self._attention
        kernels, num_decodes = attention.kernels, step.num_decodes
        inputs = PagedInputs(query_THd, keys_SKd, values_SKd, window, sinks_H, attention_chunk)
        if self._trees is not None:
            return kernels.attend_trees(inputs, step, self._trees, use_pdl=attention.use_pdl)
        out_THv = query_THd.new_empty(*query_THd.shape[:2], values_SKd.shape[2])
        if num_decodes:
            of_decodes = inputs._replace(query=query_THd[:num_decodes])
            out, use_pdl = out_THv[:num_decodes], attention.use_pdl
            if self._is_shared:
                assert attention.shared is not None
                kernels.shared_decode(of_decodes, step, attention.shared, out, use_pdl=use_pdl)
            else:
                kernels.decode(of_decodes, step, attention.workspace, out, use_pdl=use_pdl)
        if step.num_chunks and self._tokens is None:
            kernels.extend(inputs, step, out_THv)
        return out_THv

    def attend_expanded(
        self, query_THC: torch.Tensor, latents_S1C: torch.Tensor, value_HvR: torch.Tensor
    ) -> torch.Tensor | None:
        attention, workspace = self._attention, self._few_rows
        if workspace is None:
            return None
        return attention.kernels.decode_expanded(
            query_THC, latents_S1C, value_HvR, self._step, workspace, use_pdl=attention.use_pdl
        )

    def attend_projected(
        self,
        query_THn: torch.Tensor,
        query_rope_THr: torch.Tensor,
        latents_S1C: torch.Tensor,
        w_expand_HER: torch.Tensor,
        out_THv: torch.Tensor,
    ) -> None:
        assert self._tokens is not None
        inputs = ProjectedInputs(query_THn, query_rope_THr, latents_S1C, w_expand_HER)
        self._attention.kernels.extend_projected(inputs, self._step, self._tokens, out_THv)


def _as_decodes(step: DeviceStep) -> DeviceStep:
    """Every row of a chunk as a decode of its own: the bits of a row are then those that a decode would give it."""
    return replace(
        step,
        decode_slots=step.row_slots,
        decode_kv_lens=step.row_positions + 1,
        chunk_slots=step.chunk_slots[:0],
        chunk_row_starts=step.chunk_row_starts[:1],
        chunk_kv_lens=step.chunk_kv_lens[:0],
        max_chunk_len=0,
    )
