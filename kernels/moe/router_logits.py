"""Logits of a router in float32, whatever the dtype of the rows.

Few rows: one expert for one row a program, behind the norm if there is one. More: tiles of rows by experts on tensor
cores, with float32 weights in two parts of 11 bits each, so that no product is rounded. Whoever reads the logits adds
up what the parts of the depth make of them.

T rows, D hidden size, E experts, P parts of the depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.rms_norm import rms_norm_reference

_FEW_ROWS = 8
"""Up to so many, each row reads all weights anew."""
_MANY_ROWS = 1024
_TILE_ROWS, _TILE_EXPERTS, _DEPTH = 16, 64, 128
# Parts of the depth are summed by programs of their own: one sum over all of it is a long chain of dependent products,
# and tiles of a decode's rows are too few for the SMs. Those of many rows are not, and parts take memory.
_PARTS, _PARTS_OF_MANY = 16, 2


@triton.jit
def _router_logits_kernel(
    x_ptr, w_ptr, norm_ptr, out_ptr, x_stride, D, E, eps, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    features = tl.arange(0, BLOCK)
    mask = features < D
    w = tl.load(w_ptr + expert * D + features, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        norm = tl.load(norm_ptr + features, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + features, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if HAS_NORM:
        # Rounded as `rms_norm` does.
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        x = ((x * scale).to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * E + expert, tl.sum(x * w, axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _router_logits_tile_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, x_stride, D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    features = part * STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask, expert_mask = (rows < num_rows)[:, None], (experts < E)[None, :]
    x_at = x_ptr + rows[:, None] * x_stride + features[None, :]
    w_at = w_ptr + experts[None, :] * D + features[:, None]
    # Weights, which no kernel writes, travel while the kernel ahead ends.
    w = tl.load(w_at, mask=(features < D)[:, None] & expert_mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    upper_sums = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    lower_sums = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, STEPS * BLOCK_K, BLOCK_K):
        x = tl.load(x_at + start, mask=row_mask & (features < D - start)[None, :], other=0.0)
        next_start = start + BLOCK_K
        in_row = (features < D - next_start) & (next_start < STEPS * BLOCK_K)
        next_w = tl.load(w_at + next_start, mask=in_row[:, None] & expert_mask, other=0.0)
        if x.dtype == w.dtype:
            upper_sums = tl.dot(x, w, upper_sums, input_precision="ieee")
        else:
            # Numbers of 16 bits are TF32 as they are; of float32 the upper 11 bits are, and so is what remains of it
            # but for its last two bits.
            x, wide = x.to(tl.float32), w.to(tl.float32)
            upper = (wide.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            lower_sums = tl.dot(x, wide - upper, lower_sums, input_precision="tf32")
            upper_sums = tl.dot(x, upper, upper_sums, input_precision="tf32")
        w = next_w
    out_at = out_ptr + (part * num_rows + rows[:, None]) * E + experts[None, :]
    tl.store(out_at, lower_sums + upper_sums, mask=row_mask & expert_mask)


def router_logits(
    x_TD: torch.Tensor,
    w_ED: torch.Tensor,
    norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    use_pdl: bool = False,
    is_deterministic: bool = False,
) -> torch.Tensor:
    """x @ w^T as float32 parts [P, T, E], which `route` adds, of RMSNorm(x) where a norm is given, for up to 8 rows.

    w contiguous, of any floating dtype. A row's bits depend on the row, on whether there are more than 8 and on whether
    there are 1,024; is_deterministic: on the row alone. `use_pdl` as in `rms_norm`; weights may be read while the
    kernel ahead ends.
    """
    (num_rows, hidden), num_experts = x_TD.shape, len(w_ED)
    assert w_ED.shape[1] == hidden and w_ED.is_contiguous() and x_TD.stride(1) == 1, (w_ED.shape, x_TD.stride())
    if num_rows == 0:
        return torch.empty(1, 0, num_experts, dtype=torch.float32, device=x_TD.device)
    if num_rows <= _FEW_ROWS and not is_deterministic:
        out_PTE = torch.empty(1, num_rows, num_experts, dtype=torch.float32, device=x_TD.device)
        _router_logits_kernel[(num_experts, num_rows)](
            x_TD, w_ED, x_TD if norm_D is None else norm_D, out_PTE, x_TD.stride(0), hidden, num_experts, eps,
            BLOCK=triton.next_power_of_2(hidden), HAS_NORM=norm_D is not None, PDL=use_pdl, num_warps=4,
            launch_pdl=use_pdl,
        )  # fmt: skip
        return out_PTE
    assert norm_D is None, "the norm of many rows is a kernel of its own"
    block_e = min(_TILE_EXPERTS, max(16, triton.next_power_of_2(num_experts)))
    most_parts = _PARTS if num_rows < _MANY_ROWS or is_deterministic else _PARTS_OF_MANY
    steps = triton.cdiv(hidden, most_parts * _DEPTH)
    num_parts = triton.cdiv(hidden, steps * _DEPTH)
    out_PTE = torch.empty(num_parts, num_rows, num_experts, dtype=torch.float32, device=x_TD.device)
    _router_logits_tile_kernel[(num_parts, triton.cdiv(num_rows, _TILE_ROWS), triton.cdiv(num_experts, block_e))](
        x_TD, w_ED, out_PTE, num_rows, x_TD.stride(0), D=hidden, E=num_experts, BLOCK_T=_TILE_ROWS, BLOCK_E=block_e,
        BLOCK_K=_DEPTH, STEPS=steps, PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip
    return out_PTE


def router_logits_reference(
    x_TD: torch.Tensor, w_ED: torch.Tensor, norm_D: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """The same as `router_logits`, in torch."""
    if norm_D is not None:
        x_TD = rms_norm_reference(x_TD, norm_D, eps)
    return x_TD.float() @ w_ED.float().t()
