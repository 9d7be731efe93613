"""Paged extend attention: chunks of new tokens, each over its own KV so far (prefix and chunk), causal.

T rows, H query heads, K KV heads, D head_dim, C chunks, S tokens of the KV pool. The algorithm is FlashAttention-2 (Dao
2023) with the keys gathered through page tables. A program takes some consecutive rows of one chunk and all query heads
of one KV head: their (row, head) pairs are the rows of its matmuls, so keys are read once for the group.

    blocks of the grid, BLOCK_Q rows each: chunk c owns starts[c] // BLOCK_Q + c .. starts[c + 1] // BLOCK_Q + c,
    at least as many as it needs; so they are found without a scan, and one without rows returns.

Where chunks start and end is read on the device. So a captured CUDA graph serves any chunks, up to its numbers of rows
and chunks: its grid has blocks for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.decode_attention import is_kv_dtype
from radixmesh.kernels.attention.extend_tiles import extend_tiles
from radixmesh.kernels.attention.split_pieces import row_powers
from radixmesh.kernels.kv_fp8 import KV_FP8, take_rows

LOG2_E = 1.4426950408889634
# Below every score and finite: a row that has seen no key yet must not compute inf - inf.
LOWEST = tl.constexpr(-1.0e30)
# Chunks that a program looks at in one step to find its own.
_CHUNKS_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendConfig:
    """block_m: (row, head) pairs of a program. block_n: KV tokens of a tile. num_stages: as of `SplitConfig`."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def extend_config(group_size: int, head_dim: int, dtype: torch.dtype, max_chunk_len: int) -> ExtendConfig:
    """The defaults for an H200; `bench/gpu/attention.py` measures the alternatives."""
    if dtype == torch.float32:
        return ExtendConfig(block_m=max(16, triton.next_power_of_2(group_size)), block_n=32, num_warps=4, num_stages=3)
    pairs = max_chunk_len * group_size
    least = triton.next_power_of_2(group_size)
    if head_dim > 128:
        return ExtendConfig(block_m=max(64, least), block_n=32, num_warps=4, num_stages=3)
    if pairs <= 16:
        return ExtendConfig(block_m=max(16, least), block_n=64, num_warps=4, num_stages=5)
    if pairs <= 512:
        return ExtendConfig(block_m=max(64, least), block_n=64, num_warps=4, num_stages=5)
    return ExtendConfig(block_m=max(128, least), block_n=128, num_warps=8, num_stages=3)


