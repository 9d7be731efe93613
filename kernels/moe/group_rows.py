"""Rows grouped by the experts they pick, in tiles of one expert each, for grouped GEMMs. No host waits for a count.

A pair is a row and one of its picks: pair p is pick p % A of row p // A. Every expert's pairs, in ascending order, fill
whole tiles; the places left in its last tile hold the number of pairs, which stands for none:

    expert             0            3                  7
    pairs        [4 9 17 -]   [0 2 3 5][8 - - -]   [1 6 7 -]   unused tiles
    tile_experts      0           3        3            7         -1 ...

Legend: T rows, E experts, A picks of a row, P = T A pairs, N tiles, R places of a tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.hopper import has_gdc

_BLOCK = 1024
# Up to so many pairs one launch groups them; for more, three that count each pair once take less time.
_MAX_LONE_PAIRS = 4096


class ExpertTiles(NamedTuple):
    """pairs_NR int32; tile_experts_N int32, -1 for a tile that is not used; num_picks: A."""

    pairs_NR: torch.Tensor
    tile_experts_N: torch.Tensor
    num_picks: int


@triton.jit
def _first_tiles(counts, bins, expert, E: tl.constexpr, R: tl.constexpr):
    """First tile and end of an expert's tiles, by the counts of all experts."""
    tiles = tl.where(bins < E, (counts + R - 1) // R, 0)
    first = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    return first, first + tl.sum(tl.where(bins == expert, tiles, 0), axis=0)


@triton.jit
def _write_tiles(
    tile_experts_ptr, pairs_ptr, first, end, count, num_pairs, max_tiles, expert, E: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The expert of its tiles, -1 behind those of the last expert, and nobody in the places that are left."""
    places = tl.arange(0, BLOCK)
    for tile in range(first, end, BLOCK):
        tl.store(tile_experts_ptr + tile + places, expert + places * 0, mask=tile + places < end)
    if expert == E - 1:
        for tile in range(end, max_tiles, BLOCK):
            tl.store(tile_experts_ptr + tile + places, places * 0 - 1, mask=tile + places < max_tiles)
    padding = first * R + count + tl.arange(0, R)
    tl.store(pairs_ptr + padding, num_pairs + padding * 0, mask=padding < end * R)


@triton.jit
def _place_pairs(ids_ptr, pairs_ptr, start, at, num_pairs, expert, E: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the expert's pairs of a block from place `at` on, in ascending order; the place behind them."""
    pairs = start + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=E)
    is_own = (ids == expert).to(tl.int32)
    tl.store(pairs_ptr + at + tl.cumsum(is_own, axis=0) - 1, pairs, mask=is_own == 1)
    return at + tl.sum(is_own, axis=0)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _group_rows_kernel(
    ids_ptr, pairs_ptr, tile_experts_ptr, num_pairs, max_tiles, E: tl.constexpr, BLOCK_E: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr, HAS_GDC: tl.constexpr,
):  # fmt: skip
    # A program per expert; each counts all pairs itself, which is less than a second launch for the steps of a decode.
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    bins, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        counts += tl.histogram(tl.load(ids_ptr + start + places, mask=start + places < num_pairs, other=E), BLOCK_E)
    first, end = _first_tiles(counts, bins, expert, E, R)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    _write_tiles(tile_experts_ptr, pairs_ptr, first, end, count, num_pairs, max_tiles, expert, E, R, BLOCK)
    if count > 0:
        at = first * R
        for start in range(0, num_pairs, BLOCK):
            at = _place_pairs(ids_ptr, pairs_ptr, start, at, num_pairs, expert, E, BLOCK)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids_ptr, counts_ptr, num_pairs, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, HAS_GDC: tl.constexpr
):
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=E)
    tl.store(counts_ptr + block * BLOCK_E + tl.arange(0, BLOCK_E), tl.histogram(ids, BLOCK_E))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "num_blocks"])
