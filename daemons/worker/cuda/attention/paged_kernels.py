"""The project's attention kernels by what is cached: keys and values, or latents that are both (`latent_kernels.py`).

Plans, groups and parts are the same for all of them; `triton_attention.py` drives them.

Legend: T rows, B decode rows, H heads, K kv heads, d head_dim of keys, v of values, S tokens of the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep, HostStep
from radixmesh.kernels.attention.decode_attention import DecodeWorkspace, paged_decode
from radixmesh.kernels.attention.extend_attention import paged_extend
from radixmesh.kernels.attention.mla_prompt import ChunkTokens
from radixmesh.kernels.attention.shared_prefix_attention import SharedPrefixWorkspace, paged_shared_decode
from radixmesh.kernels.attention.tree_attention import MAX_POSITIONS, TreeWorkspace, paged_tree_attention
from radixmesh.kernels.kv_fp8 import KV_FP8


class PagedInputs(NamedTuple):
    """A layer's queries [T, H, d], and its pool: keys [S, K, d], values [S, K, v]; the others as of `attend`."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    window: int | None
    sinks: torch.Tensor | None = None
    attention_chunk: int | None = None


class ProjectedInputs(NamedTuple):
    """A layer's latents and queries that are not absorbed, as of `attend_projected`."""

    query_THn: torch.Tensor
    query_rope_THr: torch.Tensor
    latents_S1C: torch.Tensor
    w_expand_HER: torch.Tensor


class PagedKernels(ABC):
    """Kernels of one shape and page size."""

    def __init__(self, shape: AttentionShape, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.page_size, self.dtype, self.device = shape, page_size, dtype, device

    @abstractmethod
    def workspace(
        self,
        max_rows: int,
        windows: Sequence[int | None],
        *,
        is_batch_invariant: bool,
        attention_chunks: Sequence[int] = (),
    ) -> DecodeWorkspace: ...

    @abstractmethod
    def shared_workspace(self, max_rows: int) -> SharedPrefixWorkspace | None:
        """None where rows gain nothing by sharing."""

    @abstractmethod
    def decode(
        self, inputs: PagedInputs, step: DeviceStep, workspace: DecodeWorkspace, out: torch.Tensor, *, use_pdl: bool
    ) -> None: ...

    @abstractmethod
    def shared_decode(
        self,
        inputs: PagedInputs,
        step: DeviceStep,
        workspace: SharedPrefixWorkspace,
        out: torch.Tensor,
        *,
        use_pdl: bool,
    ) -> None: ...

    @abstractmethod
    def extend(self, inputs: PagedInputs, step: DeviceStep, out: torch.Tensor) -> None:
        """Queries and `out` of all rows."""

    def tree_workspace(self, max_rows: int, num_positions: int) -> TreeWorkspace | None:
        """For `attend_trees`; None where no kernel has masks for such a pool."""
        return None

    def attend_trees(
        self, inputs: PagedInputs, step: DeviceStep, workspace: TreeWorkspace, *, use_pdl: bool
    ) -> torch.Tensor:
        """Attention of all rows, which are the positions of trees: [T, H, d]."""
        raise AssertionError("no kernel has masks of trees here")

    def few_rows_workspace(self) -> DecodeWorkspace | None:
        """For `decode_expanded`, which steps of up to MAX_ROWS decodes take; None where they do not."""
        return None

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
        """As of `attend_expanded`."""
        raise AssertionError("no latents are cached")

    def projected(self, step: HostStep) -> ChunkTokens | None:
        """The tokens of the step's chunks, on the host, if keys and values are to be made of their latents first."""
        return None

    def extend_projected(
        self, inputs: ProjectedInputs, step: DeviceStep, tokens: ChunkTokens, out_THv: torch.Tensor
    ) -> None:
        """Of steps for which `projected` gave tokens, which are on the device by now."""
        raise AssertionError("no latents are cached")


class KeyValueKernels(PagedKernels):
    """Multi-head and grouped-query attention."""

    def workspace(
        self,
        max_rows: int,
        windows: Sequence[int | None],
        *,
        is_batch_invariant: bool,
        attention_chunks: Sequence[int] = (),
    ) -> DecodeWorkspace:
        shape = self.shape
        return DecodeWorkspace(
            max_rows,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self.device,
            self.dtype,
            tuple(dict.fromkeys(windows)),
            is_batch_invariant=is_batch_invariant,
            attention_chunks=tuple(dict.fromkeys(attention_chunks)),
        )

    def shared_workspace(self, max_rows: int) -> SharedPrefixWorkspace | None:
        shape = self.shape
        return SharedPrefixWorkspace(
            max_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, self.device, self.dtype
        )

    def decode(
        self, inputs: PagedInputs, step: DeviceStep, workspace: DecodeWorkspace, out: torch.Tensor, *, use_pdl: bool
    ) -> None:
        paged_decode(
            inputs.query,
            inputs.keys,
            inputs.values,
            step.page_tables,
            step.decode_slots,
            step.decode_kv_lens,
            self.page_size,
            self.shape.scale,
            inputs.window,
            workspace,
            out=out,
            softcap=self.shape.softcap,
            sinks_H=inputs.sinks,
            attention_chunk=inputs.attention_chunk,
            tails=step.tails,
            use_pdl=use_pdl,
        )

    def tree_workspace(self, max_rows: int, num_positions: int) -> TreeWorkspace | None:
        shape = self.shape
        if shape.softcap is not None or self.dtype == KV_FP8 or num_positions > MAX_POSITIONS:
            return None
        return TreeWorkspace(
            max_rows, num_positions, shape.num_heads, shape.num_kv_heads, shape.head_dim, self.device, self.dtype
        )

    def attend_trees(
        self, inputs: PagedInputs, step: DeviceStep, workspace: TreeWorkspace, *, use_pdl: bool
    ) -> torch.Tensor:
        masks = step.masks
        assert masks is not None
        return paged_tree_attention(
            inputs.query,
            inputs.keys,
            inputs.values,
            step.page_tables,
            masks.slots_B,
            masks.prefix_lens_B,
            masks.masks_T,
            self.page_size,
            self.shape.scale,
            workspace,
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
        paged_shared_decode(
            inputs.query,
            inputs.keys,
            inputs.values,
            step.page_tables,
            step.decode_slots,
            step.decode_kv_lens,
            self.page_size,
            self.shape.scale,
            workspace,
            out=out,
            softcap=self.shape.softcap,
            use_pdl=use_pdl,
        )

    def extend(self, inputs: PagedInputs, step: DeviceStep, out: torch.Tensor) -> None:
        paged_extend(
            inputs.query,
            inputs.keys,
            inputs.values,
            step.page_tables,
            step.chunk_slots,
            step.chunk_row_starts,
            step.chunk_kv_lens,
            self.page_size,
            self.shape.scale,
            inputs.window,
            step.max_chunk_len,
            out=out,
            softcap=self.shape.softcap,
            sinks_H=inputs.sinks,
            attention_chunk=inputs.attention_chunk,
        )
