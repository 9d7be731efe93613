"""Decode attention that reads a prefix shared by several rows once for all of them ("cascade").

Rows whose page tables begin with the same pages form a group. One launch of the split-KV kernel takes groups as its
units: the queries of up to R rows are the rows of one matmul with the prefix's keys. It leaves, for each row and head,
the attention over the prefix with the logarithm of its sum; a second launch, plain decode over what each row has after
its prefix, starts its online softmax from there. Softmax over a union from those of its parts: Milakov and Gimelshein
2018; shared prefixes: Hydragen, Juravsky et al. 2024.

    group   |<---- prefix, once for R rows ---->|
    row i                                       |<-- own -->|

T rows, H query heads, K KV heads, D head_dim, S tokens of the KV pool, G groups of up to R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixmesh.kernels.attention.decode_attention import check_decode_inputs, decode_config
from radixmesh.kernels.attention.prefix_groups import PrefixGroup, split_groups
from radixmesh.kernels.attention.split_kv import split_attention
from radixmesh.kernels.attention.split_schedule import SplitConfig, SplitParts, SplitPlan, SplitShape

# Rows of the matmul of a group's queries with keys: what one warp group multiplies.
_GROUP_QUERIES = 64


class SharedPrefixWorkspace:
    """The groups of a step and the buffers of its kernels, for up to `max_rows` rows; allocated once.

    A captured graph reads groups where they lie, so `set_groups` holds for its next replay. Serves one stream.
    """

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        prefix_config: SplitConfig | None = None,
        suffix_config: SplitConfig | None = None,
    ) -> None:
        device = torch.device(device)
        self.shape = SplitShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.max_rows = max_rows
        self.rows_per_group = max(2, _GROUP_QUERIES // self.shape.group_size)
        # Groups have two rows or more each; cut into pieces of up to R rows there are never more pieces than this.
        self.max_groups = max(1, max_rows // 2)
        shared = SplitShape(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, members=self.rows_per_group
        )
        self.prefix_plan = SplitPlan(
            shared, prefix_config or shared_prefix_config(shared, dtype), self.max_groups, device
        )
        self.suffix_plan = SplitPlan(self.shape, suffix_config or decode_config(self.shape, dtype), max_rows, device)
        self.parts = SplitParts([self.prefix_plan, self.suffix_plan], device)
        self.prefix_outputs_THd = torch.empty(max_rows, num_heads, head_dim, dtype=torch.float32, device=device)
        self.prefix_lses_TH = torch.empty(max_rows, num_heads, dtype=torch.float32, device=device)
        sizes = (self.max_groups * self.rows_per_group, self.max_groups, self.max_groups, max_rows)
        self._groups = self._no_groups(sizes).to(device)
        self._sizes = sizes
        members, self.slots_G, self.lens_G, self.row_prefix_lens_T = self._groups.split(sizes)
        self.members_GR = members.view(self.max_groups, self.rows_per_group)

    def set_groups(self, groups: Sequence[PrefixGroup], row_slots: Sequence[int]) -> None:
        """Groups of rows of the next steps, until called again; ordered on the current stream. row_slots: of each row.

        A group's prefix must end before the last token of each of its rows, and its rows be in no other group.
        """
        host = self._no_groups(self._sizes, is_pinned=self._groups.is_cuda)
        members, slots, lens, row_lens = (part.numpy() for part in host.split(self._sizes))
        pieces = split_groups(groups, self.rows_per_group)
        if len(pieces) > self.max_groups:
            raise ValueError(f"{len(pieces)} groups, but {self.max_rows} rows have at most {self.max_groups}")
        for index, (rows, length) in enumerate(pieces):
            members[index * self.rows_per_group :][: len(rows)] = rows
            slots[index] = row_slots[int(rows[0])]
            lens[index] = length
            row_lens[rows] = length
        # Fresh pinned memory each time, which torch keeps until the copy has run.
        self._groups.copy_(host, non_blocking=True)

    @staticmethod
    def _no_groups(sizes: tuple[int, ...], is_pinned: bool = False) -> torch.Tensor:
        groups = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=is_pinned)
        groups[: sizes[0]] = -1
        return groups


def shared_prefix_config(shape: SplitShape, dtype: torch.dtype) -> SplitConfig:
    """The defaults for an H200 at bf16 and head_dim 128; `bench/gpu/attention.py` measures the alternatives."""
    tile_bytes = 16384
    block_n = max(16, min(64, tile_bytes // (shape.padded_dim * torch.finfo(dtype).bits // 8)))
    if shape.padded_dim > 128:
        return SplitConfig(heads=1, block_n=block_n, num_warps=8, num_stages=3, programs_per_sm=1, min_tiles=2)
    return SplitConfig(heads=1, block_n=block_n, num_warps=4, num_stages=3, programs_per_sm=2, min_tiles=2)


def plan_shared_decode(kv_lens_T: torch.Tensor, workspace: SharedPrefixWorkspace, *, skips_empty: bool = False) -> None:
    """Lays out a step's work on the device; once a step, before the `paged_shared_decode` of its layers.

    kv_lens_T: int32 [T] on the device, each row's KV length with prefix and own token; 0 for a row of padding.
    skips_empty: as of `plan_decode`.
    """
    workspace.prefix_plan.fill(workspace.lens_G, None, None, least_tiles=0)
    row_prefix_lens_T = workspace.row_prefix_lens_T[: kv_lens_T.shape[0]]
    workspace.suffix_plan.fill(kv_lens_T, row_prefix_lens_T, None, least_tiles=0 if skips_empty else 1)


def paged_shared_decode(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    scale: float,
    workspace: SharedPrefixWorkspace,
    out: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """`decode_attention.paged_decode` without a window, computed by the workspace's groups. Returns [T, H, D].

    `plan_shared_decode` must have run with the same kv_lens_T since the groups were set.
    """
    check_decode_inputs(workspace.shape, q_THd, keys_SKd, values_SKd, page_tables, row_slots_T)
    out = torch.empty_like(q_THd) if out is None else out
    inputs = (q_THd, keys_SKd, values_SKd, page_tables)
    split_attention(
        workspace.prefix_plan,
        workspace.parts,
        inputs,
        slots_U=workspace.slots_G,
        ends_U=workspace.lens_G,
        page_size=page_size,
        scale=scale,
        softcap=softcap,
        out=workspace.prefix_outputs_THd,
        members_UR=workspace.members_GR,
        out_lse=workspace.prefix_lses_TH,
        use_pdl=use_pdl,
    )
    split_attention(
        workspace.suffix_plan,
        workspace.parts,
        inputs,
        slots_U=row_slots_T,
        ends_U=kv_lens_T,
        page_size=page_size,
        scale=scale,
        softcap=softcap,
        out=out,
        begins_U=workspace.row_prefix_lens_T,
        initial=(workspace.prefix_outputs_THd, workspace.prefix_lses_TH),
        use_pdl=use_pdl,
    )
    return out