def paged_extend(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    chunk_slots_C: torch.Tensor,
    chunk_row_starts: torch.Tensor,
    chunk_kv_lens_C: torch.Tensor,
    page_size: int,
    scale: float,
    window: int | None,
    max_chunk_len: int,
    out: torch.Tensor | None = None,
    config: ExtendConfig | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    attention_chunk: int | None = None,
) -> torch.Tensor:
    """Softmax attention of each row over its chunk's sequence up to itself. Returns [T, H, D].

    The rows of chunk c are [chunk_row_starts[c], chunk_row_starts[c + 1]), int32 [C + 1] ascending, and hold the last
    positions of its chunk_kv_lens_C[c] (int32 [C]); their own KV is already in the pool. Rows of a chunk with KV length
    0 give zeros; rows before the first chunk and past the last are left as they are in `out`. A chunk may have no rows.
    keys_SKd, values_SKd: the layer's pool, as of `paged_decode`. page_tables int32 [slots, pages]: position p of slot s
    is token page_tables[s, p // page_size] * page_size + p % page_size. chunk_slots_C int32 [C].
    window: a token sees itself and the `window - 1` before it. max_chunk_len: chooses the configuration; no bound.
    softcap, sinks_H, attention_chunk: as of `paged_decode`.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    num_rows, heads, dim = q_THd.shape
    kv_heads = keys_SKd.shape[1]
    _check(q_THd, keys_SKd, values_SKd, page_tables, (chunk_slots_C, chunk_row_starts, chunk_kv_lens_C))
    out = torch.empty_like(q_THd) if out is None else out
    config = config or extend_config(heads // kv_heads, dim, q_THd.dtype, max_chunk_len)
    block_q = config.block_m // (heads // kv_heads)
    num_chunks = chunk_slots_C.shape[0]
    _extend_kernel[(num_rows // block_q + num_chunks, kv_heads)](
        q_THd,
        keys_SKd,
        values_SKd,
        page_tables,
        chunk_slots_C,
        chunk_row_starts,
        chunk_kv_lens_C,
        sinks_H,
        out,
        page_tables.stride(0),
        num_chunks,
        (scale if softcap is None else softcap) * LOG2_E,
        H=heads,
        KV_HEADS=kv_heads,
        D=dim,
        DP=max(16, triton.next_power_of_2(dim)),
        BLOCK_Q=block_q,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        CHUNKS=_CHUNKS_AT_ONCE,
        PAGE_SIZE=page_size,
        WINDOW=window,
        CHUNK=attention_chunk,
        SOFTCAP=None if softcap is None else scale / softcap,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


def _check(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    heads, dim = q_THd.shape[1:]
    if not q_THd.is_contiguous() or heads % keys_SKd.shape[1]:
        raise ValueError(f"queries must be contiguous with a multiple of {keys_SKd.shape[1]} heads, not {heads}")
    for pool in (keys_SKd, values_SKd):
        if pool.shape[2] != dim or not is_kv_dtype(pool, q_THd) or not pool.is_contiguous():
            raise ValueError(
                f"a pool must be contiguous {q_THd.dtype} or {KV_FP8} of head_dim {dim}, "
                f"not {pool.dtype} {tuple(pool.shape)}"
            )
    slots, row_starts, kv_lens = chunks
    if any(x.dtype != torch.int32 for x in (page_tables, *chunks)):
        raise ValueError("page tables, slots, row starts and KV lengths must be int32")
    if not slots.shape[0] == kv_lens.shape[0] == row_starts.shape[0] - 1:
        raise ValueError(f"{slots.shape[0]} slots, {kv_lens.shape[0]} lengths, {row_starts.shape[0]} row starts")


@triton.jit(
    do_not_specialize=["num_chunks", "table_stride"],
    do_not_specialize_on_alignment=["chunk_slots_ptr", "chunk_row_starts_ptr", "chunk_kv_lens_ptr"],
)
def _extend_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_tables_ptr,
    chunk_slots_ptr,
    chunk_row_starts_ptr,
    chunk_kv_lens_ptr,
    sinks_ptr,
    out_ptr,
    table_stride,
    num_chunks,
    scale,
    H: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = H // KV_HEADS
    # Last blocks first: of a chunk they see the most keys, and the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(chunk_row_starts_ptr)
    chunk = -1
    for begin in range(0, num_chunks, CHUNKS):
        c = begin + tl.arange(0, CHUNKS)
        starts = tl.load(chunk_row_starts_ptr + c, mask=c < num_chunks, other=0) - first
        chunk += tl.sum(((starts // BLOCK_Q + c <= block) & (c < num_chunks)).to(tl.int32), 0)
    start = tl.load(chunk_row_starts_ptr + chunk)
    end = tl.load(chunk_row_starts_ptr + chunk + 1)
    first_row = start + (block - (start - first) // BLOCK_Q - chunk) * BLOCK_Q
    if first_row < end:
        kv_len = tl.load(chunk_kv_lens_ptr + chunk)
        table_ptr = page_tables_ptr + tl.load(chunk_slots_ptr + chunk).to(tl.int64) * table_stride
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, DP)
        m_row = first_row + m // GROUP
        is_row = (m < BLOCK_Q * GROUP) & (m_row < end)
        first_position = kv_len - end + first_row
        last_position = kv_len - end + tl.minimum(first_row + BLOCK_Q, end) - 1
        # Pairs that pad the block see what the last row sees: no row of the matmul is without a key.
        m_position = tl.minimum(kv_len - end + m_row, last_position)
        offset = m_row.to(tl.int64) * (H * D) + (kv_head * GROUP + m % GROUP) * D
        is_pair = is_row[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + offset[:, None] + d[None, :], mask=is_pair, other=0.0)
        power = None
        if keys_ptr.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16:
            power = row_powers(tl.max(tl.abs(q), 1))
            q = (q.to(tl.float32) / power[:, None]).to(tl.float16)
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DP], tl.float32)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + kv_head * GROUP + m % GROUP, mask=is_row, other=0.0).to(tl.float32)
            highest = sink * 1.4426950408889634
            total += 1.0
        # [begin, masked): seen by all rows; [masked, last_position]: by some.
        if CHUNK is not None:
            masked = tl.maximum(first_position, 0) // CHUNK * CHUNK // BLOCK_N * BLOCK_N
        elif WINDOW is None:
            masked = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
            highest, total, acc = extend_tiles(
                q,
                power,
                highest,
                total,
                acc,
                keys_ptr + kv_head * D,
                values_ptr + kv_head * D,
                table_ptr,
                m_position,
                0,
                masked,
                scale,
                KV_HEADS * D,
                D,
                DP,
                BLOCK_N,
                PAGE_SIZE,
                WINDOW,
                SOFTCAP,
                STAGES,
                False,
                CHUNK,
            )
        else:
            masked = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        highest, total, acc = extend_tiles(
            q,
            power,
            highest,
            total,
            acc,
            keys_ptr + kv_head * D,
            values_ptr + kv_head * D,
            table_ptr,
            m_position,
            masked,
            last_position + 1,
            scale,
            KV_HEADS * D,
            D,
            DP,
            BLOCK_N,
            PAGE_SIZE,
            WINDOW,
            SOFTCAP,
            STAGES,
            True,
            CHUNK,
        )
        # Nothing is seen where the KV length is 0.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + offset[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_pair)


def paged_extend_reference(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    chunk_slots_C: torch.Tensor,
    chunk_row_starts: torch.Tensor,
    chunk_kv_lens_C: torch.Tensor,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    attention_chunk: int | None = None,
) -> torch.Tensor:
    """Reference of `paged_extend`, in fp32 and chunk by chunk; zeros in rows of no chunk."""
    out_THd = torch.zeros_like(q_THd)
    group = q_THd.shape[1] // keys_SKd.shape[1]
    starts = chunk_row_starts.tolist()
    for chunk, (slot, length) in enumerate(zip(chunk_slots_C.tolist(), chunk_kv_lens_C.tolist(), strict=True)):
        rows = slice(starts[chunk], starts[chunk + 1])
        if length == 0:
            continue
        position = torch.arange(length, device=q_THd.device)
        token = page_tables[slot, position // page_size].long() * page_size + position % page_size
        k_LHd = take_rows(keys_SKd, token).repeat_interleave(group, dim=1)
        v_LHd = take_rows(values_SKd, token).repeat_interleave(group, dim=1)
        at_T = position[length - (rows.stop - rows.start) :]
        is_hidden = position[None, :] > at_T[:, None]
        if window is not None:
            is_hidden |= position[None, :] <= at_T[:, None] - window
        if attention_chunk is not None:
            is_hidden |= position[None, :] < at_T[:, None] // attention_chunk * attention_chunk
        scores_HTL = torch.einsum("thd,lhd->htl", q_THd[rows].float() * scale, k_LHd)
        if softcap is not None:
            scores_HTL = (scores_HTL / softcap).tanh() * softcap
        scores_HTL = scores_HTL.masked_fill(is_hidden, float("-inf"))
        if sinks_H is not None:
            scores_HTL = torch.cat((scores_HTL, sinks_H.float()[:, None, None].expand(-1, len(at_T), 1)), dim=-1)
        exps_HTL = scores_HTL.softmax(-1)[..., :length]
        out_THd[rows] = torch.einsum("htl,lhd->thd", exps_HTL, v_LHd).to(q_THd.dtype)
    return out_THd
