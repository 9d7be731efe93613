"""The gate of a SwiGLU block (Shazeer 2020): silu(gate) x up of both side by side. T rows, F mlp features."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from radixmesh.kernels.inverse_rms import check_norm_input, inverse_rms, inverse_rms_reference

# Features of one program, twice 16 bytes of gate and of up a thread. Few programs a row, since each reads the row that
# was not normed; two and more a multiprocessor from 128 rows on.
_BLOCK = 4096


@triton.jit
def _silu_mul_kernel(
    x_ptr, bias_ptr, norm_input_ptr, out_ptr, F, eps, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DEFERRED_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = features < F
    if HAS_BIAS:
        gate_bias = tl.load(bias_ptr + features, mask=mask, other=0.0).to(tl.float32)
        up_bias = tl.load(bias_ptr + F + features, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x_ptr + row * 2 * F + features, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + features, mask=mask, other=0.0).to(tl.float32)
    if HAS_DEFERRED_NORM:
        scale = inverse_rms(norm_input_ptr, row, eps, D, BLOCK_D)
        gate *= scale
        up *= scale
    if HAS_BIAS:
        gate += gate_bias
        up += up_bias
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * F + features, gated.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(
    gate_up_T2F: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    norm_input_TD: torch.Tensor | None = None,
    bias_2F: torch.Tensor | None = None,
    eps: float = 1e-6,
    use_pdl: bool = False,
) -> torch.Tensor:
    """silu(gate) x up, [T, F], of gate and up side by side [T, 2F], contiguous; float32, float16 or bfloat16.

    `norm_input` [T, D], contiguous: input of a deferred-norm GEMM whose result is gate and up; both are first
    multiplied by each row's inverse RMS, 1 / sqrt(mean(x^2) + eps). Then `bias` is added. float32 inside, rounded
    to the dtype at the end. `use_pdl` as in `rms_norm`; the bias is read without waiting.
    """
    num_rows, width = gate_up_T2F.shape
    assert width % 2 == 0 and gate_up_T2F.is_contiguous(), (gate_up_T2F.shape, gate_up_T2F.stride())
    assert bias_2F is None or (bias_2F.shape == (width,) and bias_2F.is_contiguous()), bias_2F.shape
    if norm_input_TD is not None:
        check_norm_input(norm_input_TD, gate_up_T2F)
    out = gate_up_T2F.new_empty(num_rows, width // 2) if out is None else out
    assert out.shape == (num_rows, width // 2) and out.is_contiguous() and out.dtype == gate_up_T2F.dtype, out.shape
    if num_rows:
        block = min(triton.next_power_of_2(width // 2), _BLOCK)
        num_features = 1 if norm_input_TD is None else norm_input_TD.shape[1]
        _silu_mul_kernel[(num_rows, triton.cdiv(width // 2, block))](
            gate_up_T2F, gate_up_T2F if bias_2F is None else bias_2F,
            gate_up_T2F if norm_input_TD is None else norm_input_TD, out, width // 2, eps, D=num_features, BLOCK=block,
            BLOCK_D=triton.next_power_of_2(num_features), HAS_BIAS=bias_2F is not None,
            HAS_DEFERRED_NORM=norm_input_TD is not None, PDL=use_pdl, num_warps=max(block // 512, 1),
            launch_pdl=use_pdl,
        )  # fmt: skip
    return out


def silu_mul_reference(
    gate_up_T2F: torch.Tensor,
    *,
    norm_input_TD: torch.Tensor | None = None,
    bias_2F: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Reference of `silu_mul`, in torch."""
    x_T2F = gate_up_T2F.float() if norm_input_TD is None else gate_up_T2F * inverse_rms_reference(norm_input_TD, eps)
    gate_TF, up_TF = (x_T2F if bias_2F is None else x_T2F + bias_2F).chunk(2, dim=-1)
    return (functional.silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)
