"""Inverse RMS of rows, by which RMSNorm (Zhang and Sennrich 2019) scales them. T rows, D features.

A norm in front of a GEMM needs no kernel of its own (deferred-norm GEMM): its weight is folded into the GEMM's, and
the inverse RMS, one number a row, commutes with the GEMM. The kernel that reads the result computes it from the row
itself, which is a few kilobytes in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_FEATURES = 1 << 16  # One program holds a row.


@triton.jit
def inverse_rms(x_ptr, row, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row (int64) of x [T, D], contiguous; float32. The same bits in every program that
    has as many warps."""
    features = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + row * D + features, mask=features < D, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)


def inverse_rms_reference(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of `inverse_rms` for all rows, in torch: [T, 1] float32."""
    return torch.rsqrt(x_TD.float().pow(2).mean(-1, keepdim=True) + eps)


def check_norm_input(norm_input_TD: torch.Tensor, result_TN: torch.Tensor) -> None:
    """Asserts that `norm_input` fits a deferred-norm GEMM result: same rows and dtype, contiguous."""
    assert norm_input_TD.dim() == 2 and norm_input_TD.is_contiguous(), (norm_input_TD.shape, norm_input_TD.stride())
    assert norm_input_TD.shape[0] == result_TN.shape[0], (norm_input_TD.shape, result_TN.shape)
    assert norm_input_TD.dtype == result_TN.dtype, (norm_input_TD.dtype, result_TN.dtype)
    assert norm_input_TD.shape[1] <= _MAX_FEATURES, norm_input_TD.shape
