"""The kernel of `mla_split.py` for Hopper, where 64 query rows fill a program's GEMMs: its warp groups have tasks.

    copies  | tile t + 1 ........ |       | tile t + 2 ............ |       | tile t + 3 ...
    scores  | t: GEMM | softmax | t + 1: GEMM | softmax | t + 2: GEMM | ...
    sums                        | t: GEMM |             | t + 1: GEMM | ...

One warp group copies queries and tiles to shared memory, one computes scores and weights, and two add up a half each of
the latent's columns. So tensor cores have values of one tile to multiply beside the scores of the next. Weights, and
a factor for each row, go through shared memory, with barriers of those that write and read them. If two groups compute
scores of half of a tile each, behind barriers of both, all of it takes 1.5 times as long; 1.1 times if both compute all
scores and keep the weights in registers. Schedule and parts are those of `mla_split.py`. The interpreter does not run
it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOWEST: gl.constexpr = gl.constexpr(-1e30)
NUM_WARPS = 4
MAX_REGISTERS = 128
"""Of a thread when the kernel starts, in four warp groups. They divide them anew: scores get what the others leave."""
_SUM_REGISTERS: gl.constexpr = gl.constexpr(168)
_COPY_REGISTERS: gl.constexpr = gl.constexpr(48)


@gluon.jit
def _gdc_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gdc_launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _share_of(
    tile_starts_ptr, first_units_ptr, num_units, HEAD_BLOCKS: gl.constexpr, MIN_TILES: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """A program's tiles [work, work_end), the share of each program, and the unit of the first."""
    num_tiles = gl.load(tile_starts_ptr + num_units) * HEAD_BLOCKS
    share = gl.maximum((num_tiles + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)
    work = gl.program_id(0) * share
    return work, gl.minimum(work + share, num_tiles), share, gl.load(first_units_ptr + gl.program_id(0))


@gluon.jit
def _part_of(tile_starts_ptr, unit, work, work_end, HEAD_BLOCKS: gl.constexpr, IS_WHOLE: gl.constexpr):
    """Place of work: the unit's block of heads, the block's first tile in all work, how many it has, and those of
    this program, [tile, last)."""
    unit_begin = gl.load(tile_starts_ptr + unit)
    tiles = gl.load(tile_starts_ptr + unit + 1) - unit_begin
    head_block = (work - unit_begin * HEAD_BLOCKS) // tiles
    block_work = unit_begin * HEAD_BLOCKS + head_block * tiles
    tile = work - block_work
    last = gl.minimum(tiles, work_end - block_work)
    if IS_WHOLE:
        last = tiles
        # It started in the share of a program before.
        tile = gl.where(tile > 0, tiles, tile * 0)
    return head_block, block_work, tiles, tile, last


@gluon.jit
def _tokens(table_ptr, begin, kv_end, PAGE_SIZE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Indices in the pool of N positions from `begin` on; past the end the last one's again, whose score counts for
    nothing. Those of an empty row are token 0: its table says nothing."""
    position = begin + gl.arange(0, N, LAYOUT)
    position = gl.maximum(gl.minimum(position, kv_end - 1), 0)
    page = gl.load(table_ptr + position // PAGE_SIZE, mask=position < kv_end, other=0)
    return page * PAGE_SIZE + position % PAGE_SIZE


@gluon.jit
def _copy_rows(from_ptr, rows, left_s, right_s, rope_s, R: gl.constexpr, ROPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts copies of rows of R + ROPE numbers."""
    HALF: gl.constexpr = R // 2
    row_at = from_ptr + rows.to(gl.int64) * (R + ROPE)
    c = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    async_copy.async_copy_global_to_shared(left_s, row_at[:, None] + c[None, :])
    async_copy.async_copy_global_to_shared(right_s, row_at[:, None] + (HALF + c)[None, :])
    e = gl.arange(0, ROPE, gl.SliceLayout(0, LAYOUT))
    async_copy.async_copy_global_to_shared(rope_s, row_at[:, None] + (R + e)[None, :])
    async_copy.commit_group()


@gluon.jit
def _copies_are_there(barrier):
    """Tensor cores read them from now on, of other warps."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _copy(
    q_ptr, latents_ptr, page_tables_ptr, slots_ptr, ends_ptr, members_ptr, tile_starts_ptr, first_units_ptr,
    table_stride, num_units, q_left_s, q_right_s, q_rope_s, left_s, right_s, rope_s, q_empty, full, empty,
    H: gl.constexpr, HEADS: gl.constexpr, R: gl.constexpr, ROPE: gl.constexpr, MEMBERS: gl.constexpr,
    PAGE_SIZE: gl.constexpr, MIN_TILES: gl.constexpr, IS_WHOLE: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Queries of each part, and its tiles."""
    N: gl.constexpr = 64
    HEAD_BLOCKS: gl.constexpr = H // HEADS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    work, work_end, _share, unit = _share_of(
        tile_starts_ptr, first_units_ptr, num_units, HEAD_BLOCKS, MIN_TILES, NUM_PROGRAMS
    )
    num_copied = 0
    num_parts = 0
    while work < work_end:
        head_block, block_work, _tiles, tile, last = _part_of(
            tile_starts_ptr, unit, work, work_end, HEAD_BLOCKS, IS_WHOLE
        )
        kv_end = gl.load(ends_ptr + unit)
        table_ptr = page_tables_ptr + gl.load(slots_ptr + unit).to(gl.int64) * table_stride
        tokens = _tokens(table_ptr, tile * N, kv_end, PAGE_SIZE, N, ROWS)
        # Results of another query are computed where there is none, and not stored.
        query_row, is_query = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, 64, ROWS)
        mbarrier.wait(q_empty, (num_parts & 1) ^ 1)
        # They are there with the first tile.
        _copy_rows(
            q_ptr, gl.where(is_query, query_row, 0), q_left_s.index(0), q_right_s.index(0), q_rope_s.index(0), R, ROPE,
            LAYOUT,
        )  # fmt: skip
        for t in range(tile, last):
            stage = num_copied & 1
            mbarrier.wait(empty.index(stage), ((num_copied >> 1) & 1) ^ 1)
            _copy_rows(
                latents_ptr, tokens, left_s.index(stage), right_s.index(stage), rope_s.index(stage), R, ROPE, LAYOUT
            )
            tokens = _tokens(table_ptr, (t + 1) * N, kv_end, PAGE_SIZE, N, ROWS)
            _copies_are_there(full.index(stage))
            num_copied += 1
        num_parts += 1
        work = block_work + last
        if work >= gl.load(tile_starts_ptr + unit + 1) * HEAD_BLOCKS:
            unit += 1


