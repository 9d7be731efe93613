"""Split-KV attention over a paged pool, scheduled on the device: what plain and shared-prefix decode have in common.

The work of a step is a line of tiles. Unit after unit (a row, or a group of rows that share a prefix), within a unit
one block of KV heads after the other, within a block its KV tokens in tiles of `block_n`. The line is cut into one
equal share for each of a fixed number of resident programs ("stream-K", Osama et al. 2023; for decode, "lean
attention", Sanovar et al. 2024), so any mixture of lengths keeps all SMs busy, and one captured graph serves them all:

    units   |  row 0, heads 0 |  row 0, heads 1 | row 1, heads 0 | ...
    tiles   |##|##|##|##|##|##|##|##|##|##|##|##|##|##|##|##|##|##|
    shares  |<- program 0 ->|<- program 1 ->|<- program 2 ->|

A unit that a share's end cuts is merged by whichever of its programs arrives last, always in the order of its parts.
A program leaves at most two parts: of the unit that it starts in the middle of, and of the one that it ends within.

A program can take `heads` KV heads of a token at once, for longer contiguous reads. Their query heads fill the rows of
one matmul that would otherwise be padding: queries lie block-diagonally in [queries, heads x head_dim], so a key row
of all these heads gives each query its own score; of the matmul with the values each query keeps its own columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.split_pieces import (
    LOWEST,
    Tails,
    fp8_pairs,
    merge_parts,
    prefetch_tile,
    query_lanes,
    query_pairs,
    soft_capped,
    store_dims,
    tail_index,
    token_index,
)
from radixmesh.kernels.attention.split_schedule import SplitParts, SplitPlan
from radixmesh.kernels.kv_fp8 import KV_FP8

LOG2_E = 1.4426950408889634
# Floats of the parts that a merge holds in registers at once, and the parts: its loads are unrolled.
_MERGED_FLOATS, _MERGED_PARTS = 4096, 8


def split_attention(
    plan: SplitPlan,
    parts: SplitParts,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    slots_U: torch.Tensor,
    ends_U: torch.Tensor,
    page_size: int,
    scale: float,
    out: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
    begins_U: torch.Tensor | None = None,
    members_UR: torch.Tensor | None = None,
    initial: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_lse: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    attention_chunk: int | None = None,
    tails: Tails | None = None,
    use_pdl: bool = False,
) -> None:
    """Runs the kernel over a filled plan. inputs: queries, keys, values, page tables; nothing is checked here."""
    assert sinks_H is None or initial is None, "the softmax of a prefix would have them already"
    shape, config = plan.shape, plan.config
    q, keys, values, page_tables = inputs
    part_rows = shape.query_rows(config)
    pack = 1
    if keys.dtype == KV_FP8 and q.dtype == torch.bfloat16 and shape.head_dim % 2 == 0 and shape.padded_dim >= 32:
        pack, keys, values = 2, keys.view(torch.int16), values.view(torch.int16)
    initial_out, initial_lse = initial if initial is not None else (None, None)
    tail_starts, tail_tokens = tails if tails is not None else (None, None)
    _split_attention_kernel[(plan.num_programs,)](
        q, keys, values, page_tables, slots_U, begins_U, ends_U, members_UR, plan.tile_starts, plan.first_units,
        parts.outputs, parts.lses, parts.arrivals, initial_out, initial_lse, sinks_H, tail_starts,
        tail_tokens, out, out_lse, page_tables.stride(0), ends_U.shape[0],
        (scale if softcap is None else softcap) * LOG2_E, H=shape.num_heads, KV_HEADS=shape.num_kv_heads,
        D=shape.head_dim, DP=shape.padded_dim, PACK=pack, HEADS=config.heads,
        MEMBERS=shape.members, M=max(16, part_rows), PART_ROWS=part_rows,
        MERGED_AT_ONCE=max(1, min(_MERGED_PARTS, _MERGED_FLOATS // (part_rows * shape.padded_dim))),
        BLOCK_N=config.block_n, PAGE_SIZE=page_size, WINDOW=window, CHUNK=attention_chunk,
        TAIL=1 if tails is None else tails.tokens_TD.shape[1],
        # The factor that makes a dot product a share of the cap; the share is then scaled by the cap.
        SOFTCAP=None if softcap is None else scale / softcap,
        MIN_TILES=config.min_tiles, IS_WHOLE=config.is_whole, NUM_PROGRAMS=plan.num_programs, STAGES=config.num_stages,
        PDL=use_pdl, launch_pdl=use_pdl, num_warps=config.num_warps, maxnreg=config.max_registers,
    )  # fmt: skip


# One compilation serves all batches: nothing is compiled anew for a batch of 1 or a slice of the slots. Its pieces
# are those that leave registers, spills, shared memory and numbers of instructions as they were without (sm_90).
@triton.jit(
    do_not_specialize=["num_units", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "begins_ptr", "ends_ptr", "tail_starts_ptr"],
)
def _split_attention_kernel(
    q_ptr, keys_ptr, values_ptr, page_tables_ptr, slots_ptr, begins_ptr, ends_ptr, members_ptr, tile_starts_ptr,
    first_units_ptr, parts_ptr, part_lses_ptr, arrivals_ptr, initial_ptr, initial_lse_ptr, sinks_ptr,
    tail_starts_ptr, tails_ptr, out_ptr, out_lse_ptr, table_stride, num_units, scale, H: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PACK: tl.constexpr, HEADS: tl.constexpr,
    MEMBERS: tl.constexpr, M: tl.constexpr, PART_ROWS: tl.constexpr, MERGED_AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    SOFTCAP: tl.constexpr, MIN_TILES: tl.constexpr, IS_WHOLE: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See the module. Units are rows, or with `members_ptr` int32 [units, MEMBERS] groups of rows (-1: none).

    begins_ptr (or None): rows start at this position, with the softmax of what lies before it from `initial`.
    sinks_ptr (or None): scores [H] that join the softmax of a row's head, and have no values.
    tails_ptr (or None): `Tails` of the rows, which are no groups then.
    """
    GROUP: tl.constexpr = H // KV_HEADS
    UNIT_HEADS: tl.constexpr = HEADS * GROUP
    HEAD_BLOCKS: tl.constexpr = KV_HEADS // HEADS
    if PDL:
        # The next kernel may come in beside these programs: few rows leave most of the device to it.
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    num_tiles = tl.load(tile_starts_ptr + num_units) * HEAD_BLOCKS
    share = tl.maximum((num_tiles + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)
    work = program * share
    work_end = tl.minimum(work + share, num_tiles)
    unit = tl.load(first_units_ptr + program)
    if PDL and members_ptr is None:
        if work < work_end:
            prefetch_tile(
                keys_ptr, values_ptr, page_tables_ptr, slots_ptr, begins_ptr, ends_ptr, tile_starts_ptr, table_stride,
                unit, work, KV_HEADS, D // PACK, HEADS, HEAD_BLOCKS, BLOCK_N, PAGE_SIZE, WINDOW, CHUNK,
            )  # fmt: skip

    # Of an FP8 pool columns are pairs of dims, of which the second ones are read as `odd`.
    KD: tl.constexpr = D // PACK
    KDP: tl.constexpr = DP // PACK
    zero: tl.constexpr = 0 if PACK == 2 else 0.0
    column = tl.arange(0, HEADS * KDP)
    column_head = column // KDP
    column_dim = column % KDP
    kv_column = column if D == DP else column_head * KD + column_dim
    m = tl.arange(0, M)
    m_head = m % UNIT_HEADS
    n = tl.arange(0, BLOCK_N)

    while work < work_end:
        unit_begin = tl.load(tile_starts_ptr + unit)
        unit_end = tl.load(tile_starts_ptr + unit + 1)
        tiles, head_block, block_work, tile, last = _unit_tiles(
            unit_begin, unit_end, work, work_end, HEAD_BLOCKS, IS_WHOLE
        )
        kv_end = tl.load(ends_ptr + unit)
        kv_begin = _kv_begin(begins_ptr, unit, kv_end, WINDOW, CHUNK)
        table_ptr = page_tables_ptr + tl.load(slots_ptr + unit).to(tl.int64) * table_stride

        # The unit's queries, block-diagonally.
        m_lane, is_query = query_lanes(members_ptr, unit, head_block, H, UNIT_HEADS, MEMBERS, M, "")
        lane_offset = m_lane[:, None] * D + column_dim[None, :] * PACK
        is_own = is_query[:, None] & ((m_head // GROUP)[:, None] == column_head[None, :])
        if D != DP:
            is_own = is_own & (column_dim < KD)[None, :]
        if PDL:
            # Queries, the rows' own keys and values, and parts of prefixes come from the kernels ahead; the rest does
            # not, and has been read meanwhile.
            tl.extra.cuda.gdc_wait()
        q = tl.load(q_ptr + lane_offset, mask=is_own, other=0.0)
        if PACK == 2:
            q, q_odd, power = query_pairs(q, tl.load(q_ptr + lane_offset + 1, mask=is_own, other=0.0))

        highest, total, acc, acc_odd = _softmax_before(
            initial_ptr, initial_lse_ptr, sinks_ptr, m_lane, lane_offset, is_query, is_own,
            head_block * UNIT_HEADS + m_head, tile, kv_begin, M, HEADS * KDP, PACK,
        )  # fmt: skip
        keys_block_ptr = keys_ptr + head_block * (HEADS * KD)
        values_block_ptr = values_ptr + head_block * (HEADS * KD)
        for t in tl.range(tile, last, num_stages=STAGES):
            position = kv_begin + t * BLOCK_N + n
            is_in = position < kv_end
            token = token_index(table_ptr, position, is_in, PAGE_SIZE)
            if tails_ptr is not None:
                token = tail_index(token, tails_ptr, unit, position - tl.load(tail_starts_ptr + unit), is_in, TAIL)
            kv_offset = token[:, None] * (KV_HEADS * KD) + kv_column[None, :]
            is_loaded = is_in[:, None] if D == DP else is_in[:, None] & (column_dim < KD)[None, :]
            k = tl.load(keys_block_ptr + kv_offset, mask=is_loaded, other=zero)
            if PACK == 2:
                k, k_odd = fp8_pairs(k)
                scores = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k))) * power[:, None]
            else:
                # An FP8 pool's numbers become the query's dtype, which holds each of them; otherwise the two are one.
                scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
            if SOFTCAP is not None:
                scores = soft_capped(scores, SOFTCAP)
            scores = tl.where(is_in[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
            exps = tl.exp2(scores * scale - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            total = total * correction + tl.sum(exps, 1)
            v = tl.load(values_block_ptr + kv_offset, mask=is_loaded, other=zero)
            if PACK == 2:
                v, v_odd = fp8_pairs(v)
                exps = exps.to(tl.float16)
                acc = tl.dot(exps, v, acc * correction[:, None])
                acc_odd = tl.dot(exps, v_odd, acc_odd * correction[:, None])
            else:
                acc = tl.dot(exps.to(q.dtype), v.to(q.dtype), acc * correction[:, None], input_precision="ieee")
            highest = new_highest

        divisor = tl.where(total > 0, total, 1.0)[:, None]
        acc = acc / divisor
        acc_odd = acc_odd / divisor
        lse = tl.where(total > 0, highest + tl.log2(total), LOWEST)
        if members_ptr is not None:
            # Read again (.cg: not the load above), or a register an output would be held through the loop.
            m_lane, is_query = query_lanes(members_ptr, unit, head_block, H, UNIT_HEADS, MEMBERS, M, ".cg")
            lane_offset = m_lane[:, None] * D + column_dim[None, :] * PACK
            is_own = is_query[:, None] & ((m_head // GROUP)[:, None] == column_head[None, :])
            if D != DP:
                is_own = is_own & (column_dim < KD)[None, :]
        if (tile == 0) & (last == tiles):
            store_dims(out_ptr + lane_offset, acc, acc_odd, is_own, PACK)
            if out_lse_ptr is not None:
                tl.store(out_lse_ptr + m_lane, lse, mask=is_query)
        elif not IS_WHOLE:
            partial = 2 * program + (tile == 0).to(tl.int32)
            part_offset = (partial * PART_ROWS + m)[:, None] * DP + column_dim[None, :] * PACK
            store_dims(parts_ptr + part_offset, acc, acc_odd, is_own & (m < PART_ROWS)[:, None], PACK)
            tl.store(part_lses_ptr + partial * PART_ROWS + m, lse, mask=m < PART_ROWS)
            first_program = block_work // share
            num_parts = (block_work + tiles - 1) // share - first_program + 1
            # All threads' parts are written before the count says so; the count orders them for the last program.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + first_program, 1, sem="acq_rel")
            if arrived == num_parts - 1:
                tl.store(arrivals_ptr + first_program, 0)
                _merge_unit(
                    parts_ptr, part_lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first_program,
                    num_parts, H, D, DP, UNIT_HEADS, MEMBERS, PART_ROWS, MERGED_AT_ONCE,
                )  # fmt: skip
        work = block_work + last
        if work >= unit_end * HEAD_BLOCKS:
            unit += 1
    if PDL:
        # Programs without work wait as well: when this kernel is over, those ahead of it are.
        tl.extra.cuda.gdc_wait()


@triton.jit
def _merge_unit(
    parts_ptr, part_lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first_program, num_parts,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, UNIT_HEADS: tl.constexpr, MEMBERS: tl.constexpr,
    PART_ROWS: tl.constexpr, MERGED_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges all parts of a unit's block of heads into its outputs."""
    d = tl.arange(0, DP)
    merged, merged_lse = merge_parts(parts_ptr, part_lses_ptr, first_program, num_parts, PART_ROWS, DP, MERGED_AT_ONCE)
    r_lane, is_row = query_lanes(members_ptr, unit, head_block, H, UNIT_HEADS, MEMBERS, PART_ROWS, "")
    is_out = is_row[:, None] & (d < D)[None, :]
    tl.store(out_ptr + r_lane[:, None] * D + d[None, :], merged.to(out_ptr.dtype.element_ty), mask=is_out)
    if out_lse_ptr is not None:
        tl.store(out_lse_ptr + r_lane, merged_lse, mask=is_row)


@triton.jit
def _softmax_before(
    initial_ptr, initial_lse_ptr, sinks_ptr, lane, lane_offset, is_query, is_own, head, tile, kv_begin,
    M: tl.constexpr, COLUMNS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """The softmax that a unit's tiles continue: a prefix's, that of sinks, or none. highest, total [M]; sums of values
    [M, COLUMNS], of an FP8 pool of even and of odd dims."""
    m = tl.arange(0, M)
    highest = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, COLUMNS], tl.float32)
    acc_odd = acc
    if initial_ptr is not None:
        # Only the unit's first tile continues a prefix.
        is_continued = is_query & (m * 0 + tl.where(tile == 0, kv_begin, 0) > 0)
        highest = tl.load(initial_lse_ptr + lane, mask=is_continued, other=LOWEST)
        total = tl.where(is_continued, 1.0, 0.0)
        acc = tl.load(initial_ptr + lane_offset, mask=is_own & is_continued[:, None], other=0.0)
        if PACK == 2:
            acc_odd = tl.load(initial_ptr + lane_offset + 1, mask=is_own & is_continued[:, None], other=0.0)
    if sinks_ptr is not None:
        # The unit's first tile has them.
        has_sink = is_query & (m * 0 + tile == 0)
        sink = tl.load(sinks_ptr + head, mask=has_sink, other=0.0).to(tl.float32)
        highest = tl.where(has_sink, sink * 1.4426950408889634, LOWEST)
        total = tl.where(has_sink, 1.0, 0.0)
    return highest, total, acc, acc_odd


@triton.jit
def _kv_begin(begins_ptr, unit, kv_end, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a unit's rows attend to."""
    begin = 0
    if begins_ptr is not None:
        begin = tl.load(begins_ptr + unit)
    if WINDOW is not None:
        begin = tl.maximum(kv_end - WINDOW, 0)
    if CHUNK is not None:
        begin = tl.maximum(kv_end - 1, 0) // CHUNK * CHUNK
    return begin


@triton.jit
def _unit_tiles(unit_begin, unit_end, work, work_end, HEAD_BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """The position of a share within a unit whose tiles are [unit_begin, unit_end) for each block of heads.

    Returns tiles of a block; the block; the share index of its first tile; and the tiles [first, last) of it that
    belong to this share, none where IS_WHOLE and the block began in the share of a program before.
    """
    tiles = unit_end - unit_begin
    head_block = (work - unit_begin * HEAD_BLOCKS) // tiles
    block_work = unit_begin * HEAD_BLOCKS + head_block * tiles
    tile = work - block_work
    last = tl.minimum(tiles, work_end - block_work)
    if IS_WHOLE:
        last = tiles
        tile = tl.where(tile > 0, tiles, 0)
    return tiles, head_block, block_work, tile, last
