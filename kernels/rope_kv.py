"""Rotary position embedding of queries and keys, and the step's keys and values written to their pages, in one launch.

T rows (tokens), H query heads, K key-value heads, d head_dim, S tokens of the pool, P positions of the angle table.
RoPE: Su et al., RoFormer (2021), pairs (x[i], x[i + d/2]) as in checkpoints of Hugging Face format.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.inverse_rms import check_norm_input, inverse_rms, inverse_rms_reference
from radixmesh.kernels.kv_fp8 import KV_FP8, KV_FP8_MAX, KvScales, put_rows

# Heads of one program: with 128 dims a warp holds four of them, 16 bytes of each half a thread. Fewer programs a row
# would compute the inverse RMS less often, but leave too few to hide each other's waits.
_HEADS = 16


class KvTarget(NamedTuple):
    """KV indices of a step's rows: row t is position positions_T[t] of slot row_slots_T[t] (int32), in the page tables
    int32 [slots, pages]. tokens_T: int32, the indices themselves, where they are not those of the positions."""

    positions_T: torch.Tensor
    row_slots_T: torch.Tensor
    page_tables: torch.Tensor
    page_size: int
    tokens_T: torch.Tensor | None = None

    def indices(self) -> torch.Tensor:
        """int64 [T]."""
        if self.tokens_T is not None:
            return self.tokens_T.long()
        positions = self.positions_T.long()
        pages = self.page_tables[self.row_slots_T.long(), positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size


class RopeAngles(NamedTuple):
    """float32 [positions, d / 2] each, contiguous."""

    cos: torch.Tensor
    sin: torch.Tensor


class HeadShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class HeadNorms(NamedTuple):
    """RMSNorm weights [d] of each query and key head; None where the model has none."""

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    eps: float = 1e-6


def head_factors(scales: KvScales, heads: HeadShape) -> torch.Tensor:
    """float32 [H + 2K]: what `rope_write_kv` multiplies each head by, so that an FP8 pool with these scales holds its
    keys and values, and scores are those of keys with their scales."""
    of_queries = scales.keys_K.repeat_interleave(heads.num_heads // heads.num_kv_heads)
    return torch.cat((of_queries, scales.keys_K.reciprocal(), scales.values_K.reciprocal())).float().contiguous()


_LARGEST = tl.constexpr(KV_FP8_MAX)


@triton.jit
def _clamped(x):
    """To what FP8 holds; a NaN, of which no comparison is true, stays one."""
    return tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))


@triton.jit
def _finished(x, bias, scale, HAS_BIAS: tl.constexpr, HAS_DEFERRED_NORM: tl.constexpr):
    x = x.to(tl.float32)
    if HAS_DEFERRED_NORM:
        x *= scale
    if HAS_BIAS:
        x += bias.to(tl.float32)
    return x


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, dims, mask, is_query):
    query, key = tl.load(q_norm_ptr + dims, mask=mask, other=0.0), tl.load(k_norm_ptr + dims, mask=mask, other=0.0)
    return tl.where(is_query, query, key)


@triton.jit
def _normed(x, w, scale, dtype: tl.constexpr):
    return ((x * scale).to(dtype).to(tl.float32) * w.to(tl.float32)[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _rope_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, row_slots_ptr, tables_ptr, q_norm_ptr, k_norm_ptr, bias_ptr,
    norm_input_ptr, factors_ptr, tokens_ptr, q_ptr, keys_ptr, values_ptr, qkv_stride, table_stride, eps,
    PAGE_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, STORED_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DEFERRED_NORM: tl.constexpr, IS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Programs of a row: blocks of query heads, then of keys and values.
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    is_query = part < Q_BLOCKS
    dims = tl.arange(0, BLOCK_D2)
    dim_mask = dims < HALF
    heads = tl.where(is_query, part * BLOCK_H, NUM_HEADS + (part - Q_BLOCKS) * BLOCK_H) + tl.arange(0, BLOCK_H)
    mask = (heads < tl.where(is_query, NUM_HEADS, NUM_HEADS + 2 * NUM_KV_HEADS))[:, None] & dim_mask[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    # PDL: loads of what no kernel of the step writes are issued before the wait.
    position = tl.load(positions_ptr + row)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + dims, mask=dim_mask, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + dims, mask=dim_mask, other=0.0)[None, :]
    bias_a, bias_b, scale = 0.0, 0.0, 1.0
    if HAS_BIAS:
        bias_a = tl.load(bias_ptr + at, mask=mask, other=0.0)
        bias_b = tl.load(bias_ptr + HALF + at, mask=mask, other=0.0)
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + heads, mask=heads < NUM_HEADS + 2 * NUM_KV_HEADS, other=1.0)[:, None]
    if HAS_NORM:
        w_a = _norm_weight(q_norm_ptr, k_norm_ptr, dims, dim_mask, is_query)
        w_b = _norm_weight(q_norm_ptr + HALF, k_norm_ptr + HALF, dims, dim_mask, is_query)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The step's first kernel writes page tables and may still run until here. It comes along with the rows, and is
    # needed at the end.
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row).to(tl.int64)
    else:
        page = tl.load(tables_ptr + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
        token = page * PAGE_SIZE + position % PAGE_SIZE
    a = tl.load(qkv_ptr + row * qkv_stride + at, mask=mask, other=0.0)
    b = tl.load(qkv_ptr + row * qkv_stride + HALF + at, mask=mask, other=0.0)
    if HAS_DEFERRED_NORM:
        scale = inverse_rms(norm_input_ptr, row, eps, D, BLOCK_D)
    dtype: tl.constexpr = a.dtype
    a = _finished(a, bias_a, scale, HAS_BIAS, HAS_DEFERRED_NORM)
    b = _finished(b, bias_b, scale, HAS_BIAS, HAS_DEFERRED_NORM)
    x, y = a, b
    if HAS_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM
        head_scale = tl.rsqrt(mean + eps)[:, None]
        x, y = _normed(a, w_a, head_scale, dtype), _normed(b, w_b, head_scale, dtype)
    first, second = x * cos - y * sin, y * cos + x * sin
    if factors_ptr is not None:
        first, second, a, b = first * factor, second * factor, a * factor, b * factor
    if is_query:
        q_at = q_ptr + row * NUM_HEADS * HEAD_DIM + at
        tl.store(q_at, first.to(dtype), mask=mask)
        tl.store(q_at + HALF, second.to(dtype), mask=mask)
    else:
        # An FP8 pool gets numbers that were not rounded before.
        stored: tl.constexpr = tl.float32 if IS_FP8 else dtype
        if IS_FP8:
            first, second, a, b = _clamped(first), _clamped(second), _clamped(a), _clamped(b)
        is_key = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
        base = token * NUM_KV_HEADS * STORED_DIM
        pool_at = (heads - NUM_HEADS)[:, None] * STORED_DIM + dims[None, :]
        key_at = keys_ptr + base + pool_at
        tl.store(key_at, first.to(stored), mask=mask & is_key)
        tl.store(key_at + HALF, second.to(stored), mask=mask & is_key)
        value_at = values_ptr + base + pool_at - NUM_KV_HEADS * STORED_DIM
        tl.store(value_at, a.to(stored), mask=mask & (is_key == 0))
        tl.store(value_at + HALF, b.to(stored), mask=mask & (is_key == 0))


def rope_write_kv(
    qkv: DeferredNormGemm,
    angles: RopeAngles,
    target: KvTarget,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    heads: HeadShape,
    norms: HeadNorms,
    factors_X: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Returns the queries [T, H, d] with RoPE; writes keys with RoPE, and values, at each row's index in the pool.

    qkv [T, (H + 2K) d] holds queries, keys, values side by side (features contiguous); its norm input [T, D] and bias
    [(H + 2K) d] are contiguous, and eps is that of `norms`.
    keys and values [S, K, d]: contiguous, or the first d of [S, K, stored d]; of any floating dtype, to which numbers
    of qkv's are rounded, to FP8 once and clamped to what it holds. Two rows may not share an index, but for those of a
    dummy slot, whose page then holds any of them.

    With head norms, which come together, every head of queries and keys is RMS-normalised behind norm and bias. float32
    inside; rounded to the dtype after the norm of heads and after RoPE.

    factors_X: float32 [H + 2K] of `head_factors`, for a pool with scales; multiplied in behind norm and RoPE.

    `use_pdl` as in `rms_norm`, and all but qkv, its norm input and the page tables is read without waiting: the kernels
    ahead may not be writing it.
    """
    qkv_TX, bias_X, norm_input_TD = qkv
    cos_PD2, sin_PD2 = angles
    positions_T, row_slots_T, page_tables, page_size, tokens_T = target
    num_heads, num_kv_heads, head_dim = heads
    q_norm_d, k_norm_d, eps = norms
    num_rows = qkv_TX.shape[0]
    _check(qkv, angles, target, keys_SKd, values_SKd, heads, norms)
    assert factors_X is None or factors_X.shape == (num_heads + 2 * num_kv_heads,), factors_X.shape
    out_THd = qkv_TX.new_empty(num_rows, num_heads, head_dim)
    if num_rows == 0:
        return out_THd
    block_h = min(_HEADS, triton.next_power_of_2(max(num_heads, 2 * num_kv_heads)))
    block_d2 = triton.next_power_of_2(head_dim // 2)
    num_parts = triton.cdiv(num_heads, block_h) + triton.cdiv(2 * num_kv_heads, block_h)
    num_warps = max(block_h * block_d2 // 256, 1)
    num_features = 1 if norm_input_TD is None else norm_input_TD.shape[1]
    _rope_kv_kernel[(num_parts, num_rows)](
        qkv_TX, cos_PD2, sin_PD2, positions_T, row_slots_T, page_tables, _or(q_norm_d, cos_PD2),
        _or(k_norm_d, cos_PD2), _or(bias_X, cos_PD2), _or(norm_input_TD, qkv_TX), factors_X, tokens_T, out_THd,
        keys_SKd, values_SKd, qkv_TX.stride(0), page_tables.stride(0), eps, PAGE_SIZE=page_size, NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, D=num_features, STORED_DIM=keys_SKd.stride(1), BLOCK_H=block_h,
        BLOCK_D2=block_d2, BLOCK_D=triton.next_power_of_2(num_features), HAS_NORM=q_norm_d is not None,
        HAS_BIAS=bias_X is not None, HAS_DEFERRED_NORM=norm_input_TD is not None, IS_FP8=keys_SKd.dtype == KV_FP8,
        PDL=use_pdl, num_warps=num_warps, launch_pdl=use_pdl,
    )  # fmt: skip
    return out_THd


def rope_write_kv_reference(
    qkv: DeferredNormGemm,
    angles: RopeAngles,
    target: KvTarget,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    heads: HeadShape,
    norms: HeadNorms,
    factors_X: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `rope_write_kv`, in torch."""
    num_heads, num_kv_heads, head_dim = heads
    positions, dtype = target.positions_T.long(), qkv.out_TN.dtype
    qkv_TX = qkv.out_TN.float()
    if qkv.norm_input_TD is not None:
        qkv_TX = qkv.out_TN * inverse_rms_reference(qkv.norm_input_TD, norms.eps)
    qkv_TX = qkv_TX if qkv.bias_N is None else qkv_TX + qkv.bias_N
    q_THd, k_TKd, v_TKd = qkv_TX.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms.query is not None and norms.key is not None:
        q_THd, k_TKd = _head_normed(q_THd, norms.query, norms.eps), _head_normed(k_TKd, norms.key, norms.eps)
    cos_T1h, sin_T1h = angles.cos[positions].unsqueeze(1), angles.sin[positions].unsqueeze(1)
    kv_indices = target.indices()
    q_THd, k_TKd = apply_rope(q_THd, cos_T1h, sin_T1h), apply_rope(k_TKd, cos_T1h, sin_T1h)
    if factors_X is not None:
        q_H1, k_K1, v_K1 = factors_X[:, None].split((num_heads, num_kv_heads, num_kv_heads))
        q_THd, k_TKd, v_TKd = q_THd * q_H1, k_TKd * k_K1, v_TKd * v_K1
    is_fp8 = keys_SKd.dtype == KV_FP8
    put_rows(keys_SKd, kv_indices, k_TKd if is_fp8 else k_TKd.to(dtype))
    put_rows(values_SKd, kv_indices, v_TKd if is_fp8 else v_TKd.to(dtype))
    rotated_THd: torch.Tensor = q_THd.to(dtype)
    return rotated_THd


def _head_normed(x_THd: torch.Tensor, w_d: torch.Tensor, eps: float) -> torch.Tensor:
    """Of float32, rounded as the weight's dtype is."""
    return (w_d * (x_THd * inverse_rms_reference(x_THd, eps)).to(w_d.dtype)).float()


def apply_rope(
    x_THd: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor, *, is_interleaved: bool = False
) -> torch.Tensor:
    """Heads with RoPE, in float32. is_interleaved: pairs are neighbours in x, and halves in the result."""
    a, b = (x_THd[..., 0::2], x_THd[..., 1::2]) if is_interleaved else x_THd.chunk(2, dim=-1)
    a, b = a.float(), b.float()
    return torch.cat((a * cos_T1h - b * sin_T1h, b * cos_T1h + a * sin_T1h), dim=-1)


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """Something to point at where there is nothing, which the kernel does not read."""
    return stand_in if tensor is None else tensor


def _check(
    qkv: DeferredNormGemm,
    angles: RopeAngles,
    target: KvTarget,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    heads: HeadShape,
    norms: HeadNorms,
) -> None:
    (qkv_TX, bias_X, norm_input_TD), (cos_PD2, sin_PD2), (num_heads, num_kv_heads, head_dim) = qkv, angles, heads
    positions_T, row_slots_T, page_tables, _, tokens_T = target
    num_rows = qkv_TX.shape[0]
    assert qkv_TX.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and qkv_TX.stride(1) == 1, qkv_TX.shape
    assert bias_X is None or (bias_X.shape == qkv_TX.shape[1:] and bias_X.is_contiguous()), bias_X.shape
    if norm_input_TD is not None:
        check_norm_input(norm_input_TD, qkv_TX)
    assert (norms.query is None) == (norms.key is None)
    assert head_dim % 2 == 0 and cos_PD2.shape == sin_PD2.shape == (cos_PD2.shape[0], head_dim // 2), cos_PD2.shape
    assert cos_PD2.dtype == sin_PD2.dtype == torch.float32 and cos_PD2.is_contiguous() and sin_PD2.is_contiguous()
    assert positions_T.dtype == row_slots_T.dtype == page_tables.dtype == torch.int32
    assert positions_T.shape == row_slots_T.shape == (num_rows,) and page_tables.stride(1) == 1
    assert tokens_T is None or (tokens_T.dtype == torch.int32 and tokens_T.shape == (num_rows,)), tokens_T
    # Rows are the second axis of the grid, which holds 65,535.
    assert num_rows < 1 << 16, num_rows
    stored_dim = keys_SKd.stride(1)
    for pool in (keys_SKd, values_SKd):
        strides = (num_kv_heads * stored_dim, stored_dim, 1)
        assert pool.shape[1:] == (num_kv_heads, head_dim) and pool.stride() == strides, (pool.shape, pool.stride())
        assert stored_dim >= head_dim and pool.is_floating_point(), (stored_dim, pool.dtype)
