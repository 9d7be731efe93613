"""The gate of a SwiGLU block (Shazeer 2020): silu(gate) x up of both side by side. T rows, F mlp features."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = features < F
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x_ptr + row * 2 * F + features, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * F + F + features, mask=mask, other=0.0)
    gate_f32 = gate.to(tl.float32)
    # Rounded between the two products, as two operations of torch would.
    activated = (gate_f32 / (1.0 + tl.exp(-gate_f32))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * F + features, product.to(gate.dtype), mask=mask)


def silu_mul(gate_up_T2F: torch.Tensor, out: torch.Tensor | None = None, *, use_pdl: bool = False) -> torch.Tensor:
    """silu(gate) x up, [T, F], of gate and up side by side [T, 2F], contiguous; float32, float16 or bfloat16.

    float32 inside, rounded to the dtype after silu and after the product. `use_pdl` as in `rms_norm`.
    """
    num_rows, width = gate_up_T2F.shape
    assert width % 2 == 0 and gate_up_T2F.is_contiguous(), (gate_up_T2F.shape, gate_up_T2F.stride())
    out = gate_up_T2F.new_empty(num_rows, width // 2) if out is None else out
    assert out.shape == (num_rows, width // 2) and out.is_contiguous() and out.dtype == gate_up_T2F.dtype, out.shape
    if num_rows:
        block = min(triton.next_power_of_2(width // 2), 1024)
        grid = (num_rows, triton.cdiv(width // 2, block))
        num_warps = max(block // 256, 1)
        _silu_mul_kernel[grid](
            gate_up_T2F, out, width // 2, BLOCK=block, PDL=use_pdl, num_warps=num_warps, launch_pdl=use_pdl
        )
    return out


def silu_mul_reference(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """What `silu_mul` computes, in torch."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF
