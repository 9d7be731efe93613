"""GEMV with big weights at memory speed, for up to 8 rows.

M rows, K features in, N features out, F mlp features.

At M = 1 a weight is used once: all that counts is that every multiprocessor has enough loads under way. A program
holds `rows` whole rows of the weight in registers: it loads all of them at once, 16 bytes a thread and load, then
normalises its input while they travel, multiplies, and reduces once. Several programs a multiprocessor overlap each
other's reductions; many more programs than fit at once even out the tail. Nothing is pipelined within a program.

With programmatic dependent launch (PDL) the weights, which no kernel writes, are prefetched before the previous
kernel has ended: its tail and the start of this one share memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from radixmesh.kernels.hopper import has_gdc
from radixmesh.kernels.inverse_rms import inverse_rms_reference
from radixmesh.kernels.rms_norm import rms_norm_reference

MAX_ROWS = 8
"""Most rows of x: beyond, a tensor core GEMM is faster."""
_LANES = 32
_LOAD_BYTES = 16


class Shape(NamedTuple):
    """Key of a tuned configuration: `num_out` rows of the weight a GEMM (of gate or up alone if gated)."""

    num_out: int
    num_in: int
    is_gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvConfig:
    """Tiling of a GEMM. A program takes `rows` outputs with `num_warps` warps side by side along K."""

    rows: int
    num_warps: int
    max_registers: int | None = None
    """A cap a thread, to have more programs on a multiprocessor."""


# Chosen by reasoning on the loads under way: 8 to 16 a thread.
_TUNED: Mapping[Shape, GemvConfig] = MappingProxyType(
    {
        Shape(5120, 3072, False): GemvConfig(rows=4, num_warps=4),
        Shape(3072, 3072, False): GemvConfig(rows=4, num_warps=4),
        Shape(8192, 3072, True): GemvConfig(rows=2, num_warps=4),
        Shape(3072, 8192, False): GemvConfig(rows=2, num_warps=8),
        Shape(128256, 3072, False): GemvConfig(rows=4, num_warps=4),
    }
)


@triton.jit
def weight_tiles(
    w_ptr, first_row, stride, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr
):
    """All of the program's rows, as CHUNKS tiles [BLOCK_N, BLOCK_K]: every load is issued before any is used.

    stride: numbers from one row to the next; K where they lie behind each other."""
    # The last program's surplus rows read the last row again and are not stored.
    rows = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_row)
    features = tl.arange(0, BLOCK_K)
    at = w_ptr + first_row.to(tl.int64) * stride + rows[:, None] * stride + features[None, :]
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        if (chunk + 1) * BLOCK_K <= K:
            tiles = tiles + (tl.load(at + chunk * BLOCK_K, eviction_policy="evict_first"),)
        else:
            mask = (chunk * BLOCK_K + features < K)[None, :]
            tiles = tiles + (tl.load(at + chunk * BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def row_chunks(x_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr):
    """A vector [K] as CHUNKS tiles [1, BLOCK_K], float32: shaped so that they lie as the weight's tiles do."""
    features = tl.arange(0, BLOCK_K)[None, :]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        if (chunk + 1) * BLOCK_K <= K:
            chunks = chunks + (tl.load(x_ptr + chunk * BLOCK_K + features),)
        else:
            at = chunk * BLOCK_K + features
            chunks = chunks + (tl.load(x_ptr + at, mask=at < K, other=0.0),)
    return chunks


@triton.jit
def row_scale(x_chunks, eps, K: tl.constexpr, CHUNKS: tl.constexpr):
    """Inverse RMS of a row, [1] float32."""
    squares = x_chunks[0].to(tl.float32) * x_chunks[0].to(tl.float32)
    for chunk in tl.static_range(1, CHUNKS):
        squares += x_chunks[chunk].to(tl.float32) * x_chunks[chunk].to(tl.float32)
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def normed_chunks(x_chunks, norm_chunks, scale, CHUNKS: tl.constexpr):
    """RMSNorm of a row given its inverse RMS, rounded as `rms_norm` does."""
    dtype = x_chunks[0].dtype
    normed = ()
    for chunk in tl.static_range(CHUNKS):
        unit = (x_chunks[chunk].to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32)
        normed = normed + ((unit * norm_chunks[chunk].to(tl.float32)).to(dtype),)
    return normed