@gluon.jit
def _score(
    ends_ptr, members_ptr, tile_starts_ptr, first_units_ptr, part_lses_ptr, out_lse_ptr, num_units, scale, q_left_s,
    q_right_s, q_rope_s, left_s, right_s, rope_s, weights_s, factors_s, q_empty, full, weighed, taken,
    H: gl.constexpr, HEADS: gl.constexpr, R: gl.constexpr, MEMBERS: gl.constexpr, MIN_TILES: gl.constexpr,
    IS_WHOLE: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Weights of each tile, with what the sums before it are multiplied by; behind a part, by what the sums of all."""
    M: gl.constexpr = 64
    N: gl.constexpr = 64
    HEAD_BLOCKS: gl.constexpr = H // HEADS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    work, work_end, _share, unit = _share_of(
        tile_starts_ptr, first_units_ptr, num_units, HEAD_BLOCKS, MIN_TILES, NUM_PROGRAMS
    )
    num_scored = 0
    num_weighed = 0
    n = gl.arange(0, N, gl.SliceLayout(0, SCORES))
    while work < work_end:
        head_block, block_work, tiles, tile, last = _part_of(
            tile_starts_ptr, unit, work, work_end, HEAD_BLOCKS, IS_WHOLE
        )
        kv_end = gl.load(ends_ptr + unit)
        highest = gl.full([M], LOWEST, gl.float32, ROWS)
        total = gl.zeros([M], gl.float32, ROWS)
        for t in range(tile, last):
            stage = num_scored & 1
            mbarrier.wait(full.index(stage), (num_scored >> 1) & 1)
            # Always 0. Of addresses that stay the compiler would keep more than there are registers.
            only = num_scored >> 30
            scores = gl.zeros([M, N], gl.float32, SCORES)
            scores = warpgroup_mma(
                q_rope_s.index(only), rope_s.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(q_left_s.index(only), left_s.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma(q_right_s.index(only), right_s.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where((t * N + n < kv_end)[None, :], scores, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(scores, 1) * scale)
            exps = gl.exp2(scores * scale - new_highest[:, None])
            correction = gl.exp2(highest - new_highest)
            total = total * correction + gl.sum(exps, 1)
            mbarrier.wait(taken, (num_weighed & 1) ^ 1)
            weights_s.store(exps.to(weights_s.dtype))
            factors_s.store(correction)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(weighed, count=1)
            num_weighed += 1
            highest = new_highest
            num_scored += 1
        mbarrier.arrive(q_empty, count=1)

        is_seen = total > 0
        lse = gl.where(is_seen, highest + gl.log2(gl.where(is_seen, total, 1.0)), LOWEST)
        if (tile == 0) & (last == tiles):
            if out_lse_ptr is not None:
                row_of_query, is_query = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, ROWS)
                gl.store(out_lse_ptr + row_of_query, lse, mask=is_query)
        elif not IS_WHOLE:
            partial = 2 * gl.program_id(0) + (tile == 0).to(gl.int32)
            gl.store(part_lses_ptr + partial * M + gl.arange(0, M, ROWS), lse)
        mbarrier.wait(taken, (num_weighed & 1) ^ 1)
        factors_s.store(gl.where(is_seen, 1.0 / gl.where(is_seen, total, 1.0), 0.0))
        gl.thread_barrier()
        mbarrier.arrive(weighed, count=1)
        num_weighed += 1
        work = block_work + last
        if work >= gl.load(tile_starts_ptr + unit + 1) * HEAD_BLOCKS:
            unit += 1


@gluon.jit
def _sum(
    members_ptr, tile_starts_ptr, first_units_ptr, parts_ptr, part_lses_ptr, arrivals_ptr, out_ptr, out_lse_ptr,
    num_units, values_s, weights_s, factors_s, empty, weighed, taken, SIDE: gl.constexpr, H: gl.constexpr,
    HEADS: gl.constexpr, R: gl.constexpr, MEMBERS: gl.constexpr, MIN_TILES: gl.constexpr, IS_WHOLE: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The weighted sums of half of the latent's columns: SIDE 0 or 1."""
    M: gl.constexpr = 64
    HALF: gl.constexpr = R // 2
    HEAD_BLOCKS: gl.constexpr = H // HEADS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    work, work_end, share, unit = _share_of(
        tile_starts_ptr, first_units_ptr, num_units, HEAD_BLOCKS, MIN_TILES, NUM_PROGRAMS
    )
    num_summed = 0
    num_taken = 0
    while work < work_end:
        head_block, block_work, tiles, tile, last = _part_of(
            tile_starts_ptr, unit, work, work_end, HEAD_BLOCKS, IS_WHOLE
        )
        acc = gl.zeros([M, HALF], gl.float32, SUMS)
        for _ in range(tile, last):
            stage = num_summed & 1
            mbarrier.wait(weighed, num_taken & 1)
            acc = acc * factors_s.load(ROWS)[:, None]
            acc = warpgroup_mma(weights_s, values_s.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            # All warps have read weights and tile.
            gl.thread_barrier()
            mbarrier.arrive(taken, count=1)
            mbarrier.arrive(empty.index(stage), count=1)
            num_taken += 1
            num_summed += 1
        mbarrier.wait(weighed, num_taken & 1)
        inverse = factors_s.load(ROWS)
        gl.thread_barrier()
        mbarrier.arrive(taken, count=1)
        num_taken += 1

        # A row without a token has sums of what is no number.
        acc = gl.where((inverse > 0)[:, None], acc * inverse[:, None], 0.0)
        columns = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))
        if (tile == 0) & (last == tiles):
            row_of_query, is_query = _query_rows(members_ptr, unit, head_block, H, HEADS, MEMBERS, M, ROWS)
            out_at = out_ptr + row_of_query.to(gl.int64)[:, None] * R + columns[None, :]
            gl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_query[:, None])
        elif not IS_WHOLE:
            partial = 2 * gl.program_id(0) + (tile == 0).to(gl.int32)
            row = gl.arange(0, M, ROWS)
            gl.store(parts_ptr + (partial * M + row).to(gl.int64)[:, None] * R + columns[None, :], acc)
            first_program = block_work // share
            num_parts = (block_work + tiles - 1) // share - first_program + 1
            # All threads' parts are written before the count says so, and so is what `_score` wrote; the count orders
            # them for the last program.
            gl.thread_barrier()
            arrivals_at = arrivals_ptr + SIDE * NUM_PROGRAMS + first_program
            arrived = gl.atomic_add(arrivals_at, 1, sem="acq_rel")
            if arrived == num_parts - 1:
                gl.store(arrivals_at, 0)
                _merge(
                    parts_ptr, part_lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first_program,
                    num_parts, SIDE, H, HEADS, R, MEMBERS, M,
                )  # fmt: skip
        work = block_work + last
        if work >= gl.load(tile_starts_ptr + unit + 1) * HEAD_BLOCKS:
            unit += 1


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
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = latents_ptr.dtype.element_ty
    if PDL:
        _gdc_launch_dependents()
    q_left_s = gl.allocate_shared_memory(dtype, [1, M, R // 2], TILE)
    q_right_s = gl.allocate_shared_memory(dtype, [1, M, R // 2], TILE)
    q_rope_s = gl.allocate_shared_memory(dtype, [1, M, ROPE], TILE)
    left_s = gl.allocate_shared_memory(dtype, [2, N, R // 2], TILE)
    right_s = gl.allocate_shared_memory(dtype, [2, N, R // 2], TILE)
    rope_s = gl.allocate_shared_memory(dtype, [2, N, ROPE], TILE)
    weights_s = gl.allocate_shared_memory(dtype, [M, N], TILE)
    factors_s = gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    # Queries that were scored; tiles that are there, and that both sides have summed; weights of a tile that are there,
    # and that both sides have taken.
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_empty, count=1)
    mbarrier.init(weighed, count=1)
    mbarrier.init(taken, count=2)
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    if PDL:
        # Queries, the rows' own latents and parts of prefixes come from the kernels ahead.
        _gdc_wait()
    gl.warp_specialize(
        [
            (
                _score,
                (
                    ends_ptr, members_ptr, tile_starts_ptr, first_units_ptr, part_lses_ptr, out_lse_ptr, num_units,
                    scale, q_left_s, q_right_s, q_rope_s, left_s, right_s, rope_s, weights_s, factors_s, q_empty, full,
                    weighed, taken, H, HEADS, R, MEMBERS, MIN_TILES, IS_WHOLE, NUM_PROGRAMS,
                ),
            ),
            (
                _sum,
                (
                    members_ptr, tile_starts_ptr, first_units_ptr, parts_ptr, part_lses_ptr, arrivals_ptr, out_ptr,
                    out_lse_ptr, num_units, left_s, weights_s, factors_s, empty, weighed, taken, 0, H, HEADS, R,
                    MEMBERS, MIN_TILES, IS_WHOLE, NUM_PROGRAMS,
                ),
            ),
            (
                _sum,
                (
                    members_ptr, tile_starts_ptr, first_units_ptr, parts_ptr, part_lses_ptr, arrivals_ptr, out_ptr,
                    out_lse_ptr, num_units, right_s, weights_s, factors_s, empty, weighed, taken, 1, H, HEADS, R,
                    MEMBERS, MIN_TILES, IS_WHOLE, NUM_PROGRAMS,
                ),
            ),
            (
                _copy,
                (
                    q_ptr, latents_ptr, page_tables_ptr, slots_ptr, ends_ptr, members_ptr, tile_starts_ptr,
                    first_units_ptr, table_stride, num_units, q_left_s, q_right_s, q_rope_s, left_s, right_s, rope_s,
                    q_empty, full, empty, H, HEADS, R, ROPE, MEMBERS, PAGE_SIZE, MIN_TILES, IS_WHOLE, NUM_PROGRAMS,
                ),
            ),
        ],
        worker_num_warps=[4, 4, 4],
        worker_num_regs=[_SUM_REGISTERS, _SUM_REGISTERS, _COPY_REGISTERS],
    )  # fmt: skip


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
    parts_ptr, lses_ptr, members_ptr, out_ptr, out_lse_ptr, unit, head_block, first, num_parts, SIDE: gl.constexpr,
    H: gl.constexpr, HEADS: gl.constexpr, R: gl.constexpr, MEMBERS: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Writes one side of the softmax-weighted mean of a unit's parts, as that of `mla_split.py` does."""
    COLUMNS: gl.constexpr = 64
    AT_ONCE: gl.constexpr = 2
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
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
    if SIDE == 0:
        if out_lse_ptr is not None:
            gl.store(out_lse_ptr + query_row, lse_of_all, mask=is_row)
    for begin in range(SIDE * (R // 2), SIDE * (R // 2) + R // 2, COLUMNS):
        column = begin + gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCK))
        merged = gl.zeros([M, COLUMNS], gl.float32, BLOCK)
        for start in range(0, num_parts, AT_ONCE):
            for index in gl.static_range(AT_ONCE):
                # The last part once more, with the weight 0, where there is none.
                part = gl.minimum(start + index, num_parts - 1)
                partial = 2 * (first + part) + gl.where(part == 0, 1, 0)
                lse = gl.load(lses_ptr + partial * M + row, cache_modifier=".cg")
                part_at = parts_ptr + (partial * M + row).to(gl.int64)[:, None] * R + column[None, :]
                weight = gl.where(start + index < num_parts, gl.exp2(lse - lse_of_all), 0.0)
                merged += gl.load(part_at, cache_modifier=".cg") * weight[:, None]
        out_at = out_ptr + query_row.to(gl.int64)[:, None] * R + column[None, :]
        gl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