def _offset_kernel(
    counts_ptr, pairs_ptr, tile_experts_ptr, num_pairs, max_tiles, num_blocks, E: tl.constexpr,
    BLOCK_E: tl.constexpr, R: tl.constexpr, BLOCK_B: tl.constexpr, HAS_GDC: tl.constexpr,
):  # fmt: skip
    """Turns an expert's counts by block into the first place of each; the expert's own column alone is written."""
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    bins, blocks = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_B)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for block in range(num_blocks):
        counts += tl.load(counts_ptr + block * BLOCK_E + bins)
    first, end = _first_tiles(counts, bins, expert, E, R)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    _write_tiles(tile_experts_ptr, pairs_ptr, first, end, count, num_pairs, max_tiles, expert, E, R, BLOCK_B)
    own = tl.load(counts_ptr + blocks * BLOCK_E + expert, mask=blocks < num_blocks, other=0)
    offsets_ptr = counts_ptr + num_blocks * BLOCK_E
    tl.store(
        offsets_ptr + blocks * BLOCK_E + expert, first * R + tl.cumsum(own, axis=0) - own, mask=blocks < num_blocks
    )


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    ids_ptr, counts_ptr, pairs_ptr, num_pairs, num_blocks, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr, HAS_GDC: tl.constexpr,
):  # fmt: skip
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, block = tl.program_id(0), tl.program_id(1)
    at = tl.load(counts_ptr + (num_blocks + block) * BLOCK_E + expert)
    _place_pairs(ids_ptr, pairs_ptr, block * BLOCK, at, num_pairs, expert, E, BLOCK)


def group_rows(expert_ids_TA: torch.Tensor, num_experts: int, tile_rows: int, *, use_pdl: bool = False) -> ExpertTiles:
    """Tiles of `tile_rows`, a power of two, for int32 ids in [0, num_experts), contiguous. Unused tiles hold
    anything.

    There are as many tiles as the least lucky choice of so many rows needs, whatever the ids are: a grid for them is
    known to the host, and may be captured. `use_pdl` as in `rms_norm`.
    """
    num_rows, num_picks = expert_ids_TA.shape
    assert expert_ids_TA.dtype == torch.int32 and expert_ids_TA.is_contiguous(), expert_ids_TA.dtype
    assert tile_rows & (tile_rows - 1) == 0, tile_rows
    if num_rows == 1:
        # Each pick is a tile of its own, and its id the tile's expert: no launch.
        return ExpertTiles(_lone_pairs(num_picks, tile_rows, expert_ids_TA.device), expert_ids_TA[0], num_picks)
    num_pairs = num_rows * num_picks
    max_tiles = num_tiles_at_most(num_pairs, num_experts, tile_rows)
    pairs_NR = expert_ids_TA.new_empty(max_tiles, tile_rows)
    tile_experts_N = expert_ids_TA.new_empty(max_tiles)
    block_e, has_gdc_here = triton.next_power_of_2(num_experts + 1), has_gdc(expert_ids_TA.device)
    sizes = {"E": num_experts, "BLOCK_E": block_e, "HAS_GDC": has_gdc_here, "num_warps": 4, "launch_pdl": use_pdl}
    if 0 < num_pairs <= _MAX_LONE_PAIRS:
        block = min(_BLOCK, max(triton.next_power_of_2(num_pairs), 128))
        _group_rows_kernel[(num_experts,)](
            expert_ids_TA, pairs_NR, tile_experts_N, num_pairs, max_tiles, R=tile_rows, BLOCK=block, **sizes
        )
    elif num_pairs:
        num_blocks = triton.cdiv(num_pairs, _BLOCK)
        counts = expert_ids_TA.new_empty(2, num_blocks, block_e)
        _count_kernel[(num_blocks,)](expert_ids_TA, counts, num_pairs, BLOCK=_BLOCK, **sizes)
        _offset_kernel[(num_experts,)](
            counts, pairs_NR, tile_experts_N, num_pairs, max_tiles, num_blocks, R=tile_rows,
            BLOCK_B=triton.next_power_of_2(num_blocks), **sizes,
        )  # fmt: skip
        _place_kernel[(num_experts, num_blocks)](
            expert_ids_TA, counts, pairs_NR, num_pairs, num_blocks, BLOCK=_BLOCK, **sizes
        )
    return ExpertTiles(pairs_NR, tile_experts_N, num_picks)


def num_tiles_at_most(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Each expert that is hit wastes less than one tile."""
    num_hit = min(num_pairs, num_experts)
    return num_hit + (num_pairs - num_hit) // tile_rows


@functools.cache
def _lone_pairs(num_picks: int, tile_rows: int, device: torch.device) -> torch.Tensor:
    """Pair p first in tile p. Made once, and before any capture, as a step runs ahead of its own: graphs read it."""
    pairs_NR = torch.full((num_picks, tile_rows), num_picks, dtype=torch.int32, device=device)
    pairs_NR[:, 0] = torch.arange(num_picks, dtype=torch.int32, device=device)
    return pairs_NR
