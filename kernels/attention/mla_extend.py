"""Paged extend attention over latents, absorbed: chunks of new tokens, each over its sequence so far, causal.

T rows, H query heads, R rank of the latents, r RoPE dims, C = R + r, N chunks, S tokens of the pool. The grid and the
order of its blocks are those of `extend_attention.py`. A program takes consecutive rows of one chunk and a block of
query heads, whose (row, head) pairs are the rows of its GEMMs: a latent is read once for all of them, as key and as
value. Where chunks start and end is read on the device, so a captured CUDA graph serves any chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.extend_attention import ExtendConfig
from radixmesh.kernels.attention.mla_decode import check_mla_inputs, mla_head_blocks
from radixmesh.kernels.attention.split_kv import LOG2_E
from radixmesh.kernels.attention.split_pieces import LOWEST, token_index

# Chunks that a program looks at in one step to find its own.
_CHUNKS_AT_ONCE = 32


def mla_extend_config(heads: int, dtype: torch.dtype) -> ExtendConfig:
    """The defaults: the fastest of those that `bench/gpu/mla.py` tries on an H200. heads: of a program."""
    least = max(16, int(triton.next_power_of_2(heads)))
    if dtype == torch.float32:
        return ExtendConfig(block_m=least, block_n=16, num_warps=4, num_stages=1)
    return ExtendConfig(block_m=max(64, least), block_n=64, num_warps=8, num_stages=3)


def mla_extend(
    q_THC: torch.Tensor,
    latents_SC: torch.Tensor,
    page_tables: torch.Tensor,
    chunk_slots_N: torch.Tensor,
    chunk_row_starts: torch.Tensor,
    chunk_kv_lens_N: torch.Tensor,
    page_size: int,
    scale: float,
    out: torch.Tensor,
    config: ExtendConfig | None = None,
) -> torch.Tensor:
    """Softmax-weighted sums of latents, [T, H, R] in `out`: each row over its chunk's sequence up to itself.

    Queries and pool as of `mla_decode`; chunks as of `paged_extend`, int32. Rows of a chunk with KV length 0 give
    zeros; rows before the first chunk and past the last are left as they are. Raises ValueError on what does not fit.
    """
    num_rows, num_heads, _ = q_THC.shape
    rank = out.shape[2]
    check_mla_inputs(q_THC, latents_SC, page_tables, chunk_slots_N, rank)
    if any(x.dtype != torch.int32 for x in (chunk_row_starts, chunk_kv_lens_N)):
        raise ValueError("row starts and KV lengths must be int32")
    blocks = mla_head_blocks(num_heads)
    heads = num_heads // blocks
    config = config or mla_extend_config(heads, q_THC.dtype)
    block_q, num_chunks = config.block_m // heads, chunk_slots_N.shape[0]
    rope = latents_SC.shape[1] - rank
    _mla_extend_kernel[(num_rows // block_q + num_chunks, blocks)](
        q_THC,
        latents_SC,
        page_tables,
        chunk_slots_N,
        chunk_row_starts,
        chunk_kv_lens_N,
        out,
        page_tables.stride(0),
        num_chunks,
        scale * LOG2_E,
        H=num_heads,
        HEADS=heads,
        R=rank,
        RP=max(16, triton.next_power_of_2(rank)),
        ROPE=rope,
        ROPE_P=max(16, triton.next_power_of_2(rope)),
        BLOCK_Q=block_q,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        CHUNKS=_CHUNKS_AT_ONCE,
        PAGE_SIZE=page_size,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


@triton.jit(
    do_not_specialize=["num_chunks", "table_stride"],
    do_not_specialize_on_alignment=["chunk_slots_ptr", "chunk_row_starts_ptr", "chunk_kv_lens_ptr"],
)
def _mla_extend_kernel(
    q_ptr, latents_ptr, page_tables_ptr, chunk_slots_ptr, chunk_row_starts_ptr, chunk_kv_lens_ptr, out_ptr,
    table_stride, num_chunks, scale, H: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    ROPE: tl.constexpr, ROPE_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = R + ROPE
    # Last blocks first: of a chunk they see the most keys, and the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head_block = tl.program_id(1)
    first = tl.load(chunk_row_starts_ptr)
    chunk = -1
    for begin in range(0, num_chunks, CHUNKS):
        index = begin + tl.arange(0, CHUNKS)
        starts = tl.load(chunk_row_starts_ptr + index, mask=index < num_chunks, other=0) - first
        chunk += tl.sum(((starts // BLOCK_Q + index <= block) & (index < num_chunks)).to(tl.int32), 0)
    start = tl.load(chunk_row_starts_ptr + chunk)
    end = tl.load(chunk_row_starts_ptr + chunk + 1)
    first_row = start + (block - (start - first) // BLOCK_Q - chunk) * BLOCK_Q
    if first_row < end:
        kv_len = tl.load(chunk_kv_lens_ptr + chunk)
        table_ptr = page_tables_ptr + tl.load(chunk_slots_ptr + chunk).to(tl.int64) * table_stride
        m = tl.arange(0, BLOCK_M)
        c = tl.arange(0, RP)
        e = tl.arange(0, ROPE_P)
        m_row = first_row + m // HEADS
        is_row = (m < BLOCK_Q * HEADS) & (m_row < end)
        last_position = kv_len - end + tl.minimum(first_row + BLOCK_Q, end) - 1
        # Pairs that pad the block see what the last row sees: no row of the GEMM is without a key.
        m_position = tl.minimum(kv_len - end + m_row, last_position)
        m_lane = m_row.to(tl.int64) * H + head_block * HEADS + m % HEADS
        q_at = q_ptr + m_lane[:, None] * C
        q = tl.load(q_at + c[None, :], mask=is_row[:, None] & (c < R)[None, :], other=0.0)
        q_rope = tl.load(q_at + R + e[None, :], mask=is_row[:, None] & (e < ROPE)[None, :], other=0.0)
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, RP], tl.float32)
        for kv_begin in tl.range(0, last_position + 1, BLOCK_N, num_stages=STAGES):
            position = kv_begin + tl.arange(0, BLOCK_N)
            is_in = position <= last_position
            at = latents_ptr + token_index(table_ptr, position, is_in, PAGE_SIZE)[:, None] * C
            latent_mask = is_in[:, None] if R == RP else is_in[:, None] & (c < R)[None, :]
            rope_mask = is_in[:, None] if ROPE == ROPE_P else is_in[:, None] & (e < ROPE)[None, :]
            latent = tl.load(at + c[None, :], mask=latent_mask, other=0.0)
            rope = tl.load(at + R + e[None, :], mask=rope_mask, other=0.0)
            scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee")
            scores = tl.where(position[None, :] <= m_position[:, None], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
            exps = tl.exp2(scores * scale - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            total = total * correction + tl.sum(exps, 1)
            acc = tl.dot(exps.to(latent.dtype), latent, acc * correction[:, None], input_precision="ieee")
            highest = new_highest
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + m_lane[:, None] * R + c[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (c < R)[None, :])


def mla_extend_reference(
    q_THC: torch.Tensor,
    latents_SC: torch.Tensor,
    page_tables: torch.Tensor,
    chunk_slots_N: torch.Tensor,
    chunk_row_starts: torch.Tensor,
    chunk_kv_lens_N: torch.Tensor,
    page_size: int,
    scale: float,
    rank: int,
) -> torch.Tensor:
    """Reference of `mla_extend`, in fp32 and chunk by chunk; rows outside the chunks are zeros."""
    out_THR = torch.zeros(*q_THC.shape[:2], rank, dtype=torch.float32, device=q_THC.device)
    starts = chunk_row_starts.tolist()
    for index, (slot, length) in enumerate(zip(chunk_slots_N.tolist(), chunk_kv_lens_N.tolist(), strict=True)):
        rows = slice(starts[index], starts[index + 1])
        if length == 0 or rows.start == rows.stop:
            continue
        position = torch.arange(length, device=q_THC.device)
        token = page_tables[slot, position // page_size].long() * page_size + position % page_size
        kv_LC = latents_SC[token].float()
        own = torch.arange(length - (rows.stop - rows.start), length, device=q_THC.device)
        scores_THL = q_THC[rows].float() @ kv_LC.t() * scale
        scores_THL = scores_THL.masked_fill(position > own[:, None, None], float("-inf"))
        out_THR[rows] = scores_THL.softmax(-1) @ kv_LC[:, :rank]
    return out_THR.to(q_THC.dtype)
