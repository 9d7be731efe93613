"""The kernel of `mla_split.py` for Hopper, where 64 query rows fill a program's GEMMs: its loop written out.

    tile t       | wait, barrier | scores: wgmma          | softmax -> shared | values: wgmma |
    tile t + 1                   | copies to shared memory ................................... |
    tile t + 2                                            | page table        |

Triton's own layouts have both warp groups compute all scores, since a second GEMM follows, and its pipeline starts a
tile's copies when the scores of the tile before are done. Here a warp group computes the scores of half of a tile's
tokens, then half of the latent's columns, and copies run beside a whole tile. Schedule, parts and the merge are those
of `mla_split.py`. The interpreter does not run it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOWEST: gl.constexpr = gl.constexpr(-1e30)
NUM_WARPS = 8
BLOCK_N = 64
QUERIES = 64


@gluon.jit
def _gdc_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gdc_launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _tokens(table_ptr, begin, kv_end, PAGE_SIZE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Indices in the pool of N positions from `begin` on; past the end the last one's again, whose score counts for
    nothing. Those of an empty row are token 0: its table says nothing."""
    position = begin + gl.arange(0, N, LAYOUT)
    position = gl.maximum(gl.minimum(position, kv_end - 1), 0)
    page = gl.load(table_ptr + position // PAGE_SIZE, mask=position < kv_end, other=0)
    return page * PAGE_SIZE + position % PAGE_SIZE


@gluon.jit
def _copy_tile(
    latents_ptr, latent_s, rope_s, tokens, rope_tokens, R: gl.constexpr, ROPE: gl.constexpr, WIDE: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = R + ROPE
    c = gl.arange(0, R, gl.SliceLayout(0, WIDE))
    at = latents_ptr + tokens.to(gl.int64)[:, None] * C + c[None, :]
    async_copy.async_copy_global_to_shared(latent_s, at)
    e = gl.arange(0, ROPE, gl.SliceLayout(0, NARROW))
    rope_at = latents_ptr + rope_tokens.to(gl.int64)[:, None] * C + R + e[None, :]
    async_copy.async_copy_global_to_shared(rope_s, rope_at)
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["num_units", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "ends_ptr"],
)
def mla_split_sm90_kernel(
    q_ptr, latents_ptr, page_tables_ptr, slots_ptr, ends_ptr, members_ptr, tile_starts_ptr, first_units_ptr, parts_ptr,
    part_lses_ptr, arrivals_ptr, out_ptr, out_lse_ptr, table_stride, num_units, scale, H: gl.constexpr,
    HEADS: gl.constexpr, R: gl.constexpr, ROPE: gl.constexpr, MEMBERS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    MIN_TILES: gl.constexpr, IS_WHOLE: gl.constexpr, NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Arguments as of `_mla_split_kernel`."""
    M: gl.constexpr = 64
    N: gl.constexpr = 64
    HEAD_BLOCKS: gl.constexpr = H // HEADS
    C: gl.constexpr = R + ROPE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = latents_ptr.dtype.element_ty

    if PDL:
        _gdc_launch_dependents()
    program = gl.program_id(0)
    num_tiles = gl.load(tile_starts_ptr + num_units) * HEAD_BLOCKS
    share = gl.maximum((num_tiles + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)
    work = program * share
    work_end = gl.minimum(work + share, num_tiles)
    unit = gl.load(first_units_ptr + program)
    q_s = gl.allocate_shared_memory(dtype, [M, R], TILE)
    q_rope_s = gl.allocate_shared_memory(dtype, [M, ROPE], TILE)
    latents_s = gl.allocate_shared_memory(dtype, [2, N, R], TILE)
    ropes_s = gl.allocate_shared_memory(dtype, [2, N, ROPE], TILE)
    p_s = gl.allocate_shared_memory(dtype, [M, N], TILE)
    if PDL:
        # Queries, the rows' own latents and parts of prefixes come from the kernels ahead.
        _gdc_wait()

    while work < work_end:
        unit_begin = gl.load(tile_starts_ptr + unit)
        unit_end = gl.load(tile_starts_ptr + unit + 1)
        tiles = unit_end - unit_begin
        head_block = (work - unit_begin * HEAD_BLOCKS) // tiles
        block_work = unit_begin * HEAD_BLOCKS + head_block * tiles
        tile = work - block_work
        last = gl.minimum(tiles, work_end - block_work)
        if IS_WHOLE:
            last = tiles
            # It started in the share of a program before.
            tile = gl.where(tile > 0, tiles, tile * 0)
        kv_end = gl.load(ends_ptr + unit)
        table_ptr = page_tables_ptr + gl.load(slots_ptr + unit).to(gl.int64) * table_stride

        # Queries, by the layouts of their copies.
        WIDE_ROWS: gl.constexpr = gl.SliceLayout(1, WIDE)
        NARROW_ROWS: gl.constexpr = gl.SliceLayout(1, NARROW)
        tokens = _tokens(table_ptr, tile * N, kv_end, PAGE_SIZE, N, WIDE_ROWS)
        rope_tokens = _tokens(table_ptr, tile * N, kv_end, PAGE_SIZE, N, NARROW_ROWS)
        # The tile before may still be read by other warps, of this unit's queries too.
        gl.thread_barrier()
        _copy_tile(
            latents_ptr, latents_s.index(tile & 1), ropes_s.index(tile & 1), tokens, rope_tokens, R, ROPE, WIDE, NARROW
        )
        query_row, is_query = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, WIDE_ROWS)
        c = gl.arange(0, R, gl.SliceLayout(0, WIDE))
        q_at = q_ptr + gl.where(is_query, query_row, 0).to(gl.int64)[:, None] * C + c[None, :]
        q_s.store(gl.load(q_at, mask=is_query[:, None], other=0.0))
        rope_row_of_query, is_rope = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, NARROW_ROWS)
        e = gl.arange(0, ROPE, gl.SliceLayout(0, NARROW))
        q_rope_at = q_ptr + gl.where(is_rope, rope_row_of_query, 0).to(gl.int64)[:, None] * C + R + e[None, :]
        q_rope_s.store(gl.load(q_rope_at, mask=is_rope[:, None], other=0.0))
        tokens = _tokens(table_ptr, (tile + 1) * N, kv_end, PAGE_SIZE, N, WIDE_ROWS)
        rope_tokens = _tokens(table_ptr, (tile + 1) * N, kv_end, PAGE_SIZE, N, NARROW_ROWS)

        highest = gl.full([M], LOWEST, gl.float32, ROWS)
        total = gl.zeros([M], gl.float32, ROWS)
        acc = gl.zeros([M, R], gl.float32, SUMS)
        n = gl.arange(0, N, gl.SliceLayout(0, SCORES))
        for t in range(tile, last):
            stage = t & 1
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            latent_s = latents_s.index(stage)
            scores = gl.zeros([M, N], gl.float32, SCORES)
            scores = warpgroup_mma(q_rope_s, ropes_s.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(q_s, latent_s.permute((1, 0)), scores, is_async=True)
            if t + 1 < last:
                # The values of the tile before were read before the barrier: its memory is free.
                other = stage ^ 1
                _copy_tile(
                    latents_ptr,
                    latents_s.index(other),
                    ropes_s.index(other),
                    tokens,
                    rope_tokens,
                    R,
                    ROPE,
                    WIDE,
                    NARROW,
                )
            tokens = _tokens(table_ptr, (t + 2) * N, kv_end, PAGE_SIZE, N, WIDE_ROWS)
            rope_tokens = _tokens(table_ptr, (t + 2) * N, kv_end, PAGE_SIZE, N, NARROW_ROWS)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where((t * N + n < kv_end)[None, :], scores * scale, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(scores, 1))
            exps = gl.exp2(scores - new_highest[:, None])
            correction = gl.exp2(highest - new_highest)
            total = total * correction + gl.sum(exps, 1)
            p_s.store(exps.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            acc = acc * gl.convert_layout(correction, OUT_ROWS)[:, None]
            acc = warpgroup_mma(p_s, latent_s, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            highest = new_highest

        is_seen = total > 0
        inverse = gl.where(is_seen, 1.0 / gl.where(is_seen, total, 1.0), 0.0)
        lse = gl.where(is_seen, highest + gl.log2(gl.where(is_seen, total, 1.0)), LOWEST)
        acc = gl.where(
            gl.convert_layout(is_seen.to(gl.int32), OUT_ROWS)[:, None] > 0,
            acc * gl.convert_layout(inverse, OUT_ROWS)[:, None],
            0.0,
        )
        columns = gl.arange(0, R, gl.SliceLayout(0, SUMS))
        if (tile == 0) & (last == tiles):
            out_row_of_query, is_out = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, OUT_ROWS)
            out_at = out_ptr + out_row_of_query.to(gl.int64)[:, None] * R + columns[None, :]
            gl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_out[:, None])
            if out_lse_ptr is not None:
                lse_row_of_query, has_lse = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, ROWS)
                gl.store(out_lse_ptr + lse_row_of_query, lse, mask=has_lse)
        elif not IS_WHOLE:
            partial = 2 * program + (tile == 0).to(gl.int32)
            row = gl.arange(0, M, OUT_ROWS)
            gl.store(parts_ptr + (partial * M + row).to(gl.int64)[:, None] * R + columns[None, :], acc)
            gl.store(part_lses_ptr + partial * M + gl.arange(0, M, ROWS), lse)
            first_program = block_work // share
            num_parts = (block_work + tiles - 1) // share - first_program + 1
            # All threads' parts are written before the count says so; the count orders them for the last program.
            gl.thread_barrier()
            arrived = gl.atomic_add(arrivals_ptr + first_program, 1, sem="acq_rel")
            if arrived == num_parts - 1:
                gl.store(arrivals_ptr + first_program, 0)
                _merge(
                    parts_ptr, part_lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first_program,
                    num_parts, H, HEADS, R, MEMBERS, M,
                )  # fmt: skip
        work = block_work + last
        if work >= unit_end * HEAD_BLOCKS:
            unit += 1


@gluon.jit
def _query_rows(
    members_ptr, unit, head_block, H: gl.constexpr, HEADS: gl.constexpr, MEMBERS: gl.constexpr, M: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows of the queries seen as [T H, C], and which of them there are."""
    m = gl.arange(0, M, LAYOUT)
    if members_ptr is None:
        row = unit + m * 0
        is_query = m < HEADS
    else:
        member = m // HEADS
        row = gl.load(members_ptr + unit * MEMBERS + member, mask=member < MEMBERS, other=-1)
        is_query = row >= 0
    return row * H + head_block * HEADS + m % HEADS, is_query


@gluon.jit
def _merge(
    parts_ptr, lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first, num_parts, H: gl.constexpr,
    HEADS: gl.constexpr, R: gl.constexpr, MEMBERS: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Writes the softmax-weighted mean of a unit's parts, as that of `mla_split.py` does."""
    COLUMNS: gl.constexpr = 128
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.SliceLayout(1, BLOCK)
    row = gl.arange(0, M, LAYOUT)
    query_row, is_row = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, LAYOUT)
    highest = gl.full([M], LOWEST, gl.float32, LAYOUT)
    total = gl.zeros([M], gl.float32, LAYOUT)
    for part in range(num_parts):
        # A program's second partial result is of the unit that it ended in, which is where the unit starts.
        partial = 2 * (first + part) + gl.where(part == 0, 1, 0)
        lse = gl.load(lses_ptr + partial * M + row, cache_modifier=".cg")
        new_highest = gl.maximum(highest, lse)
        total = total * gl.exp2(highest - new_highest) + gl.exp2(lse - new_highest)
        highest = new_highest
    lse_of_all = highest + gl.log2(total)
    if out_lse_ptr is not None:
        gl.store(out_lse_ptr + query_row, lse_of_all, mask=is_row)
    for begin in range(0, R, COLUMNS):
        column = begin + gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCK))
        merged = gl.zeros([M, COLUMNS], gl.float32, BLOCK)
        for part in range(num_parts):
            partial = 2 * (first + part) + gl.where(part == 0, 1, 0)
            lse = gl.load(lses_ptr + partial * M + row, cache_modifier=".cg")
            part_at = parts_ptr + (partial * M + row).to(gl.int64)[:, None] * R + column[None, :]
            weight = gl.exp2(lse - lse_of_all)
            merged += gl.load(part_at, cache_modifier=".cg") * weight[:, None]
        out_at = out_ptr + query_row.to(gl.int64)[:, None] * R + column[None, :]
        gl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
