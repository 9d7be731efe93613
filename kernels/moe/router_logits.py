"""Logits of a router in float32, whatever the dtype of the rows: one expert for one row a program.

T rows, D hidden size, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _router_logits_kernel(x_ptr, w_ptr, out_ptr, x_stride, D, E, BLOCK: tl.constexpr, PDL: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    features = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + expert * D + features, mask=features < D, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + features, mask=features < D, other=0.0)
    tl.store(out_ptr + row * E + expert, tl.sum(x.to(tl.float32) * w.to(tl.float32), axis=0))


def router_logits(x_TD: torch.Tensor, w_ED: torch.Tensor, *, use_pdl: bool = False) -> torch.Tensor:
    """x @ w^T as float32 [T, E], for few rows: each reads all of w. A row's bits depend on the row alone.

    w contiguous, of any floating dtype. `use_pdl`: w is read while the kernel ahead ends (Hopper and later).
    """
    (num_rows, hidden), num_experts = x_TD.shape, len(w_ED)
    assert w_ED.shape[1] == hidden and w_ED.is_contiguous() and x_TD.stride(1) == 1, (w_ED.shape, x_TD.stride())
    assert num_rows < 1 << 16, num_rows
    out_TE = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x_TD.device)
    if num_rows:
        _router_logits_kernel[(num_experts, num_rows)](
            x_TD, w_ED, out_TE, x_TD.stride(0), hidden, num_experts, BLOCK=triton.next_power_of_2(hidden), PDL=use_pdl,
            num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    return out_TE


def router_logits_reference(x_TD: torch.Tensor, w_ED: torch.Tensor) -> torch.Tensor:
    """The same as `router_logits`, in torch."""
    return x_TD.float() @ w_ED.float().t()
