"""Routed experts of very few rows, at memory speed: rows are not grouped, and each pick reads its expert's weights.

Two launches. Programs of the first compute some columns of one pick's SwiGLU, behind the norm if there is one; those of
the second some columns of the down projections of all of a row's picks, their weighted sum and the residual. Weights
are held as in `gemv.py`: a program loads whole rows of a matrix at once. An MLP that every row goes through is computed
in the same launches, as parts of an expert's width with the weight 1: its weights are on their way before the kernel
ahead, which chooses the experts, has ended.

Legend: T rows, D hidden size, E experts, F mlp size of an expert, A picks of a row, S parts of the shared MLP, P = T
(A + S).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.gemv import dots, normed_chunks, row_chunks, row_scale, weight_tiles
from radixmesh.kernels.hopper import has_gdc
from radixmesh.kernels.moe.grouped_gemm import routed_experts_reference
from radixmesh.kernels.moe.route import Routes
from radixmesh.kernels.rms_norm import rms_norm_reference
from radixmesh.kernels.silu_mul import silu_mul_reference

_LANES, _LOAD_BYTES = 32, 16


class SharedWeights(NamedTuple):
    """Of an MLP beside the experts, S times as wide as one: gate and up [2 S F, D], gate's rows first; [D, S F]."""

    w_gate_up: torch.Tensor
    w_down: torch.Tensor


class RowNorm(NamedTuple):
    """An RMSNorm of the rows that experts read."""

    weight_D: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExpertsConfig:
    """Columns of a program and its warps, side by side along a weight's rows, for gate and up and for down."""

    gate_up_columns: int
    gate_up_warps: int
    down_columns: int
    down_warps: int


@triton.jit
def _gated_columns(
    gate_ptr, up_ptr, x_ptr, norm_ptr, out_ptr, first, F, eps, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GDC: tl.constexpr,
):  # fmt: skip
    gate_tiles = weight_tiles(gate_ptr, first, K, F, K, BLOCK_N, BLOCK_K, CHUNKS)
    up_tiles = weight_tiles(up_ptr, first, K, F, K, BLOCK_N, BLOCK_K, CHUNKS)
    if HAS_NORM:
        norm_chunks = row_chunks(norm_ptr, K, BLOCK_K, CHUNKS)
    # Also behind another wait, where it waits for nothing: see `gemv.py`.
    if HAS_GDC:
        tl.extra.cuda.gdc_wait()
    x_chunks = row_chunks(x_ptr, K, BLOCK_K, CHUNKS)
    if HAS_NORM:
        x_chunks = normed_chunks(x_chunks, norm_chunks, row_scale(x_chunks, eps, K, CHUNKS), CHUNKS)
    gate = dots(gate_tiles, x_chunks, CHUNKS)
    gated = gate / (1.0 + tl.exp(-gate)) * dots(up_tiles, x_chunks, CHUNKS)
    columns = first + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + columns, gated.to(out_ptr.dtype.element_ty), mask=columns < F)


@triton.jit
def _row_gate_up_kernel(
    x_ptr, norm_ptr, w_ptr, shared_ptr, ids_ptr, out_ptr, num_shared, x_stride, w_stride, F, eps, A: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_GDC: tl.constexpr,
):  # fmt: skip
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
    # Those of the shared MLP come first: they need not know what is picked.
    turn = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    if turn < num_shared:
        row, part = turn // S, turn % S
        gate_ptr = shared_ptr + (part * F).to(tl.int64) * K
        _gated_columns(
            gate_ptr, gate_ptr + tl.cast(S * F, tl.int64) * K, x_ptr + row.to(tl.int64) * x_stride, norm_ptr,
            out_ptr + (row * (A + S) + A + part).to(tl.int64) * F, first, F, eps, K, BLOCK_N, BLOCK_K, CHUNKS,
            HAS_NORM, HAS_GDC,
        )  # fmt: skip
    else:
        pair = turn - num_shared
        row, pick = pair // A, pair % A
        if HAS_GDC:
            tl.extra.cuda.gdc_wait()
        gate_ptr = w_ptr + tl.load(ids_ptr + pair).to(tl.int64) * w_stride
        _gated_columns(
            gate_ptr, gate_ptr + tl.cast(F, tl.int64) * K, x_ptr + row.to(tl.int64) * x_stride, norm_ptr,
            out_ptr + (row * (A + S) + pick).to(tl.int64) * F, first, F, eps, K, BLOCK_N, BLOCK_K, CHUNKS, HAS_NORM,
            HAS_GDC,
        )  # fmt: skip


