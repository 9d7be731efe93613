"""Grouped GEMMs of routed experts for many rows on Hopper, whose tiles the copy engine (TMA) brings.

A program that loads by pointers spends its registers on addresses, and its warps on copies. Here one instruction brings
a tile, of rows that lie together: those of a tile of pairs are gathered first, each once for every pick. On an H200,
8,192 rows of DeepSeek-V2-Lite, microseconds (`bench/gpu/moe.py --rows 8192`): gate and up 932 instead of 1,084, down
484 instead of 566, and 89 to gather, with the same bits.

Legend: T rows, D hidden size, E experts, F mlp size of an expert, N tiles of R slots, P pairs of a row and a pick.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from radixmesh.kernels.hopper import has_wgmma
from radixmesh.kernels.moe.experts_config import GroupedConfig
from radixmesh.kernels.moe.group_rows import ExpertTiles

TILE_ROWS = 128
# Of blocks with 64 to 256 columns, a depth of 64 or 128, 4 or 8 warps and 2 to 4 stages.
_CONFIG = GroupedConfig(128, 64, 8, 3)
_ALIGNMENT = 16
# Numbers that a program gathers.
_GATHERED = 16384


def accepts_tiles(x_TD: torch.Tensor, w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor) -> bool:
    """True if these kernels are for such operands: 16 bits a number, all experts in one contiguous matrix, and what the
    copy engine asks of addresses. On Hopper alone: others have no such GEMMs of Triton's."""
    return (
        has_wgmma(x_TD.device)
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and all(w.is_contiguous() and w.data_ptr() % _ALIGNMENT == 0 for w in (w_gate_up_E2FD, w_down_EDF))
        and all(size * x_TD.element_size() % _ALIGNMENT == 0 for size in w_down_EDF.shape[1:])
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _gather_kernel(
    x_ptr, out_ptr, pairs_ptr, tile_experts_ptr, num_pairs, x_stride, D, A: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64) * ROWS
    if tl.load(tile_experts_ptr + first // R) >= 0:
        slots = first + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK)[None, :]
        pairs = tl.load(pairs_ptr + slots)
        mask = (pairs < num_pairs)[:, None] & (columns < D)
        x = tl.load(x_ptr + (pairs // A).to(tl.int64)[:, None] * x_stride + columns, mask=mask, other=0.0)
        tl.store(out_ptr + slots[:, None] * D + columns, x, mask=columns < D)


@triton.jit
def _gate_up_tiles_kernel(
    x_desc, w_desc, out_desc, tile_experts_ptr, F, K: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(1) * R
    expert = tl.load(tile_experts_ptr + tl.program_id(1))
    if expert >= 0:
        # Columns beyond F are up's, or another expert's, and are not stored; numbers beyond K are zeros.
        column = tl.program_id(0) * BLOCK_N
        gate = expert * 2 * F + column
        gate_sums = tl.zeros((R, BLOCK_N), tl.float32)
        up_sums = tl.zeros((R, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            x = x_desc.load([first, start])
            gate_sums = tl.dot(x, w_desc.load([gate, start]).T, gate_sums)
            up_sums = tl.dot(x, w_desc.load([gate + F, start]).T, up_sums)
        gated = gate_sums / (1.0 + tl.exp(-gate_sums)) * up_sums
        out_desc.store([first, column], gated.to(out_desc.dtype))


@triton.jit(do_not_specialize=["num_pairs"])
def _down_tiles_kernel(
    h_desc, w_desc, out_ptr, pairs_ptr, tile_experts_ptr, num_pairs, D, K: tl.constexpr, R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(1) * R
    expert = tl.load(tile_experts_ptr + tl.program_id(1))
    if expert >= 0:
        column = tl.program_id(0) * BLOCK_N
        sums = tl.zeros((R, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            h = h_desc.load([first, start])
            sums = tl.dot(h, w_desc.load([expert * D + column, start]).T, sums)
        pairs = tl.load(pairs_ptr + first + tl.arange(0, R))
        columns = column + tl.arange(0, BLOCK_N)
        out_at = out_ptr + pairs.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=(pairs < num_pairs)[:, None] & (columns < D)[None, :])


def experts_by_tiles(
    x_TD: torch.Tensor,
    tiles: ExpertTiles,
    num_pairs: int,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """down(silu(gate(row)) x up(row)) of each pair's row by its expert, [P, D], not weighted, in the order of the
    pairs; anything for a pair in no tile. Operands that `accepts_tiles`; tiles of TILE_ROWS."""
    num_tiles, tile_rows = tiles.sizes
    (num_experts, hidden, mlp), config = w_down_EDF.shape, _CONFIG
    assert tile_rows == TILE_ROWS and x_TD.stride(1) == 1, (tile_rows, x_TD.stride())
    x_XD = x_TD.new_empty(num_tiles * tile_rows, hidden)
    block = triton.next_power_of_2(hidden)
    rows = min(tile_rows, max(1, _GATHERED // block))
    _gather_kernel[(num_tiles * tile_rows // rows,)](
        x_TD, x_XD, tiles.pairs_NR, tiles.tile_experts_N, num_pairs, x_TD.stride(0), hidden, A=tiles.num_picks,
        R=tile_rows, ROWS=rows, BLOCK=block, PDL=use_pdl, num_warps=8, launch_pdl=use_pdl,
    )  # fmt: skip
    row_box, weight_box = [tile_rows, config.depth], [config.columns, config.depth]
    gated_XF = x_TD.new_empty(num_tiles * tile_rows, mlp)
    # Columns are the fast axis: programs that run at once share the rows of a few tiles.
    _gate_up_tiles_kernel[(triton.cdiv(mlp, config.columns), num_tiles)](
        TensorDescriptor.from_tensor(x_XD, row_box),
        TensorDescriptor.from_tensor(w_gate_up_E2FD.view(2 * num_experts * mlp, hidden), weight_box),
        TensorDescriptor.from_tensor(gated_XF, [tile_rows, config.columns]), tiles.tile_experts_N, mlp, K=hidden,
        R=tile_rows, BLOCK_N=config.columns, BLOCK_K=config.depth, PDL=use_pdl, num_warps=config.num_warps,
        num_stages=config.num_stages, launch_pdl=use_pdl,
    )  # fmt: skip
    del x_XD
    results_PD = x_TD.new_empty(num_pairs, hidden)
    _down_tiles_kernel[(triton.cdiv(hidden, config.columns), num_tiles)](
        TensorDescriptor.from_tensor(gated_XF, row_box),
        TensorDescriptor.from_tensor(w_down_EDF.view(num_experts * hidden, mlp), weight_box), results_PD,
        tiles.pairs_NR, tiles.tile_experts_N, num_pairs, hidden, K=mlp, R=tile_rows, BLOCK_N=config.columns,
        BLOCK_K=config.depth, PDL=use_pdl, num_warps=config.num_warps, num_stages=config.num_stages,
        launch_pdl=use_pdl,
    )  # fmt: skip
    return results_PD
