"""Rows around attention over latents: RoPE and the norm of latents with the write to the pool, and per-head GEMMs.

    q [T, H (n + r)] --n--> x key expansion --> [T, H, R] \\
                     --r--> RoPE ------------> [T, H, r] -+-> queries [T, H, C]
    kv [T, C]        --R--> RMSNorm, --r--> RoPE -> latents [S, C] at the row's KV index
    attention [T, H, R]     x value expansion -> [T, H, v]

T rows, H heads, n / r / v plain, RoPE and value dims of a head, R rank, C = R + r, S tokens of the pool.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.rms_norm import rms_norm_reference
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles, apply_rope

_HEADS = 16
_TILE_ROWS = 16
_TILE_WEIGHTS = 8192


class LatentNorm(NamedTuple):
    """RMSNorm of latents, weight [R]. is_interleaved: pairs of RoPE dims are neighbours, and halves behind it."""

    weight_R: torch.Tensor
    eps: float
    is_interleaved: bool


@triton.jit
def _write_latent(
    kv_at, w, to, cos, sin, first, second, pair, pair_mask, eps, R: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A row's normed latent and its RoPE key, to its index in the pool. w: the norm's weight, float32."""
    c = tl.arange(0, BLOCK_R)
    latent = tl.load(kv_at + c, mask=c < R, other=0.0)
    x = latent.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / R + eps)
    # Rounded before the weight is applied, as checkpoints were trained.
    normed = ((x * scale).to(latent.dtype).to(tl.float32) * w).to(latent.dtype)
    tl.store(to + c, normed.to(to.dtype.element_ty), mask=c < R)
    a = tl.load(kv_at + R + first, mask=pair_mask, other=0.0).to(tl.float32)
    b = tl.load(kv_at + R + second, mask=pair_mask, other=0.0).to(tl.float32)
    tl.store(to + R + pair, (a * cos - b * sin).to(latent.dtype).to(to.dtype.element_ty), mask=pair_mask)
    tl.store(to + R + HALF + pair, (b * cos + a * sin).to(latent.dtype).to(to.dtype.element_ty), mask=pair_mask)


