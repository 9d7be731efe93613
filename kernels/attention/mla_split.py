"""Split-KV attention over latents (multi-head latent attention, DeepSeek-V2, 2024, section 2.1, absorbed): all query
heads read the same KV head, whose values are the first R numbers of its keys.

The schedule is `split_kv.py`'s. A program takes HEADS query heads of a row, or of the rows of a group that share a
prefix, and reads a token's latent and RoPE key once for all of them: the latent is key and value in one load. Where a
model has more heads than that, the blocks of heads stand in for the KV heads of the schedule.

Legend: H query heads, R rank of the latents, r RoPE dims, C = R + r numbers of a cached token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.split_kv import LOG2_E
from radixmesh.kernels.attention.split_pieces import LOWEST, Tails, query_lanes, tail_index, token_index
from radixmesh.kernels.attention.split_schedule import SplitParts, SplitPlan

# Floats that a merge adds at once, and parts whose loads are under way together.
_MERGED_FLOATS, _MERGED_PARTS = 8192, 2


def mla_split_attention(
    plan: SplitPlan,
    parts: SplitParts,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    slots_U: torch.Tensor,
    ends_U: torch.Tensor,
    page_size: int,
    scale: float,
    out: torch.Tensor | None,
    begins_U: torch.Tensor | None = None,
    members_UR: torch.Tensor | None = None,
    initial: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_lse: torch.Tensor | None = None,
    tails: Tails | None = None,
    use_pdl: bool = False,
) -> None:
    """Runs the kernel over a filled plan. inputs: queries [T, H, C], latents [S, C], page tables; nothing is checked
    here. out: [T, H, R] of any floating dtype; None: all units are left in parts, for `mla_merge_expand`."""
    shape, config = plan.shape, plan.config
    q, latents, page_tables = inputs
    part_rows = shape.query_rows(config)
    rope = latents.shape[-1] - shape.head_dim
    columns = min(shape.padded_dim, max(16, _MERGED_FLOATS // part_rows))
    initial_out, initial_lse = initial if initial is not None else (None, None)
    tail_starts, tail_tokens = tails if tails is not None else (None, None)
    if config.is_sm90 and rope == 64 and tails is None:
        # Gluon has no interpreter: tests on a CPU never come here.
        from radixmesh.kernels.attention.mla_split_sm90 import MAX_REGISTERS, NUM_WARPS, mla_split_sm90_kernel

        assert begins_U is None and initial is None and shape.head_dim == 512 and part_rows == 64, (shape, config)
        mla_split_sm90_kernel[(plan.num_programs,)](
            q, latents, page_tables, slots_U, ends_U, members_UR, plan.tile_starts, plan.first_units, parts.outputs,
            parts.lses, parts.arrivals, out, out_lse, page_tables.stride(0), ends_U.shape[0], scale * LOG2_E,
            H=shape.num_heads, HEADS=shape.group_size, R=shape.head_dim, ROPE=rope, MEMBERS=shape.members,
            PAGE_SIZE=page_size, MIN_TILES=config.min_tiles, IS_WHOLE=config.is_whole, NUM_PROGRAMS=plan.num_programs,
            PDL=use_pdl, launch_pdl=use_pdl, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        return
    _mla_split_kernel[(plan.num_programs,)](
        q,
        latents,
        page_tables,
        slots_U,
        begins_U,
        ends_U,
        members_UR,
        plan.tile_starts,
        plan.first_units,
        parts.outputs,
        parts.lses,
        parts.arrivals,
        initial_out,
        initial_lse,
        tail_starts,
        tail_tokens,
        out,
        out_lse,
        page_tables.stride(0),
        ends_U.shape[0],
        scale * LOG2_E,
        H=shape.num_heads,
        HEADS=shape.group_size,
        R=shape.head_dim,
        RP=shape.padded_dim,
        ROPE=rope,
        ROPE_P=max(16, triton.next_power_of_2(rope)),
        MEMBERS=shape.members,
        M=max(16, part_rows),
        PART_ROWS=part_rows,
        COLUMNS=columns,
        TAIL=1 if tails is None else tails.tokens_TD.shape[1],
        BLOCK_N=config.block_n,
        PAGE_SIZE=page_size,
        MIN_TILES=config.min_tiles,
        IS_WHOLE=config.is_whole,
        NUM_PROGRAMS=plan.num_programs,
        MERGED_AT_ONCE=_MERGED_PARTS,
        # Tiles of the plan for Hopper are long: one at a time fits into shared memory.
        STAGES=1 if config.is_sm90 else config.num_stages,
        PDL=use_pdl,
        launch_pdl=use_pdl,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )


@triton.constexpr_function
def _half(padded_rank: int) -> int:
    """Tensor cores multiply 16 numbers and more at a time."""
    return max(16, padded_rank // 2)


@triton.jit(
    do_not_specialize=["num_units", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "begins_ptr", "ends_ptr", "tail_starts_ptr"],
)
def _mla_split_kernel(
    q_ptr, latents_ptr, page_tables_ptr, slots_ptr, begins_ptr, ends_ptr, members_ptr, tile_starts_ptr,
    first_units_ptr, parts_ptr, part_lses_ptr, arrivals_ptr, initial_ptr, initial_lse_ptr, tail_starts_ptr,
    tails_ptr, out_ptr, out_lse_ptr, table_stride, num_units, scale, H: tl.constexpr, HEADS: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, ROPE: tl.constexpr, ROPE_P: tl.constexpr, MEMBERS: tl.constexpr,
    M: tl.constexpr, PART_ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MIN_TILES: tl.constexpr, IS_WHOLE: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    MERGED_AT_ONCE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Units are rows, or with `members_ptr` int32 [units, MEMBERS] groups of rows (-1: none).

    begins_ptr (or None): rows start at this position, with the softmax of what lies before it from `initial`.
    tails_ptr (or None): `Tails` of the rows, which are no groups then.
    """
    HEAD_BLOCKS: tl.constexpr = H // HEADS
    C: tl.constexpr = R + ROPE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    num_tiles = tl.load(tile_starts_ptr + num_units) * HEAD_BLOCKS
    share = tl.maximum((num_tiles + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)
    work = program * share
    work_end = tl.minimum(work + share, num_tiles)
    unit = tl.load(first_units_ptr + program)
    # The plan, lengths and slots were there before the kernel ahead: a first unit's are read beside it.
    unit_begin = tl.load(tile_starts_ptr + unit)
    unit_end = tl.load(tile_starts_ptr + unit + 1)
    kv_end = tl.load(ends_ptr + unit)
    slot = tl.load(slots_ptr + unit)
    # Latents in two halves: a query's products with a whole one would be one chain of dependent sums, which takes about
    # as long as a tile's way from memory.
    HALF: tl.constexpr = _half(RP)
    c = tl.arange(0, HALF)
    e = tl.arange(0, ROPE_P)
    n = tl.arange(0, BLOCK_N)
    if PDL:
        # Queries, the rows' own latents and parts of prefixes come from the kernels ahead.
        tl.extra.cuda.gdc_wait()

    while work < work_end:
        # Position within the unit: block of heads, and tiles [tile, last) of it. `_unit_tiles` of split_kv.py would be
        # other instructions in one of the launches (sm_90: 3,784 for 3,776).
        tiles = unit_end - unit_begin
        head_block = (work - unit_begin * HEAD_BLOCKS) // tiles
        block_work = unit_begin * HEAD_BLOCKS + head_block * tiles
        tile = work - block_work
        last = tl.minimum(tiles, work_end - block_work)
        if IS_WHOLE:
            last = tiles
            # It started in the share of a program before.
            tile = tl.where(tile > 0, tiles, 0)
        kv_begin = 0
        if begins_ptr is not None:
            kv_begin = tl.load(begins_ptr + unit)
        table_ptr = page_tables_ptr + slot.to(tl.int64) * table_stride

        m_lane, is_query = query_lanes(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, "")
        q_at = q_ptr + m_lane.to(tl.int64)[:, None] * C
        q = tl.load(q_at + c[None, :], mask=is_query[:, None] & (c < R)[None, :], other=0.0)
        q_high = tl.load(q_at + HALF + c[None, :], mask=is_query[:, None] & (c < R - HALF)[None, :], other=0.0)
        q_rope = tl.load(q_at + R + e[None, :], mask=is_query[:, None] & (e < ROPE)[None, :], other=0.0)

        highest, total, acc, acc_high = _softmax_before(
            initial_ptr, initial_lse_ptr, m_lane, is_query, tile, kv_begin, R, HALF, M
        )
        # Sums of a row by token of a tile, and not over them: warps add theirs to each other once.
        totals = tl.where((n == 0)[None, :], total[:, None], 0.0)
        # Zeros of which the compiler does not know it: it would make one chain of both halves.
        nothing = tl.zeros([M, BLOCK_N], tl.float32) + tl.where(kv_end < 0, 1.0, 0.0)
        for t in tl.range(tile, last, num_stages=STAGES):
            position = kv_begin + t * BLOCK_N + n
            is_in = position < kv_end
            token = token_index(table_ptr, position, is_in, PAGE_SIZE)
            if tails_ptr is not None:
                token = tail_index(token, tails_ptr, unit, position - tl.load(tail_starts_ptr + unit), is_in, TAIL)
            at = latents_ptr + token[:, None] * C
            latent_mask = is_in[:, None] if R >= HALF else is_in[:, None] & (c < R)[None, :]
            high_mask = is_in[:, None] if R == 2 * HALF else is_in[:, None] & (c < R - HALF)[None, :]
            rope_mask = is_in[:, None] if ROPE == ROPE_P else is_in[:, None] & (e < ROPE)[None, :]
            latent = tl.load(at + c[None, :], mask=latent_mask, other=0.0)
            latent_high = tl.load(at + HALF + c[None, :], mask=high_mask, other=0.0)
            rope = tl.load(at + R + e[None, :], mask=rope_mask, other=0.0)
            scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee")
            scores += tl.dot(q_high, tl.trans(latent_high), nothing, input_precision="ieee")
            scores = tl.where(is_in[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
            exps = tl.exp2(scores * scale - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            totals = totals * correction[:, None] + exps
            weights = exps.to(latent.dtype)
            acc = tl.dot(weights, latent, acc * correction[:, None], input_precision="ieee")
            acc_high = tl.dot(weights, latent_high, acc_high * correction[:, None], input_precision="ieee")
            highest = new_highest

        total = tl.sum(totals, 1)
        divisor = tl.where(total > 0, total, 1.0)[:, None]
        acc, acc_high = acc / divisor, acc_high / divisor
        lse = tl.where(total > 0, highest + tl.log2(total), LOWEST)
        if members_ptr is not None:
            # Read again (.cg: not the load above), or registers would be held through the loop.
            m_lane, is_query = query_lanes(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, ".cg")
        partial = 2 * program + (tile == 0).to(tl.int32)
        if out_ptr is None:
            # A program may have several whole units, but one part before them and one behind.
            is_whole = (tile == 0) & (last == tiles)
            partial = tl.where(is_whole, 2 * NUM_PROGRAMS + unit * HEAD_BLOCKS + head_block, partial)
            _store_part(parts_ptr, part_lses_ptr, partial, acc, acc_high, lse, R, RP, M, PART_ROWS)
        elif (tile == 0) & (last == tiles):
            out_at = out_ptr + m_lane.to(tl.int64)[:, None] * R + c[None, :]
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_query[:, None] & (c < R)[None, :])
            high = acc_high.to(out_ptr.dtype.element_ty)
            tl.store(out_at + HALF, high, mask=is_query[:, None] & (c < R - HALF)[None, :])
            if out_lse_ptr is not None:
                tl.store(out_lse_ptr + m_lane, lse, mask=is_query)
        elif not IS_WHOLE:
            _store_part(parts_ptr, part_lses_ptr, partial, acc, acc_high, lse, R, RP, M, PART_ROWS)
            first_program = block_work // share
            num_parts = (block_work + tiles - 1) // share - first_program + 1
            # All threads' parts are written before the count says so; the count orders them for the last program.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + first_program, 1, sem="acq_rel")
            if arrived == num_parts - 1:
                tl.store(arrivals_ptr + first_program, 0)
                _merge(
                    parts_ptr, part_lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first_program,
                    num_parts, H, HEADS, R, RP, MEMBERS, PART_ROWS, COLUMNS, MERGED_AT_ONCE,
                )  # fmt: skip
        work = block_work + last
        if work >= unit_end * HEAD_BLOCKS:
            unit = tl.minimum(unit + 1, num_units - 1)
            unit_begin = unit_end
            unit_end = tl.load(tile_starts_ptr + unit + 1)
            kv_end = tl.load(ends_ptr + unit)
            slot = tl.load(slots_ptr + unit)


@triton.jit
def _softmax_before(
    initial_ptr, initial_lse_ptr, lane, is_query, tile, kv_begin, R: tl.constexpr, HALF: tl.constexpr, M: tl.constexpr
):
    """The softmax that a unit's tiles continue, of a prefix or of nothing: highest and total [M], sums [M, HALF]
    twice."""
    m = tl.arange(0, M)
    c = tl.arange(0, HALF)
    highest = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, HALF], tl.float32)
    high = acc
    if initial_ptr is not None:
        # Only the unit's first tile continues a prefix.
        is_continued = is_query & (m * 0 + tl.where(tile == 0, kv_begin, 0) > 0)
        highest = tl.load(initial_lse_ptr + lane, mask=is_continued, other=LOWEST)
        total = tl.where(is_continued, 1.0, 0.0)
        initial_at = initial_ptr + lane.to(tl.int64)[:, None] * R + c[None, :]
        acc = tl.load(initial_at, mask=is_continued[:, None] & (c < R)[None, :], other=0.0)
        high = tl.load(initial_at + HALF, mask=is_continued[:, None] & (c < R - HALF)[None, :], other=0.0)
    return highest, total, acc, high


@triton.jit
def _store_part(
    parts_ptr, part_lses_ptr, partial, acc, acc_high, lse, R: tl.constexpr, RP: tl.constexpr, M: tl.constexpr,
    PART_ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = _half(RP)
    m = tl.arange(0, M)
    c = tl.arange(0, HALF)
    part_at = parts_ptr + (partial * PART_ROWS + m).to(tl.int64)[:, None] * RP + c[None, :]
    tl.store(part_at, acc, mask=(m < PART_ROWS)[:, None] & (c < R)[None, :])
    tl.store(part_at + HALF, acc_high, mask=(m < PART_ROWS)[:, None] & (c < R - HALF)[None, :])
    tl.store(part_lses_ptr + partial * PART_ROWS + m, lse, mask=m < PART_ROWS)


@triton.jit
def _merge(
    parts_ptr, lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first, num_parts, H: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, LSES: tl.constexpr = 16,
):  # fmt: skip
    """Writes the softmax-weighted mean of a unit's parts, some columns at a time: registers do not hold all of them.

    Parts were written by other SMs: read past this SM's L1 (.cg).
    """
    row = tl.arange(0, ROWS)
    if members_ptr is None:
        out_row = unit + row * 0
        is_row = row < HEADS
    else:
        member = row // HEADS
        out_row = tl.load(members_ptr + unit * MEMBERS + member, mask=member < MEMBERS, other=-1)
        is_row = out_row >= 0
    query_row = out_row * H + head_block * HEADS + row % HEADS
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_parts, LSES):
        # A program's second partial result is of the unit that it ended in, which is where the unit starts.
        part = start + tl.arange(0, LSES)
        at = (2 * (first + part) + tl.where(part == 0, 1, 0))[:, None] * ROWS + row[None, :]
        lses = tl.load(lses_ptr + at, mask=(part < num_parts)[:, None], other=LOWEST, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(lses, 0))
        total = total * tl.exp2(highest - new_highest) + tl.sum(tl.exp2(lses - new_highest[None, :]), 0)
        highest = new_highest
    lse_of_all = highest + tl.log2(total)
    if out_lse_ptr is not None:
        tl.store(out_lse_ptr + query_row, lse_of_all, mask=is_row)
    for begin in range(0, RP, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        merged = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, num_parts, AT_ONCE):
            for index in tl.static_range(AT_ONCE):
                part = start + index
                is_part = (row * 0 + part < num_parts) & is_row
                row_at = (2 * (first + part) + tl.where(part == 0, 1, 0)) * ROWS + row
                lse = tl.load(lses_ptr + row_at, mask=is_part, other=LOWEST, cache_modifier=".cg")
                part_at = parts_ptr + row_at.to(tl.int64)[:, None] * RP + column[None, :]
                mask = is_part[:, None] & (column < R)[None, :]
                weight = tl.exp2(lse - lse_of_all)
                merged += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg") * weight[:, None]
        out_at = out_ptr + query_row.to(tl.int64)[:, None] * R + column[None, :]
        tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < R)[None, :])