@triton.jit
def _weighted(sums, tiles, h_chunks, weight, CHUNKS: tl.constexpr):
    """sums + weight x tiles x h, not reduced yet: [BLOCK_N, BLOCK_K]."""
    for chunk in tl.static_range(CHUNKS):
        sums += tiles[chunk].to(tl.float32) * (h_chunks[chunk].to(tl.float32) * weight)
    return sums


@triton.jit
def _row_down_kernel(
    h_ptr, w_ptr, shared_ptr, ids_ptr, weights_ptr, residual_ptr, out_ptr, w_stride, D, A: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_GDC: tl.constexpr,
):  # fmt: skip
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    shared_tiles = ()
    for part in tl.static_range(S):
        shared_tiles = shared_tiles + weight_tiles(shared_ptr + part * K, first, S * K, D, K, BLOCK_N, BLOCK_K, CHUNKS)
    if HAS_GDC:
        tl.extra.cuda.gdc_wait()
    h_ptr += row.to(tl.int64) * (A + S) * K
    # One sum over all picks, reduced once: no barrier keeps the loads of the next pick back.
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for pick in tl.static_range(A):
        expert = tl.load(ids_ptr + row * A + pick).to(tl.int64)
        tiles = weight_tiles(w_ptr + expert * w_stride, first, K, D, K, BLOCK_N, BLOCK_K, CHUNKS)
        weight = tl.load(weights_ptr + row * A + pick)
        sums = _weighted(sums, tiles, row_chunks(h_ptr + pick * K, K, BLOCK_K, CHUNKS), weight, CHUNKS)
    for part in tl.static_range(S):
        h_chunks = row_chunks(h_ptr + (A + part) * K, K, BLOCK_K, CHUNKS)
        for chunk in tl.static_range(CHUNKS):
            sums += shared_tiles[part * CHUNKS + chunk].to(tl.float32) * h_chunks[chunk].to(tl.float32)
    total = tl.sum(sums, axis=1)
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
    norm: RowNorm | None = None,
    shared: SharedWeights | None = None,
    residual_TD: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
    config: RowExpertsConfig | None = None,
) -> torch.Tensor:
    """`routed_experts` for very few rows; an expert that several rows pick is read for each of them.

    With `norm` of RMSNorm(x); with `shared` its MLP's result is added. float32 sums, rounded to the dtype behind the
    gate and at the end. `out` may be the residual, and both may be x. `use_pdl` as in `rms_norm`.
    """
    (num_rows, hidden), (_, _, mlp), num_picks = x_TD.shape, w_down_EDF.shape, routes.expert_ids_TA.shape[1]
    num_parts = 0 if shared is None else shared.w_down.shape[1] // mlp
    _check(x_TD, routes, w_gate_up_E2FD, w_down_EDF, shared)
    out = torch.empty_like(x_TD) if out is None else out
    assert out.is_contiguous() and (residual_TD is None or residual_TD.is_contiguous())
    if num_rows == 0:
        return out
    itemsize = x_TD.element_size()
    config = config or default_row_config(hidden, mlp, itemsize)
    gated_PF = x_TD.new_empty(num_rows * (num_picks + num_parts), mlp)
    shared_gate_up, shared_down = (x_TD, x_TD) if shared is None else shared
    block_k = _block_k(config.gate_up_warps, hidden, itemsize)
    _row_gate_up_kernel[(triton.cdiv(mlp, config.gate_up_columns), num_rows * (num_picks + num_parts))](
        x_TD, x_TD if norm is None else norm.weight_D, w_gate_up_E2FD, shared_gate_up, routes.expert_ids_TA, gated_PF,
        num_rows * num_parts, x_TD.stride(0), w_gate_up_E2FD.stride(0), mlp, 0.0 if norm is None else norm.eps,
        A=num_picks, S=num_parts, K=hidden, BLOCK_N=config.gate_up_columns, BLOCK_K=block_k,
        CHUNKS=triton.cdiv(hidden, block_k), HAS_NORM=norm is not None, HAS_GDC=has_gdc(x_TD.device),
        num_warps=config.gate_up_warps, launch_pdl=use_pdl,
    )  # fmt: skip
    block_k = _block_k(config.down_warps, mlp, itemsize)
    _row_down_kernel[(triton.cdiv(hidden, config.down_columns), num_rows)](
        gated_PF, w_down_EDF, shared_down, routes.expert_ids_TA, routes.weights_TA,
        out if residual_TD is None else residual_TD, out, w_down_EDF.stride(0), hidden, A=num_picks, S=num_parts, K=mlp,
        BLOCK_N=config.down_columns, BLOCK_K=block_k, CHUNKS=triton.cdiv(mlp, block_k),
        HAS_RESIDUAL=residual_TD is not None, HAS_GDC=has_gdc(x_TD.device), num_warps=config.down_warps,
        launch_pdl=use_pdl,
    )  # fmt: skip
    return out