@triton.jit
def _rope_queries(
    q_at, out_at, cos, sin, first, second, pair, mask, HALF: tl.constexpr
):  # fmt: skip
    """RoPE of some heads' queries; q_at, out_at: where their RoPE parts begin, [heads, 1]."""
    a = tl.load(q_at + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(q_at + second[None, :], mask=mask, other=0.0).to(tl.float32)
    to = out_at + pair[None, :]
    tl.store(to, (a * cos[None, :] - b * sin[None, :]).to(out_at.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (b * cos[None, :] + a * sin[None, :]).to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def _mla_rows_kernel(
    q_ptr, kv_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, tables_ptr, tokens_ptr, out_ptr, latents_ptr,
    q_stride, kv_stride, table_stride, eps, PAGE_SIZE: tl.constexpr, H: tl.constexpr, NOPE: tl.constexpr,
    ROPE: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs of a row: its latent and RoPE key, then blocks of query heads. Each is a function of its own: the
    # compiler takes a name that both branches set for one variable, of one shape.
    HALF: tl.constexpr = ROPE // 2
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    pair_mask = pair < HALF
    first = 2 * pair if IS_INTERLEAVED else pair
    second = 2 * pair + 1 if IS_INTERLEAVED else HALF + pair
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + pair, mask=pair_mask, other=0.0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + pair, mask=pair_mask, other=0.0)
    c = tl.arange(0, BLOCK_R)
    w = tl.load(norm_ptr + c, mask=(c < R) & (part == 0), other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if part == 0:
        # Not before the wait: the step's first kernel, which writes tables, may not have ended yet.
        if tokens_ptr is not None:
            token = tl.load(tokens_ptr + row).to(tl.int64)
        else:
            page = tl.load(tables_ptr + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
            token = page * PAGE_SIZE + position % PAGE_SIZE
        to = latents_ptr + token * (R + ROPE)
        _write_latent(kv_ptr + row * kv_stride, w, to, cos, sin, first, second, pair, pair_mask, eps, R, HALF, BLOCK_R)
    else:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < H)[:, None] & pair_mask[None, :]
        q_at = q_ptr + row * q_stride + head[:, None] * (NOPE + ROPE) + NOPE
        out_at = out_ptr + (row * H + head[:, None]) * (R + ROPE) + R
        _rope_queries(q_at, out_at, cos, sin, first, second, pair, mask, HALF)


def mla_rows(
    q_THY: torch.Tensor,
    kv_TC: torch.Tensor,
    norm: LatentNorm,
    angles: RopeAngles,
    target: KvTarget,
    latents_SC: torch.Tensor,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Writes each row's normed latent and its RoPE key to its index in the pool. Returns queries [T, H, C], of which
    the last r numbers are set: those of q with RoPE.

    q [T, H, n + r] and kv [T, C]: features contiguous, rows may be strided. latents_SC contiguous, of any floating
    dtype. float32 inside; rounded to the dtype after the norm and after RoPE. `use_pdl` as in `rope_write_kv`.
    """
    num_rows, num_heads, query_dim = q_THY.shape
    rope, rank = 2 * angles.cos.shape[1], norm.weight_R.shape[0]
    _check(q_THY, kv_TC, norm, angles, target, latents_SC)
    out_THC = q_THY.new_empty(num_rows, num_heads, rank + rope)
    if num_rows:
        block_h = min(_HEADS, triton.next_power_of_2(num_heads))
        _mla_rows_kernel[(1 + triton.cdiv(num_heads, block_h), num_rows)](
            q_THY, kv_TC, norm.weight_R, angles.cos, angles.sin, target.positions_T, target.row_slots_T,
            target.page_tables, target.tokens_T, out_THC, latents_SC, q_THY.stride(0), kv_TC.stride(0),
            target.page_tables.stride(0), norm.eps, PAGE_SIZE=target.page_size, H=num_heads, NOPE=query_dim - rope,
            ROPE=rope, R=rank, BLOCK_R=triton.next_power_of_2(rank), BLOCK_H=block_h,
            BLOCK_HALF=triton.next_power_of_2(rope // 2), IS_INTERLEAVED=norm.is_interleaved, PDL=use_pdl,
            num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    return out_THC


def mla_rows_reference(
    q_THY: torch.Tensor,
    kv_TC: torch.Tensor,
    norm: LatentNorm,
    angles: RopeAngles,
    target: KvTarget,
    latents_SC: torch.Tensor,
) -> torch.Tensor:
    """The same as `mla_rows`, in torch; the numbers that it does not set are zeros."""
    rope, rank, positions = 2 * angles.cos.shape[1], norm.weight_R.shape[0], target.positions_T.long()
    cos_T1h, sin_T1h = angles.cos[positions].unsqueeze(1), angles.sin[positions].unsqueeze(1)
    kv_indices = target.indices()
    latent_TR = rms_norm_reference(kv_TC[:, :rank], norm.weight_R, norm.eps)
    with_rope = partial(apply_rope, cos_T1h=cos_T1h, sin_T1h=sin_T1h, is_interleaved=norm.is_interleaved)
    key_Tr = with_rope(kv_TC[:, None, rank:]).squeeze(1).to(kv_TC.dtype)
    latents_SC[kv_indices] = torch.cat((latent_TR, key_Tr), dim=1).to(latents_SC.dtype)
    out_THC = q_THY.new_zeros(*q_THY.shape[:2], rank + rope)
    out_THC[..., rank:] = with_rope(q_THY[..., -rope:])
    return out_THC


@triton.jit(do_not_specialize=["num_rows"])
def _head_gemm_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, x_row, x_head, w_head, w_n, w_k, out_row, out_head, N: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(2) * R + tl.arange(0, R)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    x_at = x_ptr + head * x_head + rows.to(tl.int64)[:, None] * x_row + depth[None, :]
    w_at = w_ptr + head * w_head + columns[None, :] * w_n + depth[:, None] * w_k
    # Weights, which no kernel writes, travel while the kernel ahead ends: all of them before any is used.
    tiles = ()
    for step in tl.static_range(STEPS):
        mask = (depth < K - step * BLOCK_K)[:, None] & (columns < N)[None, :]
        tiles = tiles + (tl.load(w_at + step * BLOCK_K * w_k, mask=mask, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((R, BLOCK_N), tl.float32)
    for step in tl.static_range(STEPS):
        mask = (rows < num_rows)[:, None] & (depth < K - step * BLOCK_K)[None, :]
        sums = tl.dot(tl.load(x_at + step * BLOCK_K, mask=mask, other=0.0), tiles[step], sums, input_precision="ieee")
    out_at = out_ptr + head * out_head + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < N)[None, :])


def head_gemm(
    x_THK: torch.Tensor, w_HNK: torch.Tensor, out: torch.Tensor | None = None, *, use_pdl: bool = False
) -> torch.Tensor:
    """out[t, h] = w[h] @ x[t, h], [T, H, N], for few rows. A row's bits depend on the row alone.

    Features of x and out are contiguous, rows and heads may be strided; w of any strides. float32 sums.
    """
    num_rows, num_heads, depth = x_THK.shape
    num_out = w_HNK.shape[1]
    assert w_HNK.shape == (num_heads, num_out, depth) and w_HNK.dtype == x_THK.dtype, (w_HNK.shape, x_THK.shape)
    out = x_THK.new_empty(num_rows, num_heads, num_out) if out is None else out
    assert x_THK.stride(2) == out.stride(2) == 1 and out.shape == (num_rows, num_heads, num_out), out.stride()
    if num_rows:
        block_k = min(256 // x_THK.element_size(), max(16, triton.next_power_of_2(depth)))
        steps = triton.cdiv(depth, block_k)
        # A program's weights are all in registers: 64 numbers of a thread.
        most = max(16, _TILE_WEIGHTS // (block_k * triton.next_power_of_2(steps)))
        block_n = min(64, max(16, triton.next_power_of_2(num_out)), most)
        _head_gemm_kernel[(triton.cdiv(num_out, block_n), num_heads, triton.cdiv(num_rows, _TILE_ROWS))](
            x_THK, w_HNK, out, num_rows, x_THK.stride(0), x_THK.stride(1), *w_HNK.stride(), out.stride(0),
            out.stride(1), N=num_out, K=depth, R=_TILE_ROWS, BLOCK_N=block_n, BLOCK_K=block_k, STEPS=steps,
            PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
        )  # fmt: skip
    return out


def head_gemm_reference(x_THK: torch.Tensor, w_HNK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The same as `head_gemm`, in torch, which writes rows of `out` in place."""
    if out is None:
        out = x_THK.new_empty(len(x_THK), *w_HNK.shape[:2])
    torch.bmm(x_THK.transpose(0, 1), w_HNK.transpose(1, 2), out=out.transpose(0, 1))
    return out


def _check(
    q_THY: torch.Tensor,
    kv_TC: torch.Tensor,
    norm: LatentNorm,
    angles: RopeAngles,
    target: KvTarget,
    latents_SC: torch.Tensor,
) -> None:
    rope, rank, num_rows = 2 * angles.cos.shape[1], norm.weight_R.shape[0], q_THY.shape[0]
    assert kv_TC.shape == (num_rows, rank + rope) and kv_TC.stride(1) == 1, (kv_TC.shape, kv_TC.stride())
    assert q_THY.shape[2] > rope and q_THY.stride()[1:] == (q_THY.shape[2], 1), (q_THY.shape, q_THY.stride())
    assert latents_SC.shape[1:] == kv_TC.shape[1:] and latents_SC.is_contiguous(), latents_SC.shape
    assert norm.weight_R.is_contiguous() and angles.cos.is_contiguous() and angles.sin.is_contiguous()
    assert target.positions_T.dtype == target.row_slots_T.dtype == target.page_tables.dtype == torch.int32
    # Rows are the second axis of the grid, which holds 65,535.
    assert num_rows < 1 << 16, num_rows
