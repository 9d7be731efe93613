"""Routed experts of very few rows, at memory speed: rows are not grouped, and each pick reads its expert's weights.

Two launches. Programs of the first compute some columns of one pick's SwiGLU; those of the second some columns of the
down projections of all of a row's picks, and their weighted sum. Weights are held as in `gemv.py`: a program loads
whole rows of a matrix at once.

Legend: T rows, D hidden size, E experts, F mlp size of an expert, A picks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.gemv import Shape, default_config, dots, row_chunks, weight_tiles
from radixmesh.kernels.moe.route import Routes

_LANES, _LOAD_BYTES = 32, 16
_DOWN_COLUMNS = 4


@triton.jit
def _row_gate_up_kernel(
    x_ptr, w_ptr, ids_ptr, out_ptr, x_stride, w_stride, F, A: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert_ptr = w_ptr + tl.load(ids_ptr + pair).to(tl.int64) * w_stride
    gate_tiles = weight_tiles(expert_ptr, first, F, K, BLOCK_N, BLOCK_K, CHUNKS)
    up_tiles = weight_tiles(expert_ptr + tl.cast(F, tl.int64) * K, first, F, K, BLOCK_N, BLOCK_K, CHUNKS)
    x_chunks = row_chunks(x_ptr + (pair // A).to(tl.int64) * x_stride, K, BLOCK_K, CHUNKS)
    gate = dots(gate_tiles, x_chunks, CHUNKS)
    gated = gate / (1.0 + tl.exp(-gate)) * dots(up_tiles, x_chunks, CHUNKS)
    columns = first + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + pair * F + columns, gated.to(out_ptr.dtype.element_ty), mask=columns < F)


@triton.jit
def _row_down_kernel(
    h_ptr, w_ptr, ids_ptr, weights_ptr, residual_ptr, out_ptr, w_stride, D, A: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N,), tl.float32)
    for pick in tl.static_range(A):
        pair = row * A + pick
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        tiles = weight_tiles(w_ptr + expert * w_stride, first, D, K, BLOCK_N, BLOCK_K, CHUNKS)
        h_chunks = row_chunks(h_ptr + pair * K, K, BLOCK_K, CHUNKS)
        # Rounded before it is weighted, as where rows are grouped.
        total += tl.load(weights_ptr + pair) * dots(tiles, h_chunks, CHUNKS).to(dtype).to(tl.float32)
    mask = columns < D
    at = row.to(tl.int64) * D + columns
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def row_experts(
    x_TD: torch.Tensor,
    routes: Routes,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    *,
    residual_TD: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """`routed_experts` for very few rows; an expert that several rows pick is read for each of them."""
    (num_rows, hidden), (num_experts, _, mlp) = x_TD.shape, w_down_EDF.shape
    num_picks = routes.expert_ids_TA.shape[1]
    assert w_gate_up_E2FD.shape == (num_experts, 2 * mlp, hidden), (w_gate_up_E2FD.shape, w_down_EDF.shape)
    assert x_TD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype and x_TD.stride(1) == 1, x_TD.stride()
    assert w_gate_up_E2FD.stride()[1:] == (hidden, 1) and w_down_EDF.stride()[1:] == (mlp, 1), w_down_EDF.stride()
    assert routes.expert_ids_TA.is_contiguous() and routes.weights_TA.is_contiguous()
    out = torch.empty_like(x_TD) if out is None else out
    assert out.is_contiguous() and (residual_TD is None or residual_TD.is_contiguous())
    if num_rows == 0:
        return out
    itemsize = x_TD.element_size()
    gated_PF = x_TD.new_empty(num_rows * num_picks, mlp)
    config = default_config(Shape(mlp, hidden, True), itemsize)
    block_k = _block_k(config.num_warps, hidden, itemsize)
    _row_gate_up_kernel[(triton.cdiv(mlp, config.rows), num_rows * num_picks)](
        x_TD, w_gate_up_E2FD, routes.expert_ids_TA, gated_PF, x_TD.stride(0), w_gate_up_E2FD.stride(0), mlp,
        A=num_picks, K=hidden, BLOCK_N=config.rows, BLOCK_K=block_k, CHUNKS=triton.cdiv(hidden, block_k), PDL=use_pdl,
        num_warps=config.num_warps, launch_pdl=use_pdl,
    )  # fmt: skip
    num_warps = 2 if mlp * itemsize >= 2048 else 1
    block_k = _block_k(num_warps, mlp, itemsize)
    _row_down_kernel[(triton.cdiv(hidden, _DOWN_COLUMNS), num_rows)](
        gated_PF, w_down_EDF, routes.expert_ids_TA, routes.weights_TA, out if residual_TD is None else residual_TD, out,
        w_down_EDF.stride(0), hidden, A=num_picks, K=mlp, BLOCK_N=_DOWN_COLUMNS, BLOCK_K=block_k,
        CHUNKS=triton.cdiv(mlp, block_k), HAS_RESIDUAL=residual_TD is not None, PDL=use_pdl, num_warps=num_warps,
        launch_pdl=use_pdl,
    )  # fmt: skip
    return out


def _block_k(num_warps: int, depth: int, itemsize: int) -> int:
    """Numbers that the program's threads load at once, 16 bytes each; no more than twice the depth."""
    return min(_LANES * num_warps * _LOAD_BYTES // itemsize, int(triton.next_power_of_2(depth)))
