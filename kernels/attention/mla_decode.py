"""Paged decode over latents: one query token a row, all heads over the same cached latents, under one captured graph.

T rows, H query heads, R rank of the latents, r RoPE dims, C = R + r numbers of a cached token, S tokens of the pool.
The kernel is in `mla_split.py`; plans and groups of rows that share a prefix are those of `decode_attention.py` and
`shared_prefix_attention.py`, whose workspaces serve here with blocks of heads in the place of KV heads.
"""

from __future__ import annotations

import torch

from radixmesh.kernels.attention.decode_attention import DecodeWorkspace
from radixmesh.kernels.attention.mla_split import mla_split_attention
from radixmesh.kernels.attention.shared_prefix_attention import SharedPrefixWorkspace
from radixmesh.kernels.attention.split_pieces import Tails
from radixmesh.kernels.attention.split_schedule import SplitConfig
from radixmesh.kernels.hopper import has_wgmma

# Query heads of a program: as many rows as one warp group multiplies.
_MOST_HEADS = 64
SM90_CONFIG = SplitConfig(heads=1, block_n=64, num_warps=8, num_stages=3, programs_per_sm=1, min_tiles=4, is_sm90=True)
"""Of the kernel written for Hopper; warps and stages are of the one that computes what it does not."""


def mla_head_blocks(num_heads: int) -> int:
    """Number of blocks of heads, each of at most 64: they read a token's latent once each."""
    return next(
        blocks for blocks in range(1, num_heads + 1) if num_heads % blocks == 0 and num_heads // blocks <= _MOST_HEADS
    )


def mla_decode_workspace(
    max_rows: int,
    num_heads: int,
    rank: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    config: SplitConfig | None = None,
    *,
    is_batch_invariant: bool = False,
) -> DecodeWorkspace:
    """For `plan_decode` and `mla_decode`. config: None takes `mla_decode_config`."""
    blocks = mla_head_blocks(num_heads)
    return DecodeWorkspace(
        max_rows,
        num_heads,
        blocks,
        rank,
        device,
        dtype,
        config=config or mla_decode_config(num_heads // blocks, dtype, rank, torch.device(device)),
        is_batch_invariant=is_batch_invariant,
    )


def mla_shared_workspace(
    max_rows: int,
    num_heads: int,
    rank: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    prefix_config: SplitConfig | None = None,
    suffix_config: SplitConfig | None = None,
) -> SharedPrefixWorkspace | None:
    """For `plan_shared_decode` and `mla_shared_decode`. None where the heads of one row fill a program already: reading
    a prefix once for two rows would save nothing."""
    blocks = mla_head_blocks(num_heads)
    heads = num_heads // blocks
    if 2 * heads > _MOST_HEADS:
        return None
    return SharedPrefixWorkspace(
        max_rows,
        num_heads,
        blocks,
        rank,
        device,
        dtype,
        prefix_config or mla_decode_config(_MOST_HEADS, dtype, rank, torch.device(device)),
        suffix_config or mla_decode_config(heads, dtype, rank, torch.device(device)),
    )


def mla_decode_config(heads: int, dtype: torch.dtype, rank: int, device: torch.device) -> SplitConfig:
    """The defaults by the query heads of a program, which are the rows of its GEMMs: the fastest of those that
    `bench/gpu/mla.py` tries on an H200."""
    if heads > 32 and rank == 512 and dtype.itemsize == 2 and has_wgmma(device):
        return SM90_CONFIG
    if dtype == torch.float32:
        return SplitConfig(heads=1, block_n=16, num_warps=4, num_stages=1, programs_per_sm=1, min_tiles=8)
    if heads > 16:
        return SplitConfig(heads=1, block_n=32, num_warps=8, num_stages=5, programs_per_sm=1, min_tiles=4)
    return SplitConfig(heads=1, block_n=32, num_warps=4, num_stages=5, programs_per_sm=2, min_tiles=4)


def mla_decode(
    q_THC: torch.Tensor,
    latents_SC: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    scale: float,
    workspace: DecodeWorkspace,
    out: torch.Tensor | None = None,
    *,
    tails: Tails | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Softmax-weighted sums of latents, [T, H, R]: each row over its sequence, whose last token is the row's own.

    Queries are absorbed: their first R numbers meet latents, the others RoPE keys. latents_SC: the layer's pool,
    contiguous; page tables, slots and lengths as of `paged_decode`. `plan_decode` must have run with the same
    kv_lens_T. A row with kv_len 0 gives zeros, or what is in `out`. tails as of `paged_decode`.
    Raises ValueError on what does not fit.
    """
    out = _checked_out(q_THC, latents_SC, page_tables, row_slots_T, workspace.shape.head_dim, out)
    mla_split_attention(
        workspace.plan(None),
        workspace.parts,
        (q_THC, latents_SC, page_tables),
        slots_U=row_slots_T,
        ends_U=kv_lens_T,
        page_size=page_size,
        scale=scale,
        out=out,
        tails=tails,
        use_pdl=use_pdl,
    )
    return out


def mla_shared_decode(
    q_THC: torch.Tensor,
    latents_SC: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    scale: float,
    workspace: SharedPrefixWorkspace,
    out: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """`mla_decode` by the workspace's groups, each of which reads its prefix once for several rows.

    `plan_shared_decode` must have run with the same kv_lens_T since the groups were set.
    """
    out = _checked_out(q_THC, latents_SC, page_tables, row_slots_T, workspace.shape.head_dim, out)
    inputs = (q_THC, latents_SC, page_tables)
    mla_split_attention(
        workspace.prefix_plan,
        workspace.parts,
        inputs,
        slots_U=workspace.slots_G,
        ends_U=workspace.lens_G,
        page_size=page_size,
        scale=scale,
        out=workspace.prefix_outputs_THd,
        members_UR=workspace.members_GR,
        out_lse=workspace.prefix_lses_TH,
        use_pdl=use_pdl,
    )
    mla_split_attention(
        workspace.suffix_plan,
        workspace.parts,
        inputs,
        slots_U=row_slots_T,
        ends_U=kv_lens_T,
        page_size=page_size,
        scale=scale,
        out=out,
        begins_U=workspace.row_prefix_lens_T,
        initial=(workspace.prefix_outputs_THd, workspace.prefix_lses_TH),
        use_pdl=use_pdl,
    )
    return out


def _checked_out(
    q_THC: torch.Tensor,
    latents_SC: torch.Tensor,
    page_tables: torch.Tensor,
    slots: torch.Tensor,
    rank: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """`out`, or memory for it, [T, H, R]."""
    check_mla_inputs(q_THC, latents_SC, page_tables, slots, rank)
    return q_THC.new_empty(*q_THC.shape[:2], rank) if out is None else out


def check_mla_inputs(
    q_THC: torch.Tensor, latents_SC: torch.Tensor, page_tables: torch.Tensor, slots: torch.Tensor, rank: int
) -> None:
    """Raises ValueError where shapes, dtypes or layouts do not fit the kernels."""
    if not q_THC.is_contiguous() or q_THC.shape[2] <= rank:
        raise ValueError(f"queries must be contiguous [rows, heads, more than {rank}], not {tuple(q_THC.shape)}")
    if latents_SC.shape[1:] != q_THC.shape[2:] or latents_SC.dtype != q_THC.dtype or not latents_SC.is_contiguous():
        raise ValueError(
            f"a pool must be contiguous {q_THC.dtype} [tokens, {q_THC.shape[2]}], "
            f"not {latents_SC.dtype} {tuple(latents_SC.shape)}"
        )
    if page_tables.dtype != torch.int32 or slots.dtype != torch.int32:
        raise ValueError("page tables and slots must be int32")


def mla_decode_reference(
    q_THC: torch.Tensor,
    latents_SC: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    scale: float,
    rank: int,
) -> torch.Tensor:
    """Reference of `mla_decode`, in fp32 and row by row."""
    out_THR = torch.zeros(*q_THC.shape[:2], rank, dtype=torch.float32, device=q_THC.device)
    for row, (slot, length) in enumerate(zip(row_slots_T.tolist(), kv_lens_T.tolist(), strict=True)):
        if length == 0:
            continue
        position = torch.arange(length, device=q_THC.device)
        token = page_tables[slot, position // page_size].long() * page_size + position % page_size
        kv_LC = latents_SC[token].float()
        out_THR[row] = (q_THC[row].float() @ kv_LC.t() * scale).softmax(-1) @ kv_LC[:, :rank]
    return out_THR.to(q_THC.dtype)
