"""Rotary position embedding of queries and keys, and the step's keys and values written to their pages, in one launch.

T rows (tokens), H query heads, K key-value heads, d head_dim, S tokens of the pool, P positions of the angle table.
Rotation: Su et al., RoFormer (2021), pairs (x[i], x[i + d/2]) as in checkpoints of Hugging Face format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.hopper import has_gdc

_PREFETCH_BYTES = 4096  # A thread of a prefetching program asks for so many.
_HEADS = 8  # Heads of one program: with 128 dims a warp holds four of them, 16 bytes of each half a thread.


@triton.jit
def _half(x_ptr, row, heads, dims, mask, stride, HEAD_DIM: tl.constexpr):
    return tl.load(x_ptr + row * stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _rotated(first, second, cos, sin, w_ptr, dims, dim_mask, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    dtype = first.dtype
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        w_a = tl.load(w_ptr + dims, mask=dim_mask, other=0.0).to(tl.float32)[None, :]
        w_b = tl.load(w_ptr + HEAD_DIM // 2 + dims, mask=dim_mask, other=0.0).to(tl.float32)[None, :]
        a = ((a * scale).to(dtype).to(tl.float32) * w_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * w_b).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _store_halves(ptr, base, heads, dims, mask, first, second, HEAD_DIM: tl.constexpr):
    at = ptr + base + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, first, mask=mask)
    tl.store(at + HEAD_DIM // 2, second, mask=mask)


@triton.jit
def _prefetch(ptr, part, num_chunks, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """Has THREADS chunks of 4096 bytes brought to the L2 cache, one asked for by each thread; nobody waits for them."""
    tl.static_assert(CHUNK == 4096)
    chunks = tl.minimum(part * THREADS + tl.arange(0, THREADS), num_chunks - 1)
    addresses = ptr.to(tl.int64) + chunks.to(tl.int64) * CHUNK
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _rope_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, row_slots_ptr, tables_ptr, q_norm_ptr, k_norm_ptr, q_ptr, keys_ptr,
    values_ptr, prefetch_ptr, num_chunks, qkv_stride, table_stride, eps, PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr, HAS_PREFETCH: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs of a row: blocks of query heads, then of keys, then of values. Beside the first row's, the prefetch.
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if HAS_PREFETCH:
        if part >= Q_BLOCKS + 2 * KV_BLOCKS:
            if row == 0:
                _prefetch(prefetch_ptr, part - Q_BLOCKS - 2 * KV_BLOCKS, num_chunks, CHUNK, THREADS)
            return
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions_ptr + row)
    if part < Q_BLOCKS:
        cos = tl.load(cos_ptr + position.to(tl.int64) * (HEAD_DIM // 2) + dims, mask=dim_mask, other=0.0)[None, :]
        sin = tl.load(sin_ptr + position.to(tl.int64) * (HEAD_DIM // 2) + dims, mask=dim_mask, other=0.0)[None, :]
        heads = part * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (heads < NUM_HEADS)[:, None] & dim_mask[None, :]
        first = _half(qkv_ptr, row, heads, dims, mask, qkv_stride, HEAD_DIM)
        second = _half(qkv_ptr + HEAD_DIM // 2, row, heads, dims, mask, qkv_stride, HEAD_DIM)
        first, second = _rotated(first, second, cos, sin, q_norm_ptr, dims, dim_mask, eps, HEAD_DIM, HAS_NORM)
        _store_halves(q_ptr, row * NUM_HEADS * HEAD_DIM, heads, dims, mask, first, second, HEAD_DIM)
    else:
        slot = tl.load(row_slots_ptr + row).to(tl.int64)
        page = tl.load(tables_ptr + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
        base = (page * PAGE_SIZE + position % PAGE_SIZE) * NUM_KV_HEADS * HEAD_DIM
        kv_part = part - Q_BLOCKS
        if kv_part < KV_BLOCKS:
            cos = tl.load(cos_ptr + position.to(tl.int64) * (HEAD_DIM // 2) + dims, mask=dim_mask, other=0.0)[None, :]
            sin = tl.load(sin_ptr + position.to(tl.int64) * (HEAD_DIM // 2) + dims, mask=dim_mask, other=0.0)[None, :]
            heads = kv_part * BLOCK_H + tl.arange(0, BLOCK_H)
            mask = (heads < NUM_KV_HEADS)[:, None] & dim_mask[None, :]
            k_ptr = qkv_ptr + NUM_HEADS * HEAD_DIM
            first = _half(k_ptr, row, heads, dims, mask, qkv_stride, HEAD_DIM)
            second = _half(k_ptr + HEAD_DIM // 2, row, heads, dims, mask, qkv_stride, HEAD_DIM)
            first, second = _rotated(first, second, cos, sin, k_norm_ptr, dims, dim_mask, eps, HEAD_DIM, HAS_NORM)
            _store_halves(keys_ptr, base, heads, dims, mask, first, second, HEAD_DIM)
        else:
            heads = (kv_part - KV_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
            mask = (heads < NUM_KV_HEADS)[:, None] & dim_mask[None, :]
            v_ptr = qkv_ptr + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
            first = _half(v_ptr, row, heads, dims, mask, qkv_stride, HEAD_DIM)
            second = _half(v_ptr + HEAD_DIM // 2, row, heads, dims, mask, qkv_stride, HEAD_DIM)
            _store_halves(values_ptr, base, heads, dims, mask, first, second, HEAD_DIM)


def rope_write_kv(
    qkv_TX: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    positions_T: torch.Tensor,
    row_slots_T: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_d: torch.Tensor | None = None,
    k_norm_d: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
    prefetch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the rotated queries [T, H, d]; writes rotated keys, and values, at each row's place in the pool.

    qkv [T, (H + 2K) d] holds queries, keys, values side by side (features contiguous). cos and sin float32 [P, d/2].
    Row t is position positions[t] of slot row_slots[t] (both int32): its place in the pool is
    page_tables[slot, position // page_size] * page_size + position % page_size (page_tables int32 [slots, pages]).
    keys and values [S, K, d] contiguous, of qkv's dtype. With q_norm and k_norm ([d], together) every head of queries
    and keys is first RMS-normalised. float32 inside; rounded to the dtype after the norm and after the rotation.
    Two rows may not share a place, but for those of a dummy slot, whose page then holds any of them.
    `use_pdl` as in `rms_norm`. `prefetch`, contiguous, is brought to the L2 cache meanwhile (Hopper and later): the
    weight of the product behind the attention, whose few rows leave the memory idle. It must fit there beside what
    the attention reads.
    """
    num_rows = qkv_TX.shape[0]
    _check(qkv_TX, cos_PD2, sin_PD2, keys_SKd, values_SKd, num_heads, num_kv_heads, head_dim)
    assert positions_T.dtype == row_slots_T.dtype == page_tables.dtype == torch.int32
    assert positions_T.shape == row_slots_T.shape == (num_rows,) and page_tables.stride(1) == 1
    assert (q_norm_d is None) == (k_norm_d is None)
    out = qkv_TX.new_empty(num_rows, num_heads, head_dim) if out is None else out
    assert out.shape == (num_rows, num_heads, head_dim) and out.is_contiguous() and out.dtype == qkv_TX.dtype
    if num_rows == 0:
        return out
    block_h = min(_HEADS, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    block_d = triton.next_power_of_2(head_dim // 2)
    num_parts = triton.cdiv(num_heads, block_h) + 2 * triton.cdiv(num_kv_heads, block_h)
    num_warps = max(block_h * block_d // 256, 1)
    has_prefetch = prefetch is not None and has_gdc(qkv_TX.device)
    num_chunks = 0
    if prefetch is not None and has_prefetch:
        assert prefetch.is_contiguous() and prefetch.data_ptr() % 16 == 0, prefetch.stride()
        num_chunks = prefetch.numel() * prefetch.element_size() // _PREFETCH_BYTES
        num_parts += triton.cdiv(num_chunks, 32 * num_warps)
    # Rows are the second axis of the grid, which holds 65,535.
    assert num_rows < 1 << 16, num_rows
    _rope_kv_kernel[(num_parts, num_rows)](
        qkv_TX, cos_PD2, sin_PD2, positions_T, row_slots_T, page_tables, cos_PD2 if q_norm_d is None else q_norm_d,
        cos_PD2 if k_norm_d is None else k_norm_d, out, keys_SKd, values_SKd, qkv_TX if prefetch is None else prefetch,
        num_chunks, qkv_TX.stride(0), page_tables.stride(0), eps, PAGE_SIZE=page_size, NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_H=block_h, BLOCK_D=block_d, HAS_NORM=q_norm_d is not None,
        HAS_PREFETCH=has_prefetch, CHUNK=_PREFETCH_BYTES, THREADS=32 * num_warps, PDL=use_pdl, num_warps=num_warps,
        launch_pdl=use_pdl,
    )  # fmt: skip
    return out


def rope_write_kv_reference(
    qkv_TX: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    positions_T: torch.Tensor,
    row_slots_T: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm_d: torch.Tensor | None = None,
    k_norm_d: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """What `rope_write_kv` computes, in torch."""
    positions = positions_T.long()
    q_THd, k_TKd, v_TKd = qkv_TX.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm_d is not None and k_norm_d is not None:
        q_THd, k_TKd = _normed(q_THd, q_norm_d, eps), _normed(k_TKd, k_norm_d, eps)
    cos_T1h, sin_T1h = cos_PD2[positions].unsqueeze(1), sin_PD2[positions].unsqueeze(1)
    pages = page_tables[row_slots_T.long(), positions // page_size].long()
    places = pages * page_size + positions % page_size
    keys_SKd[places] = _turned(k_TKd, cos_T1h, sin_T1h)
    values_SKd[places] = v_TKd
    return _turned(q_THd, cos_T1h, sin_T1h)


def _normed(x_THd: torch.Tensor, w_d: torch.Tensor, eps: float) -> torch.Tensor:
    x_f32 = x_THd.float()
    return w_d * (x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)).to(x_THd.dtype)


def _turned(x_THd: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
    a, b = x_THd.float().chunk(2, dim=-1)
    return torch.cat((a * cos_T1h - b * sin_T1h, b * cos_T1h + a * sin_T1h), dim=-1).to(x_THd.dtype)


def _check(
    qkv_TX: torch.Tensor,
    cos_PD2: torch.Tensor,
    sin_PD2: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    assert qkv_TX.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and qkv_TX.stride(1) == 1, qkv_TX.shape
    assert head_dim % 2 == 0 and cos_PD2.shape == sin_PD2.shape == (cos_PD2.shape[0], head_dim // 2), cos_PD2.shape
    assert cos_PD2.dtype == sin_PD2.dtype == torch.float32 and cos_PD2.is_contiguous() and sin_PD2.is_contiguous()
    for pool in (keys_SKd, values_SKd):
        assert pool.shape[1:] == (num_kv_heads, head_dim) and pool.is_contiguous(), (pool.shape, pool.stride())
        assert pool.dtype == qkv_TX.dtype, (pool.dtype, qkv_TX.dtype)
