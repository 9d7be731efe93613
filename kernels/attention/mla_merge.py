"""Decode over latents and the value expansion of its results, for few rows: parts are merged where they are expanded.

A kernel that merges the parts of a row itself (`mla_split.py`) has one program read all of them when the last has come.
With few rows, most SMs idle meanwhile. Here the programs that expand a head's result merge its parts, which then may be
many: a part is as short as a tile.

    parts [programs, heads, R], float32 -> merge -> result of a head [R] x value expansion [v, R] -> [v]

T rows, H query heads, R rank of the latents, v value dims of a head, P parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.decode_attention import DecodeWorkspace
from radixmesh.kernels.attention.mla_decode import check_mla_inputs, mla_decode_workspace, mla_head_blocks
from radixmesh.kernels.attention.mla_split import mla_split_attention
from radixmesh.kernels.attention.split_pieces import LOWEST
from radixmesh.kernels.attention.split_schedule import SplitConfig, SplitParts

MAX_ROWS = 8
"""More rows have their parts merged by `mla_decode`."""
# Parts whose loads are under way together, columns of a program.
_PARTS, _COLUMNS = 8, 16


def mla_few_rows_workspace(
    num_heads: int, rank: int, device: torch.device | str, dtype: torch.dtype
) -> DecodeWorkspace:
    """For `plan_decode` and `mla_decode_expanded`, of up to MAX_ROWS rows."""
    is_wide = dtype == torch.float32
    config = SplitConfig(
        heads=1, block_n=16 if is_wide else 32, num_warps=4, num_stages=1 if is_wide else 5, programs_per_sm=1,
        min_tiles=1,
    )  # fmt: skip
    workspace = mla_decode_workspace(MAX_ROWS, num_heads, rank, device, dtype, config)
    num_whole = MAX_ROWS * mla_head_blocks(num_heads)
    workspace.parts = SplitParts(list(workspace.plans.values()), torch.device(device), num_whole)
    return workspace


def mla_decode_expanded(
    q_THC: torch.Tensor,
    latents_SC: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    scale: float,
    workspace: DecodeWorkspace,
    value_HvR: torch.Tensor,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """`mla_decode`'s result by the value expansion of each head, [T, H, v]; a row with kv_len 0 gives zeros.

    value_HvR: ranks contiguous. `plan_decode` must have run with the same kv_lens_T, and skip no row.
    """
    shape, config, plan = workspace.shape, workspace.config, workspace.plan(None)
    check_mla_inputs(q_THC, latents_SC, page_tables, row_slots_T, shape.head_dim)
    num_rows, num_heads, _ = q_THC.shape
    value = value_HvR.shape[1]
    assert value_HvR.shape == (num_heads, value, shape.head_dim) and value_HvR.stride(2) == 1, value_HvR.shape
    mla_split_attention(
        plan,
        workspace.parts,
        (q_THC, latents_SC, page_tables),
        slots_U=row_slots_T,
        ends_U=kv_lens_T,
        page_size=page_size,
        scale=scale,
        out=None,
        use_pdl=use_pdl,
    )
    out_THv = q_THC.new_empty(num_rows, num_heads, value)
    _mla_merge_kernel[(triton.cdiv(value, _COLUMNS), num_heads, num_rows)](
        workspace.parts.outputs, workspace.parts.lses, plan.tile_starts, value_HvR, out_THv, num_rows,
        value_HvR.stride(0), value_HvR.stride(1), H=num_heads, HEADS=shape.group_size, R=shape.head_dim,
        RP=shape.padded_dim, VALUE=value, PART_ROWS=shape.query_rows(config), MIN_TILES=config.min_tiles,
        NUM_PROGRAMS=plan.num_programs, PARTS=_PARTS, COLUMNS=_COLUMNS, PDL=use_pdl, launch_pdl=use_pdl, num_warps=4,
    )  # fmt: skip
    return out_THv


@triton.jit(do_not_specialize=["num_units"])
def _mla_merge_kernel(
    parts_ptr, lses_ptr, tile_starts_ptr, w_ptr, out_ptr, num_units, w_head, w_row, H: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, VALUE: tl.constexpr, PART_ROWS: tl.constexpr,
    MIN_TILES: tl.constexpr, NUM_PROGRAMS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HEAD_BLOCKS: tl.constexpr = H // HEADS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    unit = tl.program_id(2)
    c = tl.arange(0, RP)
    # Weights and the plan were there before the kernel ahead.
    w_at = w_ptr + head.to(tl.int64) * w_head + column[:, None] * w_row + c[None, :]
    w = tl.load(w_at, mask=(column < VALUE)[:, None] & (c < R)[None, :], other=0.0)
    unit_begin = tl.load(tile_starts_ptr + unit)
    tiles = tl.load(tile_starts_ptr + unit + 1) - unit_begin
    num_tiles = tl.load(tile_starts_ptr + num_units) * HEAD_BLOCKS
    share = tl.maximum((num_tiles + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)
    block_work = unit_begin * HEAD_BLOCKS + head // HEADS * tiles
    first = block_work // share
    num_parts = (block_work + tiles - 1) // share - first + 1
    whole = 2 * NUM_PROGRAMS + unit * HEAD_BLOCKS + head // HEADS
    if PDL:
        tl.extra.cuda.gdc_wait()
    highest = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, RP], tl.float32)
    for start in range(0, num_parts, PARTS):
        # A program's second partial result is of the unit that it ended in, which is where the unit starts.
        part = start + tl.arange(0, PARTS)
        is_part = part < num_parts
        partial = 2 * (first + part) + tl.where(part == 0, 1, 0)
        partial = tl.where(num_parts == 1, whole, partial)
        row = partial * PART_ROWS + head % HEADS
        lses = tl.load(lses_ptr + row, mask=is_part, other=LOWEST)
        part_at = parts_ptr + row.to(tl.int64)[:, None] * RP + c[None, :]
        parts = tl.load(part_at, mask=is_part[:, None] & (c < R)[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(lses, 0))
        weights = tl.where(is_part, tl.exp2(lses - new_highest), 0.0)
        correction = tl.exp2(highest - new_highest)
        total = total * correction + tl.sum(weights, 0)
        merged = merged * correction[:, None] + tl.sum(parts * weights[:, None], 0)[None, :]
        highest = new_highest
    # Rounded as the attention's result is elsewhere.
    x = (merged / total[:, None]).to(w.dtype).to(tl.float32)
    result = tl.sum(w.to(tl.float32) * x, 1)
    out_at = out_ptr + (unit * H + head).to(tl.int64) * VALUE + column
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=column < VALUE)
