"""The gate of a SwiGLU block (Shazeer 2020), made FP8 for the GEMM behind it. T rows, F mlp features."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.fp8.quantize_rows import new_quantized, store_quantized
from radixmesh.kernels.fp8.quantized import GROUP, QuantizedRows, quantize_rows_reference

# Features of one program where groups are smaller than a row, twice 16 bytes of gate and of up a thread.
_BLOCK = 2048
_MAX_FEATURES = 1 << 16  # One program holds a row where they are not.


# The number of rows is not compiled in.
@triton.jit(do_not_specialize=["scales_stride"])
def _silu_quantize_kernel(
    x_ptr, bias_ptr, data_ptr, scales_ptr, scales_stride, F: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    features = first + tl.arange(0, BLOCK)
    mask = features < F
    if HAS_BIAS:
        gate_bias = tl.load(bias_ptr + features, mask=mask, other=0.0).to(tl.float32)
        up_bias = tl.load(bias_ptr + F + features, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x_ptr + row * 2 * F + features, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + features, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += gate_bias
        up += up_bias
    y = gate / (1.0 + tl.exp(-gate)) * up
    store_quantized(y, data_ptr + row * F, scales_ptr + row, scales_stride, first, F, BLOCK, GROUP, IS_GROUPED)


def silu_quantize(
    gate_up_T2F: torch.Tensor, *, bias_2F: torch.Tensor | None = None, is_grouped: bool, use_pdl: bool = False
) -> QuantizedRows:
    """silu(gate) x up of gate and up side by side [T, 2F], contiguous, as FP8 [T, F]; `bias` is added first. float32
    inside. `use_pdl` as in `rms_norm`; the bias is read without waiting."""
    num_rows, width = gate_up_T2F.shape
    assert width % 2 == 0 and gate_up_T2F.is_contiguous(), (gate_up_T2F.shape, gate_up_T2F.stride())
    assert width // 2 <= _MAX_FEATURES, width
    assert bias_2F is None or (bias_2F.shape == (width,) and bias_2F.is_contiguous()), bias_2F.shape
    out = new_quantized(num_rows, width // 2, gate_up_T2F.device, is_grouped=is_grouped)
    if num_rows:
        block = max(triton.next_power_of_2(width // 2), GROUP)
        block = min(block, _BLOCK) if is_grouped else block
        _silu_quantize_kernel[(num_rows, triton.cdiv(width // 2, block))](
            gate_up_T2F, gate_up_T2F if bias_2F is None else bias_2F, out.data_PK, out.scales_PG,
            out.scales_PG.stride(1), F=width // 2, BLOCK=block, GROUP=GROUP, IS_GROUPED=is_grouped,
            HAS_BIAS=bias_2F is not None, PDL=use_pdl, num_warps=min(max(block // 512, 1), 32), launch_pdl=use_pdl,
        )  # fmt: skip
    return out


def silu_quantize_reference(
    gate_up_T2F: torch.Tensor, *, bias_2F: torch.Tensor | None = None, is_grouped: bool
) -> QuantizedRows:
    """Reference of `silu_quantize`, in torch."""
    x_T2F = gate_up_T2F.float() if bias_2F is None else gate_up_T2F.float() + bias_2F
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return quantize_rows_reference(torch.nn.functional.silu(gate_TF) * up_TF, is_grouped=is_grouped)
