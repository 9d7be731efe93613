"""Rows made FP8 for a GEMM with FP8 weights: as they are, RMS-normed, or normed after a GEMM was added to them.

T rows, D features. Each row, or each 128 features of it, by its own largest number: nothing is known beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.fp8.quantized import FP8, GROUP, QuantizedRows, quantize_rows_reference
from radixmesh.kernels.inverse_rms import inverse_rms_reference

_MAX_FEATURES = 1 << 16  # One program holds a row.
# Libraries take columns of scales that begin at multiples of 16 bytes.
_PADDED_ROWS = 4


@triton.jit
def store_quantized(
    y, data_ptr, scales_ptr, scales_stride, first, D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
):  # fmt: skip
    """Stores BLOCK features of a row, from `first` on, float32 and zeros beyond D; the pointers are those of the row,
    whose scales are scales_stride apart. Without groups the features are the whole row."""
    features = first + tl.arange(0, BLOCK)
    if IS_GROUPED:
        groups = tl.reshape(y, [BLOCK // GROUP, GROUP])
        largest = tl.max(tl.abs(groups), axis=1)
        scales = tl.where(largest > 0, largest / 448.0, 1.0)
        index = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales_ptr + index * scales_stride, scales, mask=index < (D + GROUP - 1) // GROUP)
        y = tl.reshape(groups * (1.0 / scales)[:, None], [BLOCK])
    else:
        largest = tl.max(tl.abs(y), axis=0)
        scale = tl.where(largest > 0, largest / 448.0, 1.0)
        tl.store(scales_ptr, scale)
        y = y * (1.0 / scale)
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    tl.store(data_ptr + features, y.to(tl.float8e4nv), mask=features < D)


# The number of rows is not compiled in.
@triton.jit(do_not_specialize=["scales_stride", "num_from"])
def _quantize_rows_kernel(
    x_ptr, delta_ptr, bias_ptr, norm_ptr, from_rows_ptr, data_ptr, scales_ptr, x_stride, scales_stride, num_from, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, IS_GROUPED: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # from_rows_ptr: None where rows are read in their order.
    row = tl.program_id(0).to(tl.int64)
    from_row = row
    features = tl.arange(0, BLOCK_D)
    mask = features < D
    if HAS_NORM:
        norm = tl.load(norm_ptr + features, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + features, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if from_rows_ptr is not None:
        from_row = tl.load(from_rows_ptr + row).to(tl.int64)
        if from_row >= num_from:
            return
    x = tl.load(x_ptr + from_row * x_stride + features, mask=mask, other=0.0)
    y = x.to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * D + features, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            delta += bias
        added = (y + delta).to(x.dtype)
        tl.store(x_ptr + row * x_stride + features, added, mask=mask)
        # The norm is taken of the sum as it will be read again, rounded.
        y = added.to(tl.float32)
    if HAS_NORM:
        y = y * tl.rsqrt(tl.sum(y * y, axis=0) / D + eps) * norm
    store_quantized(y, data_ptr + row * D, scales_ptr + row, scales_stride, 0, D, BLOCK_D, GROUP, IS_GROUPED)


def quantize_rows(
    x_TD: torch.Tensor, *, is_grouped: bool, from_rows: torch.Tensor | None = None, use_pdl: bool = False
) -> QuantizedRows:
    """x [T, D] of float32, float16 or bfloat16, features contiguous, as FP8. from_rows: int32, contiguous, which rows
    are quantised, in this order; those of T and above hold anything. None: all. `use_pdl` as in `rms_norm`."""
    return _launch(x_TD, None, None, None, 0.0, is_grouped, use_pdl, from_rows)


def norm_quantize(
    x_TD: torch.Tensor,
    w_D: torch.Tensor,
    eps: float,
    *,
    delta_TD: torch.Tensor | None = None,
    bias_D: torch.Tensor | None = None,
    is_grouped: bool,
    use_pdl: bool = False,
) -> QuantizedRows:
    """x / sqrt(mean(x^2) + eps) * w as FP8, in float32 until then. First `delta` [T, D], contiguous, and `bias` [D]
    are added to x in place, and the sum rounded to its dtype. `use_pdl` as in `rms_norm`; norm and bias are read
    without waiting."""
    assert w_D.shape == x_TD.shape[1:] and w_D.is_contiguous(), (w_D.shape, x_TD.shape)
    return _launch(x_TD, delta_TD, bias_D, w_D, eps, is_grouped, use_pdl)


def norm_quantize_reference(
    x_TD: torch.Tensor,
    w_D: torch.Tensor,
    eps: float,
    *,
    delta_TD: torch.Tensor | None = None,
    bias_D: torch.Tensor | None = None,
    is_grouped: bool,
) -> QuantizedRows:
    """Reference of `norm_quantize`, in torch."""
    if delta_TD is not None:
        x_TD += delta_TD.float() if bias_D is None else delta_TD.float() + bias_D
    return quantize_rows_reference(x_TD.float() * inverse_rms_reference(x_TD, eps) * w_D, is_grouped=is_grouped)


def new_quantized(num_rows: int, num_features: int, device: torch.device, *, is_grouped: bool) -> QuantizedRows:
    """Memory for rows, not filled."""
    padded = triton.cdiv(num_rows, _PADDED_ROWS) * _PADDED_ROWS if is_grouped else num_rows
    data = torch.empty(padded, num_features, dtype=FP8, device=device)
    if not is_grouped:
        return QuantizedRows(data, torch.empty(padded, 1, device=device), num_rows, False)
    scales = torch.empty(triton.cdiv(num_features, GROUP), padded, device=device).t()
    return QuantizedRows(data, scales, num_rows, True)


def _launch(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    bias_D: torch.Tensor | None,
    norm_D: torch.Tensor | None,
    eps: float,
    is_grouped: bool,
    use_pdl: bool,
    from_rows: torch.Tensor | None = None,
) -> QuantizedRows:
    num_features = x_TD.shape[1]
    num_rows = len(x_TD) if from_rows is None else len(from_rows)
    assert x_TD.stride(1) == 1 and num_features <= _MAX_FEATURES, (x_TD.shape, x_TD.stride())
    assert delta_TD is None or (delta_TD.shape == x_TD.shape and delta_TD.is_contiguous()), delta_TD.shape
    assert bias_D is None or (delta_TD is not None and bias_D.shape == x_TD.shape[1:]), bias_D.shape
    out = new_quantized(num_rows, num_features, x_TD.device, is_grouped=is_grouped)
    if num_rows:
        block = max(triton.next_power_of_2(num_features), GROUP)
        _quantize_rows_kernel[(num_rows,)](
            x_TD, x_TD if delta_TD is None else delta_TD, x_TD if bias_D is None else bias_D,
            x_TD if norm_D is None else norm_D, from_rows, out.data_PK, out.scales_PG, x_TD.stride(0),
            out.scales_PG.stride(1), len(x_TD), eps, D=num_features, BLOCK_D=block, GROUP=GROUP, IS_GROUPED=is_grouped,
            HAS_DELTA=delta_TD is not None, HAS_BIAS=bias_D is not None, HAS_NORM=norm_D is not None, PDL=use_pdl,
            num_warps=min(max(block // 512, 1), 16), launch_pdl=use_pdl,
        )  # fmt: skip
    return out
