"""Logits of a router in float32, whatever the dtype of the rows.

Few rows: one expert for one row a program, behind the norm if there is one. More: tiles of rows by experts on tensor
cores, with float32 weights in two parts of 11 bits each, so that no product is rounded.

T rows, D hidden size, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.rms_norm import rms_norm_reference

_FEW_ROWS = 8
"""Up to so many, each row reads all weights anew."""
_MANY_ROWS = 1024


class _Tile(NamedTuple):
    rows: int
    experts: int
    depth: int
    parts: int
    num_warps: int
    num_stages: int


# Steps of a decode fill few tiles: these are small, so that more SMs share the work.
_SMALL, _LARGE = _Tile(16, 16, 32, 8, 8, 4), _Tile(64, 32, 32, 2, 4, 3)


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
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    # Parts of the depth are summed by different warps: one sum over all of it is a long chain of dependent products.
    part: tl.constexpr = (D + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    starts, depth = tl.arange(0, PARTS) * part, tl.arange(0, BLOCK_K)
    features = starts[:, None] + depth[None, :]
    row_mask, expert_mask = (rows < num_rows)[None, :, None], (experts < E)[None, None, :]
    x_at = x_ptr + rows[None, :, None] * x_stride + features[:, None, :]
    w_at = w_ptr + experts[None, None, :] * D + features[:, :, None]
    sums = tl.zeros((PARTS, BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, part, BLOCK_K):
        in_row = features < D - start
        x = tl.load(x_at + start, mask=row_mask & in_row[:, None, :], other=0.0)
        w = tl.load(w_at + start, mask=in_row[:, :, None] & expert_mask, other=0.0)
        if x.dtype == w.dtype:
            sums = tl.dot(x, w, sums, input_precision="ieee")
        else:
            # Numbers of 16 bits are TF32 as they are; of float32 the upper 11 bits are, and so is what remains of it
            # but for its last two bits.
            x, w = x.to(tl.float32), w.to(tl.float32)
            upper = (w.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            sums = tl.dot(x, w - upper, sums, input_precision="tf32")
            sums = tl.dot(x, upper, sums, input_precision="tf32")
    total = tl.sum(sums, axis=0)
    out_at = out_ptr + rows[:, None] * E + experts[None, :]
    tl.store(out_at, total, mask=(rows < num_rows)[:, None] & (experts < E)[None, :])


def router_logits(
    x_TD: torch.Tensor,
    w_ED: torch.Tensor,
    norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    use_pdl: bool = False,
    is_deterministic: bool = False,
) -> torch.Tensor:
    """x @ w^T as float32 [T, E], of RMSNorm(x) where a norm is given, for up to 8 rows. w contiguous, of any floating
    dtype. A row's bits depend on the row, and on whether there are more than 8; is_deterministic: on the row alone.

    `use_pdl` as in `rms_norm`; weights may be read while the kernel ahead ends.
    """
    (num_rows, hidden), num_experts = x_TD.shape, len(w_ED)
    assert w_ED.shape[1] == hidden and w_ED.is_contiguous() and x_TD.stride(1) == 1, (w_ED.shape, x_TD.stride())
    out_TE = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x_TD.device)
    if num_rows == 0:
        return out_TE
    if num_rows <= _FEW_ROWS and not is_deterministic:
        _router_logits_kernel[(num_experts, num_rows)](
            x_TD, w_ED, x_TD if norm_D is None else norm_D, out_TE, x_TD.stride(0), hidden, num_experts, eps,
            BLOCK=triton.next_power_of_2(hidden), HAS_NORM=norm_D is not None, PDL=use_pdl, num_warps=4,
            launch_pdl=use_pdl,
        )  # fmt: skip
        return out_TE
    assert norm_D is None, "the norm of many rows is a kernel of its own"
    tile = _LARGE if num_rows >= _MANY_ROWS and not is_deterministic else _SMALL
    _router_logits_tile_kernel[(triton.cdiv(num_experts, tile.experts), triton.cdiv(num_rows, tile.rows))](
        x_TD, w_ED, out_TE, num_rows, x_TD.stride(0), D=hidden, E=num_experts, BLOCK_T=tile.rows,
        BLOCK_E=tile.experts, BLOCK_K=tile.depth, PARTS=tile.parts, PDL=use_pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=use_pdl,
    )  # fmt: skip
    return out_TE


def router_logits_reference(
    x_TD: torch.Tensor, w_ED: torch.Tensor, norm_D: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """The same as `router_logits`, in torch."""
    if norm_D is not None:
        x_TD = rms_norm_reference(x_TD, norm_D, eps)
    return x_TD.float() @ w_ED.float().t()
