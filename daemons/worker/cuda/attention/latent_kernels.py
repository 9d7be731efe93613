"""The project's attention kernels over latents: absorbed, few rows in one with expansions, prompts up-projected.

Legend: T rows, H heads, C numbers of a cached token, n / r / v plain, RoPE and value dims of a head, R rank of latents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep, HostStep
from radixmesh.daemons.worker.cuda.attention.paged_kernels import PagedInputs, PagedKernels, ProjectedInputs
from radixmesh.kernels.attention.decode_attention import DecodeWorkspace
from radixmesh.kernels.attention.mla_decode import (
    mla_decode,
    mla_decode_workspace,
    mla_shared_decode,
    mla_shared_workspace,
)
from radixmesh.kernels.attention.mla_extend import mla_extend
from radixmesh.kernels.attention.mla_merge import mla_decode_expanded, mla_few_rows_workspace
from radixmesh.kernels.attention.mla_prompt import (
    MAX_TOKENS,
    ChunkTokens,
    chunk_tokens,
    is_projection_faster,
    mla_prompt,
)
from radixmesh.kernels.attention.shared_prefix_attention import SharedPrefixWorkspace

# Fewer rows of chunks are launched as a graph, which knows no lengths.
_LEAST_PROJECTED = 1025
# More of them fill a program's registers.
_MOST_HEADS_EXPANDED = 16


class LatentKernels(PagedKernels):
    """Multi-head latent attention, absorbed: values are the first numbers of the keys, in one plane without windows.

    is_plain: queries are of the pool's dtype, so that weights are too: attention may be one with expansions.
    """

    def __init__(
        self,
        shape: AttentionShape,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rank: int,
        is_plain: bool = True,
    ) -> None:
        super().__init__(shape, page_size, dtype, device)
        self._rank = rank
        self._is_plain = is_plain

    def workspace(
        self,
        max_rows: int,
        windows: Sequence[int | None],
        *,
        is_batch_invariant: bool,
        attention_chunks: Sequence[int] = (),
    ) -> DecodeWorkspace:
        assert set(windows) == {None} and not attention_chunks, (windows, attention_chunks)
        return mla_decode_workspace(
            max_rows,
            self.shape.num_heads,
            self._rank,
            self.device,
            self.dtype,
            is_batch_invariant=is_batch_invariant,
        )

    def shared_workspace(self, max_rows: int) -> SharedPrefixWorkspace | None:
        return mla_shared_workspace(max_rows, self.shape.num_heads, self._rank, self.device, self.dtype)

    def decode(
        self, inputs: PagedInputs, step: DeviceStep, workspace: DecodeWorkspace, out: torch.Tensor, *, use_pdl: bool
    ) -> None:
        mla_decode(
            inputs.query,
            inputs.keys.squeeze(1),
            step.page_tables,
            step.decode_slots,
            step.decode_kv_lens,
            self.page_size,
            self.shape.scale,
            workspace,
            out,
            tails=step.tails,
            use_pdl=use_pdl,
        )

    def shared_decode(
        self,
        inputs: PagedInputs,
        step: DeviceStep,
        workspace: SharedPrefixWorkspace,
        out: torch.Tensor,
        *,
        use_pdl: bool,
    ) -> None:
        mla_shared_decode(
            inputs.query,
            inputs.keys.squeeze(1),
            step.page_tables,
            step.decode_slots,
            step.decode_kv_lens,
            self.page_size,
            self.shape.scale,
            workspace,
            out,
            use_pdl=use_pdl,
        )

    def extend(self, inputs: PagedInputs, step: DeviceStep, out: torch.Tensor) -> None:
        mla_extend(
            inputs.query,
            inputs.keys.squeeze(1),
            step.page_tables,
            step.chunk_slots,
            step.chunk_row_starts,
            step.chunk_kv_lens,
            self.page_size,
            self.shape.scale,
            out,
        )

    def few_rows_workspace(self) -> DecodeWorkspace | None:
        if not self._is_plain or self.shape.num_heads > _MOST_HEADS_EXPANDED:
            return None
        return mla_few_rows_workspace(self.shape.num_heads, self._rank, self.device, self.dtype)

    def decode_expanded(
        self,
        query_THC: torch.Tensor,
        latents_S1C: torch.Tensor,
        value_HvR: torch.Tensor,
        step: DeviceStep,
        workspace: DecodeWorkspace,
        *,
        use_pdl: bool,
    ) -> torch.Tensor:
        return mla_decode_expanded(
            query_THC,
            latents_S1C.squeeze(1),
            step.page_tables,
            step.decode_slots,
            step.decode_kv_lens,
            self.page_size,
            self.shape.scale,
            workspace,
            value_HvR,
            use_pdl=use_pdl,
        )

    def projected(self, step: HostStep) -> ChunkTokens | None:
        lens, kv_lens = step.chunk_lens, step.chunk_kv_lens
        num_rows = int(lens.sum())
        if not self._is_plain or num_rows < _LEAST_PROJECTED:
            return None
        # However much of them chunks share, there are no fewer tokens.
        if not is_projection_faster(lens, kv_lens, max(num_rows, int(kv_lens.max()))):
            return None
        tokens = chunk_tokens(step.chunk_pages, kv_lens, self.page_size)
        num_tokens = len(tokens.index_U)
        return tokens if num_tokens <= MAX_TOKENS and is_projection_faster(lens, kv_lens, num_tokens) else None

    def extend_projected(
        self, inputs: ProjectedInputs, step: DeviceStep, tokens: ChunkTokens, out_THv: torch.Tensor
    ) -> None:
        mla_prompt(
            inputs.query_THn,
            inputs.query_rope_THr,
            inputs.latents_S1C.squeeze(1),
            tokens,
            inputs.w_expand_HER,
            step.chunk_row_starts,
            step.chunk_kv_lens,
            self.shape.scale,
            out_THv,
        )