def row_experts_reference(
    x_TD: torch.Tensor,
    routes: Routes,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    *,
    norm: RowNorm | None = None,
    shared: SharedWeights | None = None,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `row_experts`, in torch."""
    if norm is not None:
        x_TD = rms_norm_reference(x_TD, norm.weight_D, norm.eps)
    if shared is not None:
        shared_TD = silu_mul_reference(x_TD.float() @ shared.w_gate_up.float().t()) @ shared.w_down.float().t()
        residual_TD = shared_TD if residual_TD is None else residual_TD.float() + shared_TD
    return routed_experts_reference(x_TD, routes, w_gate_up_E2FD, w_down_EDF, residual_TD)


def default_row_config(hidden: int, mlp: int, itemsize: int) -> RowExpertsConfig:
    """A few rows of a weight for one or two warps, so that many programs are under way on each SM.

    Measured on one H200 with the shapes of Qwen3-30B-A3B and DeepSeek-V2-Lite in bf16.
    """
    row_bytes, down_bytes = hidden * itemsize, mlp * itemsize
    return RowExpertsConfig(
        gate_up_columns=2 if row_bytes <= 8192 else 1,
        gate_up_warps=2 if row_bytes <= 4096 else 4 if row_bytes <= 8192 else 8,
        down_columns=2,
        down_warps=1 if down_bytes < 4096 else 2 if down_bytes < 8192 else 4 if down_bytes < 16384 else 8,
    )


def fits_row_experts(w_down_EDF: torch.Tensor, shared: SharedWeights | None) -> bool:
    """True if a shared MLP is one or two whole experts wide."""
    mlp = w_down_EDF.shape[2]
    return shared is None or shared.w_down.shape[1] in (mlp, 2 * mlp)


def _block_k(num_warps: int, depth: int, itemsize: int) -> int:
    """Numbers that the program's threads load at once, 16 bytes each; no more than twice the depth."""
    return min(_LANES * num_warps * _LOAD_BYTES // itemsize, int(triton.next_power_of_2(depth)))


def _check(
    x_TD: torch.Tensor,
    routes: Routes,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    shared: SharedWeights | None,
) -> None:
    num_experts, hidden, mlp = w_down_EDF.shape
    assert w_gate_up_E2FD.shape == (num_experts, 2 * mlp, hidden), (w_gate_up_E2FD.shape, w_down_EDF.shape)
    assert x_TD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype and x_TD.stride(1) == 1, x_TD.stride()
    assert w_gate_up_E2FD.stride()[1:] == (hidden, 1) and w_down_EDF.stride()[1:] == (mlp, 1), w_down_EDF.stride()
    assert routes.expert_ids_TA.is_contiguous() and routes.weights_TA.is_contiguous()
    if shared is not None:
        wide = shared.w_down.shape[1]
        assert wide % mlp == 0 and shared.w_gate_up.shape == (2 * wide, hidden), shared.w_gate_up.shape
        assert all(w.is_contiguous() and w.dtype == x_TD.dtype for w in shared), shared.w_down.stride()
