"""The inner loop of extend attention: `extend_attention.py` has the algorithm and the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from radixmesh.kernels.attention.split_pieces import soft_capped


@triton.jit
def extend_tiles(
    q,
    power,
    highest,
    total,
    acc,
    keys_ptr,
    values_ptr,
    table_ptr,
    m_position,
    kv_begin,
    kv_end,
    scale,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    IS_MASKED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Online softmax over KV positions [kv_begin, kv_end); without a mask all rows see all of them, in whole tiles.

    power: what each row of the query was divided by, float32 [M], or None."""
    d = tl.arange(0, DP)
    for begin in tl.range(kv_begin, kv_end, BLOCK_N, num_stages=STAGES):
        position = begin + tl.arange(0, BLOCK_N)
        is_loaded = (position < kv_end)[:, None] & (d < D)[None, :]
        if IS_MASKED:
            page = tl.load(table_ptr + position // PAGE_SIZE, mask=position < kv_end, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + position // PAGE_SIZE).to(tl.int64)
        kv_offset = (page * PAGE_SIZE + position % PAGE_SIZE)[:, None] * STRIDE + d[None, :]
        if IS_MASKED:
            k = tl.load(keys_ptr + kv_offset, mask=is_loaded, other=0.0)
        elif D != DP:
            k = tl.load(keys_ptr + kv_offset, mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(keys_ptr + kv_offset)
        # From FP8, of which the query's dtype holds every number; otherwise the two are one.
        k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if power is not None:
            scores = scores * power[:, None]
        if SOFTCAP is not None:
            scores = soft_capped(scores, SOFTCAP)
        if IS_MASKED:
            is_seen = position[None, :] <= m_position[:, None]
            if WINDOW is not None:
                is_seen = is_seen & (position[None, :] > m_position[:, None] - WINDOW)
            if CHUNK is not None:
                is_seen = is_seen & (position[None, :] >= (m_position // CHUNK * CHUNK)[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
        exps = tl.exp2(scores * scale - new_highest[:, None])
        correction = tl.exp2(highest - new_highest)
        total = total * correction + tl.sum(exps, 1)
        if IS_MASKED:
            v = tl.load(values_ptr + kv_offset, mask=is_loaded, other=0.0)
        elif D != DP:
            v = tl.load(values_ptr + kv_offset, mask=(d < D)[None, :], other=0.0)
        else:
            v = tl.load(values_ptr + kv_offset)
        v = v.to(q.dtype)
        acc = tl.dot(exps.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, acc
