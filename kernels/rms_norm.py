"""RMSNorm of rows (Zhang and Sennrich 2019). T rows, D features."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.inverse_rms import inverse_rms_reference

_MAX_FEATURES = 1 << 16  # One program holds a row.


@triton.jit
def _rms_norm_kernel(
    x_ptr, w_ptr, out_ptr, x_stride, out_stride, D, eps, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK_D)
    mask = features < D
    w = tl.load(w_ptr + features, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + features, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    # Rounded before the weight is applied, as checkpoints were trained.
    normed = (x * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + features, (normed * w).to(dtype), mask=mask)


def rms_norm(
    x_TD: torch.Tensor, w_D: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, use_pdl: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to the dtype, times w. float32 inside.

    x [T, D] of float32, float16 or bfloat16 with contiguous features (rows may be strided); w [D] of that dtype.
    `out` may be x. With `use_pdl` the kernel may be launched before the one ahead of it has ended (Hopper and later),
    and lets the next one do so: the next must wait (griddepcontrol) before it reads.
    """
    _check(x_TD, w_D)
    out = torch.empty_like(x_TD) if out is None else out
    assert out.shape == x_TD.shape and out.dtype == x_TD.dtype and out.stride(1) == 1, (out.shape, out.dtype)
    num_rows, num_features = x_TD.shape
    if num_rows:
        block = triton.next_power_of_2(num_features)
        # 16 features a thread: two loads of 16 bytes in flight where the dtype has two bytes.
        num_warps = min(max(block // 512, 1), 16)
        _rms_norm_kernel[(num_rows,)](
            x_TD, w_D, out, x_TD.stride(0), out.stride(0), num_features, eps, BLOCK_D=block, PDL=use_pdl,
            num_warps=num_warps, launch_pdl=use_pdl,
        )  # fmt: skip
    return out


def rms_norm_reference(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of `rms_norm`, in torch."""
    return w_D * (x_TD * inverse_rms_reference(x_TD, eps)).to(x_TD.dtype)


def _check(x_TD: torch.Tensor, w_D: torch.Tensor) -> None:
    assert x_TD.dim() == 2 and x_TD.stride(1) == 1, (x_TD.shape, x_TD.stride())
    assert w_D.shape == x_TD.shape[1:] and w_D.dtype == x_TD.dtype, (w_D.shape, w_D.dtype, x_TD.shape, x_TD.dtype)
    assert x_TD.shape[1] <= _MAX_FEATURES, x_TD.shape
