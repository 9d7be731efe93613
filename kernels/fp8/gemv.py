"""GEMV with FP8 weights at memory speed. Rows stay in the model's dtype.

M rows, K features in, N features out, F mlp features.

Tiled as in `gemv.py`. A thread's 16 bytes are 16 numbers of a row of the weight, next to each other: it
sums them itself, and the sum is multiplied by the scale of the group that they lie in, if that is not the whole row's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from radixmesh.kernels.fp8.quantized import GROUP, QuantizedMatrix
from radixmesh.kernels.gemv import MAX_ROWS, GemvConfig, Shape, weight_tiles
from radixmesh.kernels.hopper import has_gdc
from radixmesh.kernels.inverse_rms import inverse_rms_reference

_LANES = 32
_THREAD_BYTES = 16  # Of a load of a weight, and so many numbers.

# Chosen by reasoning on the loads under way, 8 to 16 a thread, and on what of K is left over in a row's last chunk.
_TUNED: Mapping[Shape, GemvConfig] = MappingProxyType(
    {
        Shape(5120, 3072, False): GemvConfig(rows=4, num_warps=2),
        Shape(3072, 3072, False): GemvConfig(rows=4, num_warps=2),
        Shape(8192, 3072, True): GemvConfig(rows=2, num_warps=2),
        Shape(3072, 8192, False): GemvConfig(rows=2, num_warps=4),
    }
)


@triton.jit
def _scale_tiles(
    scales_ptr, first_row, N, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, IS_ONE_ROW: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """For every RUN numbers of each tile their scale, [BLOCK_N or 1, BLOCK_K / RUN]."""
    COLUMNS: tl.constexpr = (K + GROUP - 1) // GROUP
    if IS_ONE_ROW:
        rows = (first_row + tl.arange(0, 1)) // GROUP_ROWS
    else:
        rows = tl.minimum(first_row + tl.arange(0, BLOCK_N), N - 1) // GROUP_ROWS
    runs = tl.arange(0, BLOCK_K // RUN)
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        column = tl.minimum((chunk * BLOCK_K + runs * RUN) // GROUP, COLUMNS - 1)
        tiles = tiles + (tl.load(scales_ptr + rows[:, None] * COLUMNS + column[None, :]),)
    return tiles


@triton.jit
def _row_chunks(x_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, RUN: tl.constexpr):
    """A vector [K] as CHUNKS tiles [1, BLOCK_K], float32, that lie as the weight's tiles do: a thread has a run.

    It is read in two halves of a run, which are 16 bytes where numbers have two: a tile that was read whole would have
    to travel between threads.
    """
    HALF: tl.constexpr = RUN // 2
    runs = tl.arange(0, BLOCK_K // RUN)[None, :, None] * RUN
    first = runs + tl.arange(0, HALF)[None, None, :]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * BLOCK_K + first
        if (chunk + 1) * BLOCK_K <= K:
            a = tl.load(x_ptr + at)
            b = tl.load(x_ptr + at + HALF)
        else:
            a = tl.load(x_ptr + at, mask=at < K, other=0.0)
            b = tl.load(x_ptr + at + HALF, mask=at + HALF < K, other=0.0)
        both = tl.permute(tl.join(a, b), (0, 1, 3, 2))
        chunks = chunks + (tl.reshape(both, [1, BLOCK_K]).to(tl.float32),)
    return chunks


@triton.jit
def _norm_factor(x_chunks, eps, K: tl.constexpr, CHUNKS: tl.constexpr):
    """Inverse RMS of a row, [1] float32."""
    squares = x_chunks[0] * x_chunks[0]
    for chunk in tl.static_range(1, CHUNKS):
        squares += x_chunks[chunk] * x_chunks[chunk]
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def _times(x_chunks, norm_chunks, CHUNKS: tl.constexpr):
    terms = ()
    for chunk in tl.static_range(CHUNKS):
        terms = terms + (x_chunks[chunk] * norm_chunks[chunk],)
    return terms


@triton.jit
def _dots(
    tiles, scale_tiles, x_chunks, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
    IS_GROUPED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N]: every row of the tiles times x."""
    sums = tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        terms = tiles[chunk].to(tl.float32) * x_chunks[chunk]
        runs = tl.sum(tl.reshape(terms, [BLOCK_N, BLOCK_K // RUN, RUN]), axis=2)
        if IS_GROUPED:
            runs *= scale_tiles[chunk]
        sums += runs
    return tl.sum(sums, axis=1)


@triton.jit
def _fp8_gemv_kernel(
    x_ptr, w_ptr, scales_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, N, eps, M: tl.constexpr, K: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
    RUN: tl.constexpr, IS_GROUPED: tl.constexpr, IS_ONE_ROW: tl.constexpr, IS_GATED: tl.constexpr,
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
    rows = first_row + tl.arange(0, BLOCK_N)
    mask = rows < N
    scale_tiles = ()
    up_scale_tiles = ()
    if IS_GROUPED:
        scale_tiles = _scale_tiles(
            scales_ptr, first_row, N, K, GROUP_ROWS, GROUP, BLOCK_N, BLOCK_K, CHUNKS, IS_ONE_ROW, RUN
        )
        if IS_GATED:
            up_scale_tiles = _scale_tiles(
                scales_ptr, N + first_row, 2 * N, K, GROUP_ROWS, GROUP, BLOCK_N, BLOCK_K, CHUNKS, IS_ONE_ROW, RUN
            )
    else:
        channel_scales = tl.load(scales_ptr + rows, mask=mask, other=0.0)
        if IS_GATED:
            up_channel_scales = tl.load(scales_ptr + N + rows, mask=mask, other=0.0)
    if HAS_NORM:
        norm_chunks = _row_chunks(norm_ptr, K, BLOCK_K, CHUNKS, RUN)
    # Without a dependent launch this waits for nothing; it still keeps the compiler from moving loads of weights down
    # to where they are used.
    if HAS_GDC:
        tl.extra.cuda.gdc_wait()
    for m in tl.static_range(M):
        x_chunks = _row_chunks(x_ptr + m * K, K, BLOCK_K, CHUNKS, RUN)
        factor = 1.0
        if IS_NORMED:
            factor = _norm_factor(x_chunks, eps, K, CHUNKS)
        if HAS_NORM:
            x_chunks = _times(x_chunks, norm_chunks, CHUNKS)
        # The inverse RMS is applied to the result.
        result = _dots(tiles, scale_tiles, x_chunks, BLOCK_N, BLOCK_K, CHUNKS, IS_GROUPED, RUN) * factor
        if not IS_GROUPED:
            result *= channel_scales
        if IS_GATED:
            up = _dots(up_tiles, up_scale_tiles, x_chunks, BLOCK_N, BLOCK_K, CHUNKS, IS_GROUPED, RUN) * factor
            if not IS_GROUPED:
                up *= up_channel_scales
            result = result / (1.0 + tl.exp(-result)) * up
        if HAS_BIAS:
            result += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            result += tl.load(residual_ptr + m * N + rows, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + rows, result.to(out_ptr.dtype.element_ty), mask=mask)


def fp8_gemv(
    x_TK: torch.Tensor,
    w: QuantizedMatrix,
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

    All but w of one dtype (float32, float16, bfloat16) and contiguous; `out` may be the residual itself. float32 from
    the loads on, rounded once, in the end. `use_pdl` and `config` as in `gemv.linear`.
    """
    num_out, num_in = w.shape
    out = x_TK.new_empty(x_TK.shape[0], num_out) if out is None else out
    for other in (bias_N, residual_TN):
        assert other is None or (other.dtype == x_TK.dtype and other.is_contiguous()), other
    assert bias_N is None or bias_N.shape == (num_out,), bias_N.shape
    assert residual_TN is None or residual_TN.shape == out.shape, residual_TN.shape
    shape = Shape(num_out, num_in, False)
    _launch(x_TK, w, norm_weight_K, bias_N, residual_TN, out, shape, eps, use_pdl, config)
    return out


def fp8_gate_up_silu(
    x_TK: torch.Tensor,
    w: QuantizedMatrix,
    norm_weight_K: torch.Tensor | None = None,
    eps: float | None = None,
    out: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """silu(x @ gate^T) x (x @ up^T), [T, F]; w holds the F rows of gate, then those of up. As `fp8_gemv`."""
    assert w.shape[0] % 2 == 0, w.shape
    num_out = w.shape[0] // 2
    out = x_TK.new_empty(x_TK.shape[0], num_out) if out is None else out
    _launch(x_TK, w, norm_weight_K, None, None, out, Shape(num_out, w.shape[1], True), eps, use_pdl, config)
    return out


def fp8_gemv_reference(
    x_TK: torch.Tensor,
    w: QuantizedMatrix,
    bias_N: torch.Tensor | None = None,
    residual_TN: torch.Tensor | None = None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Reference of `fp8_gemv` in torch, before it is rounded: float32."""
    normed_TK = x_TK.float() if norm_weight_K is None else x_TK.float() * norm_weight_K
    result_TN = normed_TK @ w.dequantized().t()
    if eps is not None:
        result_TN *= inverse_rms_reference(x_TK, eps)
    for other in (bias_N, residual_TN):
        result_TN = result_TN if other is None else result_TN + other
    return result_TN


def fp8_gate_up_silu_reference(
    x_TK: torch.Tensor, w: QuantizedMatrix, norm_weight_K: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Reference of `fp8_gate_up_silu` in torch, before it is rounded: float32."""
    gate_TF, up_TF = fp8_gemv_reference(x_TK, w, None, None, norm_weight_K, eps).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF) * up_TF


def default_config(shape: Shape) -> GemvConfig:
    """The tuned configuration, else one with up to 16 loads under way a thread, four a row."""
    tuned = _TUNED.get(shape)
    if tuned is not None:
        return tuned
    warp_loads = triton.cdiv(shape.num_in, _LANES * _THREAD_BYTES)
    num_warps = 1
    while num_warps < 8 and 4 * num_warps < warp_loads:
        num_warps *= 2
    rows = 1
    while rows < 4 and 2 * rows * (1 + shape.is_gated) * triton.cdiv(warp_loads, num_warps) <= 16:
        rows *= 2
    return GemvConfig(rows=rows, num_warps=num_warps)


def _launch(
    x_TK: torch.Tensor,
    w: QuantizedMatrix,
    norm_weight_K: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
    out: torch.Tensor,
    shape: Shape,
    eps: float | None,
    use_pdl: bool,
    config: GemvConfig | None,
) -> None:
    assert 1 <= x_TK.shape[0] <= MAX_ROWS and x_TK.is_contiguous(), (x_TK.shape, x_TK.stride())
    assert x_TK.shape[1] == shape.num_in, (x_TK.shape, w.shape)
    assert norm_weight_K is None or (eps is not None and norm_weight_K.shape == x_TK.shape[1:]), norm_weight_K
    assert out.shape == (x_TK.shape[0], shape.num_out) and out.is_contiguous(), (out.shape, out.stride())
    config = config or default_config(shape)
    block_k = _LANES * config.num_warps * _THREAD_BYTES
    # The rows of a program, and where there are two halves of the weight those of either, lie in one block.
    is_one_row = w.group_rows % config.rows == 0 and (not shape.is_gated or shape.num_out % config.rows == 0)
    _fp8_gemv_kernel[(triton.cdiv(shape.num_out, config.rows),)](
        x_TK, w.data_NK, w.scales, x_TK if norm_weight_K is None else norm_weight_K,
        x_TK if bias_N is None else bias_N, x_TK if residual_TN is None else residual_TN, out, shape.num_out,
        eps or 0.0, M=x_TK.shape[0], K=shape.num_in, GROUP_ROWS=w.group_rows, GROUP=GROUP, BLOCK_N=config.rows,
        BLOCK_K=block_k, CHUNKS=triton.cdiv(shape.num_in, block_k), RUN=_THREAD_BYTES, IS_GROUPED=w.is_grouped,
        IS_ONE_ROW=is_one_row, IS_GATED=shape.is_gated, IS_NORMED=eps is not None,
        HAS_NORM=norm_weight_K is not None, HAS_BIAS=bias_N is not None, HAS_RESIDUAL=residual_TN is not None,
        HAS_GDC=has_gdc(x_TK.device), num_warps=config.num_warps, launch_pdl=use_pdl, maxnreg=config.max_registers,
    )  # fmt: skip