@triton.jit
def dots(tiles, x_chunks, CHUNKS: tl.constexpr):
    """float32 [BLOCK_N]: every row of the tiles times x."""
    terms = tiles[0].to(tl.float32) * x_chunks[0].to(tl.float32)
    for chunk in tl.static_range(1, CHUNKS):
        terms += tiles[chunk].to(tl.float32) * x_chunks[chunk].to(tl.float32)
    return tl.sum(terms, axis=1)


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, N, eps, M: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_NORMED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_GDC: tl.constexpr,
):  # fmt: skip
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    tiles = weight_tiles(w_ptr, first_row, K, N, K, BLOCK_N, BLOCK_K, CHUNKS)
    if IS_GATED:
        up_ptr = w_ptr + tl.cast(N, tl.int64) * K
        up_tiles = weight_tiles(up_ptr, first_row, K, N, K, BLOCK_N, BLOCK_K, CHUNKS)
    if HAS_NORM:
        norm_chunks = row_chunks(norm_ptr, K, BLOCK_K, CHUNKS)
    rows = first_row + tl.arange(0, BLOCK_N)
    mask = rows < N
    # Without a dependent launch this waits for nothing; it still keeps the compiler from moving loads of weights down
    # to where they are used.
    if HAS_GDC:
        tl.extra.cuda.gdc_wait()
    for m in tl.static_range(M):
        x_chunks = row_chunks(x_ptr + m * K, K, BLOCK_K, CHUNKS)
        scale = 1.0
        if IS_NORMED:
            scale = row_scale(x_chunks, eps, K, CHUNKS)
        if HAS_NORM:
            x_chunks = normed_chunks(x_chunks, norm_chunks, scale, CHUNKS)
            scale = 1.0
        # Without a norm weight the inverse RMS is applied to the result.
        result = dots(tiles, x_chunks, CHUNKS) * scale
        dtype = x_ptr.dtype.element_ty
        if IS_GATED:
            gate = result.to(dtype).to(tl.float32)
            up = (dots(up_tiles, x_chunks, CHUNKS) * scale).to(dtype).to(tl.float32)
            result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        if HAS_BIAS:
            result += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + m * N + rows, mask=mask, other=0.0).to(tl.float32)
            result = result.to(dtype).to(tl.float32) + residual
        tl.store(out_ptr + m * N + rows, result.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    residual_TN: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float | None = None,
    out: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """x @ w^T, [T, N], of 1 to MAX_ROWS rows; with bias, with residual added, as given. With `eps` x is first
    RMS-normalised, and multiplied by `norm_weight` where there is one.

    All of one dtype (float32, float16, bfloat16) and contiguous; `out` may be float32, and may be the residual itself.
    float32 sums; the GEMM is rounded to the dtype before the residual is added. Rows times `norm_weight` are
    rounded as in `rms_norm`, without it they are not. `use_pdl` as in `rms_norm`, and weights, norm weight included,
    are read before the PDL wait: no previous kernel may be writing them. `config` overrides the tuned one.
    """
    num_out, num_in = w_NK.shape
    _check(x_TK, w_NK, norm_weight_K)
    out = x_TK.new_empty(x_TK.shape[0], num_out) if out is None else out
    assert out.shape == (x_TK.shape[0], num_out) and out.is_contiguous(), (out.shape, out.stride())
    for other in (bias_N, residual_TN):
        assert other is None or (other.dtype == x_TK.dtype and other.is_contiguous()), other
    assert bias_N is None or bias_N.shape == (num_out,), bias_N.shape
    assert residual_TN is None or residual_TN.shape == out.shape, residual_TN.shape
    shape = Shape(num_out, num_in, False)
    _launch(x_TK, w_NK, norm_weight_K, bias_N, residual_TN, out, shape, eps, use_pdl, config)
    return out


def gate_up_silu(
    x_TK: torch.Tensor,
    w_2FK: torch.Tensor,
    norm_weight_K: torch.Tensor | None = None,
    eps: float | None = None,
    out: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """silu(x @ gate^T) x (x @ up^T), [T, F]; w holds the F rows of gate, then those of up. Otherwise as `linear`.

    Both GEMMs, and silu of the first, are rounded to the dtype, as separate operations would.
    """
    assert w_2FK.shape[0] % 2 == 0, w_2FK.shape
    _check(x_TK, w_2FK, norm_weight_K)
    num_out = w_2FK.shape[0] // 2
    out = x_TK.new_empty(x_TK.shape[0], num_out) if out is None else out
    assert out.shape == (x_TK.shape[0], num_out) and out.is_contiguous(), (out.shape, out.stride())
    shape = Shape(num_out, w_2FK.shape[1], True)
    _launch(x_TK, w_2FK, norm_weight_K, None, None, out, shape, eps, use_pdl, config)
    return out


def linear_reference(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    residual_TN: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Reference of `linear`, in torch."""
    if eps is not None and norm_weight_K is None:
        result_TN = functional.linear(x_TK.float(), w_NK.float()) * inverse_rms_reference(x_TK, eps)
        result_TN = (result_TN if bias_N is None else result_TN + bias_N).to(x_TK.dtype)
    else:
        x_TK = x_TK if norm_weight_K is None or eps is None else rms_norm_reference(x_TK, norm_weight_K, eps)
        result_TN = functional.linear(x_TK, w_NK, bias_N)
    return result_TN if residual_TN is None else result_TN + residual_TN


def gate_up_silu_reference(
    x_TK: torch.Tensor, w_2FK: torch.Tensor, norm_weight_K: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Reference of `gate_up_silu`, in torch."""
    gate_TF, up_TF = linear_reference(x_TK, w_2FK, None, None, norm_weight_K, eps).chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF


def default_config(shape: Shape, itemsize: int) -> GemvConfig:
    """The tuned configuration, else one with 8 to 16 loads under way a thread where K and N allow it."""
    tuned = _TUNED.get(shape)
    if tuned is not None:
        return tuned
    row_loads = triton.cdiv(shape.num_in * itemsize, _LOAD_BYTES * _LANES)
    num_warps = 8 if row_loads >= 32 else 4 if row_loads >= 8 else 1
    rows = 1
    while rows < 4 and 2 * rows * (1 + shape.is_gated) * row_loads <= 16 * num_warps:
        rows *= 2
    return GemvConfig(rows=rows, num_warps=num_warps)


def _check(x_TK: torch.Tensor, w_NK: torch.Tensor, norm_weight_K: torch.Tensor | None) -> None:
    assert 1 <= x_TK.shape[0] <= MAX_ROWS and x_TK.is_contiguous(), (x_TK.shape, x_TK.stride())
    assert w_NK.shape[1] == x_TK.shape[1] and w_NK.is_contiguous(), (w_NK.shape, w_NK.stride())
    assert w_NK.dtype == x_TK.dtype, (w_NK.dtype, x_TK.dtype)
    assert norm_weight_K is None or (norm_weight_K.shape == x_TK.shape[1:] and norm_weight_K.dtype == x_TK.dtype)


def _launch(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    norm_weight_K: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
    out: torch.Tensor,
    shape: Shape,
    eps: float | None,
    use_pdl: bool,
    config: GemvConfig | None,
) -> None:
    assert norm_weight_K is None or eps is not None, "a norm's weight without its eps"
    itemsize = x_TK.element_size()
    config = config or default_config(shape, itemsize)
    # Warps lie side by side along K: each thread's 16 bytes of x meet its 16 bytes of every row.
    block_k = _LANES * config.num_warps * _LOAD_BYTES // itemsize
    _gemv_kernel[(triton.cdiv(shape.num_out, config.rows),)](
        x_TK, w_NK, x_TK if norm_weight_K is None else norm_weight_K, x_TK if bias_N is None else bias_N,
        x_TK if residual_TN is None else residual_TN, out, shape.num_out, eps or 0.0, M=x_TK.shape[0], K=shape.num_in,
        BLOCK_N=config.rows, BLOCK_K=block_k, CHUNKS=triton.cdiv(shape.num_in, block_k), IS_GATED=shape.is_gated,
        IS_NORMED=eps is not None, HAS_NORM=norm_weight_K is not None, HAS_BIAS=bias_N is not None,
        HAS_RESIDUAL=residual_TN is not None, HAS_GDC=has_gdc(x_TK.device), num_warps=config.num_warps,
        launch_pdl=use_pdl, maxnreg=config.max_registers,
    )  # fmt: skip
