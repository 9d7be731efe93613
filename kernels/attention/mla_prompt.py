"""Attention of prompt chunks over latents in the up-projected form: latents become keys and values of each head first.

Absorbed attention (`mla_extend.py`) costs 2 (2 R + r) operations for a pair of a query and a token in each head; this
one 2 (n + r + v), which is 3.4 times less with DeepSeek's sizes, after 2 R (n + v) for each token and head. It pays
where a token is seen by some hundred queries of its step: long chunks, and chunks that share a prefix, whose tokens
are projected once for all of them. `is_projection_faster` decides.

The latents of a step's sequences are gathered once; keys and values are made for as many heads at a time as the scratch
memory has room for, by one GEMM, and read by a kernel with a program for a block of a chunk's rows and a head.

    index   | shared prefix of chunks 0, 2 | chunk 0 | chunk 1, all of its sequence | chunk 2 |

T rows, H query heads, R rank of the latents, n / r / v plain, RoPE and value dims of a head, C = R + r, N chunks, S
tokens of the pool, U tokens of all chunks' sequences, shared ones once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.extend_attention import ExtendConfig
from radixmesh.kernels.attention.prefix_groups import IntArray, find_shared_prefixes
from radixmesh.kernels.attention.split_kv import LOG2_E
from radixmesh.kernels.attention.split_pieces import LOWEST

# Chunks that a program looks at in one step to find its own.
_CHUNKS_AT_ONCE = 32
# On an H200 a pair of a query and a token costs a head 6.3 ps more when it is absorbed, a projected token some 650 ps,
# and the expansions around absorbed attention 700 ps a row (`bench/gpu/mla.py`, kind "prompt").
_PAIRS_PER_TOKEN, _PAIRS_PER_ROW = 110, 100
# Room for keys and values of some heads, unless one head's take more.
_SCRATCH_BYTES = 128 << 20
MAX_TOKENS = 1 << 16
"""Of a step's sequences, shared ones counted once: their latents are copied."""


class ChunkTokens(NamedTuple):
    """Positions of all chunks' sequences in the pool, the same in all layers of a step.

    index_U: in the pool. A chunk's first `shared_lens_N` tokens begin at `shared_starts_N` of it, the others at
    `starts_N`. On the host or on the device, int32.
    """

    index_U: torch.Tensor
    starts_N: torch.Tensor
    shared_starts_N: torch.Tensor
    shared_lens_N: torch.Tensor

    def to(self, device: torch.device) -> ChunkTokens:
        """By one copy that the host does not wait for."""
        sizes = [len(part) for part in self]
        packed = torch.cat(self)
        packed = packed.pin_memory() if device.type == "cuda" else packed
        return ChunkTokens(*packed.to(device, non_blocking=True).split(sizes))


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=[
        "starts_ptr",
        "shared_starts_ptr",
        "shared_lens_ptr",
        "chunk_row_starts_ptr",
        "chunk_kv_lens_ptr",
    ],
)
def _mla_prompt_kernel(
    q_ptr, q_rope_ptr, kv_ptr, latents_ptr, starts_ptr, shared_starts_ptr, shared_lens_ptr, chunk_row_starts_ptr,
    chunk_kv_lens_ptr, out_ptr, num_chunks, scale, q_row, q_head, rope_row, rope_head, out_row, kv_row,
    R: tl.constexpr, PLAIN: tl.constexpr, PLAIN_P: tl.constexpr, ROPE: tl.constexpr, ROPE_P: tl.constexpr,
    VALUE: tl.constexpr, VALUE_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # Last blocks first: of a chunk they see the most keys, and the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(chunk_row_starts_ptr)
    chunk = -1
    for begin in range(0, num_chunks, CHUNKS):
        index = begin + tl.arange(0, CHUNKS)
        starts = tl.load(chunk_row_starts_ptr + index, mask=index < num_chunks, other=0) - first
        chunk += tl.sum(((starts // BLOCK_M + index <= block) & (index < num_chunks)).to(tl.int32), 0)
    start = tl.load(chunk_row_starts_ptr + chunk)
    end = tl.load(chunk_row_starts_ptr + chunk + 1)
    first_row = start + (block - (start - first) // BLOCK_M - chunk) * BLOCK_M
    if first_row < end:
        kv_len = tl.load(chunk_kv_lens_ptr + chunk)
        shared_len = tl.load(shared_lens_ptr + chunk)
        shared_start = tl.load(shared_starts_ptr + chunk)
        own_start = tl.load(starts_ptr + chunk) - shared_len
        rows = first_row + tl.arange(0, BLOCK_M)
        d = tl.arange(0, PLAIN_P)
        e = tl.arange(0, ROPE_P)
        f = tl.arange(0, VALUE_P)
        is_row = rows < end
        last_position = kv_len - end + tl.minimum(first_row + BLOCK_M, end) - 1
        # Rows that pad the block see what the last one sees: no row of the GEMM is without a key.
        row_position = tl.minimum(kv_len - end + rows, last_position)
        q_at = q_ptr + rows.to(tl.int64)[:, None] * q_row + head * q_head
        q = tl.load(q_at + d[None, :], mask=is_row[:, None] & (d < PLAIN)[None, :], other=0.0)
        q_rope_at = q_rope_ptr + rows.to(tl.int64)[:, None] * rope_row + head * rope_head
        q_rope = tl.load(q_rope_at + e[None, :], mask=is_row[:, None] & (e < ROPE)[None, :], other=0.0)
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, VALUE_P], tl.float32)
        for kv_begin in tl.range(0, last_position + 1, BLOCK_N):
            position = kv_begin + tl.arange(0, BLOCK_N)
            is_in = (position <= last_position)[:, None]
            token = (position + tl.where(position < shared_len, shared_start, own_start)).to(tl.int64)
            kv_at = kv_ptr + token[:, None] * kv_row + head * (PLAIN + VALUE)
            rope_at = latents_ptr + token[:, None] * (R + ROPE) + R
            key = tl.load(kv_at + d[None, :], mask=is_in & (d < PLAIN)[None, :], other=0.0)
            rope = tl.load(rope_at + e[None, :], mask=is_in & (e < ROPE)[None, :], other=0.0)
            value = tl.load(kv_at + PLAIN + f[None, :], mask=is_in & (f < VALUE)[None, :], other=0.0)
            scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            scores = tl.dot(q, tl.trans(key), scores, input_precision="ieee")
            scores = tl.where(position[None, :] <= row_position[:, None], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
            exps = tl.exp2(scores * scale - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            total = total * correction + tl.sum(exps, 1)
            acc = tl.dot(exps.to(value.dtype), value, acc * correction[:, None], input_precision="ieee")
            highest = new_highest
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + rows.to(tl.int64)[:, None] * out_row + head * VALUE + f[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (f < VALUE)[None, :])


def projection_bytes(latent_dim: int, dtype: torch.dtype) -> int:
    """Memory that steps take for it."""
    return _SCRATCH_BYTES + MAX_TOKENS * latent_dim * dtype.itemsize


def chunk_tokens(pages: Sequence[IntArray], kv_lens: IntArray, page_size: int) -> ChunkTokens:
    """Of chunks with so many tokens in their sequences, on the host. pages: of each sequence, one or more tokens' room.

    Prefixes that lie in the same pages, of some hundred tokens, are there once.
    """
    counts = [-(-length // page_size) for length in kv_lens.tolist()]
    tables = np.zeros((len(counts), max(counts)), np.int32)
    for table, count, own in zip(tables, counts, pages, strict=True):
        # The dummy slot's have none, and nobody reads what comes of it: any page does.
        table[: min(count, len(own))] = own[:count]
    groups = find_shared_prefixes(tables, kv_lens, page_size)
    shared_starts, shared_lens = np.zeros(len(counts), np.int32), np.zeros(len(counts), np.int32)
    spans, end = [], 0
    for rows, length in groups:
        spans.append((int(rows[0]), 0, length))
        shared_starts[rows], shared_lens[rows] = end, length
        end += length
    for chunk, (begin, length) in enumerate(zip(shared_lens.tolist(), kv_lens.tolist(), strict=True)):
        spans.append((chunk, begin, length))
    own_lens = kv_lens - shared_lens
    starts = end + np.cumsum(own_lens) - own_lens
    index = np.concatenate([_pool_indices(tables[chunk], begin, stop, page_size) for chunk, begin, stop in spans])
    parts = (index, starts, shared_starts, shared_lens)
    return ChunkTokens(*(torch.from_numpy(part.astype(np.int32)) for part in parts))


def _pool_indices(table: IntArray, begin: int, stop: int, page_size: int) -> IntArray:
    position = np.arange(begin, stop)
    return table[position // page_size] * page_size + position % page_size


def is_projection_faster(chunk_lens: IntArray, kv_lens: IntArray, num_tokens: int) -> bool:
    """True where chunks with so many tokens in their sequences, shared ones counted once, are faster in this form."""
    pairs = float((chunk_lens * (kv_lens - (chunk_lens - 1) / 2)).sum())
    return pairs + _PAIRS_PER_ROW * float(chunk_lens.sum()) >= _PAIRS_PER_TOKEN * num_tokens


def mla_prompt(
    q_THn: torch.Tensor,
    q_rope_THr: torch.Tensor,
    latents_SC: torch.Tensor,
    tokens: ChunkTokens,
    w_expand_HER: torch.Tensor,
    chunk_row_starts: torch.Tensor,
    chunk_kv_lens_N: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    config: ExtendConfig | None = None,
    scratch_bytes: int = _SCRATCH_BYTES,
) -> torch.Tensor:
    """Attention of each row over its chunk's sequence up to itself, in `out`, [T, H, v]: the same numbers as the
    expansion of `mla_extend`'s result.

    Queries are not absorbed; their features are contiguous, q_rope has RoPE. w_expand_HER [H, n + v, R], contiguous:
    keys, then values of each head. Row starts and KV lengths int32; rows that are of no chunk are left as they are.
    """
    num_rows, num_heads, plain = q_THn.shape
    value, rope, rank = out.shape[2], q_rope_THr.shape[2], w_expand_HER.shape[2]
    assert w_expand_HER.shape[1] == plain + value and latents_SC.shape[1] == rank + rope, (w_expand_HER.shape, rope)
    assert w_expand_HER.is_contiguous() and latents_SC.is_contiguous() and out.stride(1) == value
    assert q_THn.stride(2) == q_rope_THr.stride(2) == out.stride(2) == 1
    config = config or mla_prompt_config(q_THn.dtype)
    latents_UC = latents_SC.index_select(0, tokens.index_U)
    num_tokens, num_chunks = len(latents_UC), len(chunk_kv_lens_N)
    per_head = max(num_tokens * (plain + value) * q_THn.element_size(), 1)
    at_once = max(min(scratch_bytes // per_head, num_heads), 1)
    for head in range(0, num_heads, at_once):
        heads = slice(head, head + at_once)
        kv_UX = latents_UC[:, :rank] @ w_expand_HER[heads].flatten(0, 1).t()
        q, q_rope, of_heads = q_THn[:, heads], q_rope_THr[:, heads], out[:, heads]
        _mla_prompt_kernel[(num_rows // config.block_m + num_chunks, q.shape[1])](
            q, q_rope, kv_UX, latents_UC, tokens.starts_N, tokens.shared_starts_N, tokens.shared_lens_N,
            chunk_row_starts, chunk_kv_lens_N, of_heads, num_chunks, scale * LOG2_E, q.stride(0), q.stride(1),
            q_rope.stride(0), q_rope.stride(1), of_heads.stride(0), kv_UX.stride(0), R=rank, PLAIN=plain,
            PLAIN_P=_padded(plain), ROPE=rope, ROPE_P=_padded(rope), VALUE=value, VALUE_P=_padded(value),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, CHUNKS=_CHUNKS_AT_ONCE, num_warps=config.num_warps,
            num_stages=config.num_stages,
        )  # fmt: skip
    return out


def mla_prompt_config(dtype: torch.dtype) -> ExtendConfig:
    """The defaults: the fastest of those that `bench/gpu/mla.py` tries on an H200."""
    if dtype == torch.float32:
        return ExtendConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)
    return ExtendConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)


def _padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))
