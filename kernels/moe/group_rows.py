"""Rows grouped by the experts they pick, in tiles of one expert each, for grouped GEMMs. No host waits for a count.

Rows that lie by expert already, with room for so many at each, are grouped by their counts alone: a pair is a place
there.

A pair is a row and one of its picks: pair p is pick p % A of row p // A. Every expert's pairs, in ascending order, fill
whole tiles; the slots left in its last tile hold the number of pairs, which stands for none:

    expert             0            3                  7
    pairs        [4 9 17 -]   [0 2 3 5][8 - - -]   [1 6 7 -]   unused tiles
    tile_experts      0           3        3            7         -1 ...

Legend: T rows, E experts, A picks of a row, P = T A pairs, N tiles, R slots of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 1024
# In large tiles are the pairs of prompts, of which there are many.
_LARGE_TILE, _LARGE_BLOCK = 128, 4096


class ExpertTiles(NamedTuple):
    """pairs_NR int32; tile_experts_N int32, -1 for a tile that is not used; num_picks: A."""

    pairs_NR: torch.Tensor
    tile_experts_N: torch.Tensor
    num_picks: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Tiles, and slots of a tile."""
        num_tiles, tile_rows = self.pairs_NR.shape
        return num_tiles, tile_rows


class RowTiles(NamedTuple):
    """All rows in their order, of one expert: there is nothing to be grouped."""

    num_rows: int
    tile_rows: int
    pairs_NR: None = None
    tile_experts_N: None = None
    num_picks: int = 1

    @property
    def sizes(self) -> tuple[int, int]:
        return triton.cdiv(self.num_rows, self.tile_rows), self.tile_rows


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _group_rows_kernel(
    ids_ptr, pairs_ptr, tile_experts_ptr, num_pairs, max_tiles, E: tl.constexpr, BLOCK_E: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # A program per expert; each counts all pairs itself, which is less than a second launch for the steps of a decode.
    expert = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    offsets = tl.arange(0, BLOCK)
    for start in range(0, num_pairs, BLOCK):
        ids = tl.load(ids_ptr + start + offsets, mask=start + offsets < num_pairs, other=E)
        counts += tl.histogram(ids, BLOCK_E)
    tiles = tl.where(bins < E, (counts + R - 1) // R, 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    end_tile = first_tile + (count + R - 1) // R
    for tile in range(first_tile, end_tile, BLOCK):
        tl.store(tile_experts_ptr + tile + offsets, expert + offsets * 0, mask=tile + offsets < end_tile)
    if expert == E - 1:
        for tile in range(end_tile, max_tiles, BLOCK):
            tl.store(tile_experts_ptr + tile + offsets, offsets * 0 - 1, mask=tile + offsets < max_tiles)
    if count > 0:
        at = first_tile * R
        for start in range(0, num_pairs, BLOCK):
            ids = tl.load(ids_ptr + start + offsets, mask=start + offsets < num_pairs, other=E)
            is_own = (ids == expert).to(tl.int32)
            tl.store(pairs_ptr + at + tl.cumsum(is_own, axis=0) - 1, start + offsets, mask=is_own == 1)
            at += tl.sum(is_own, axis=0)
        padding = tl.arange(0, R)
        tl.store(pairs_ptr + at + padding, num_pairs + padding * 0, mask=at + padding < end_tile * R)


def group_rows(expert_ids_TA: torch.Tensor, num_experts: int, tile_rows: int, *, use_pdl: bool = False) -> ExpertTiles:
    """Tiles of `tile_rows`, a power of two, for int32 ids in [0, num_experts], contiguous; the highest stands for no
    expert, whose pairs are in no tile. Unused tiles hold anything.

    There are as many tiles as the least lucky choice of so many rows needs, whatever the ids are: a grid for them is
    known to the host, and may be captured. `use_pdl` as in `rms_norm`.
    """
    num_rows, num_picks = expert_ids_TA.shape
    assert expert_ids_TA.dtype == torch.int32 and expert_ids_TA.is_contiguous(), expert_ids_TA.dtype
    assert tile_rows & (tile_rows - 1) == 0, tile_rows
    num_pairs = num_rows * num_picks
    max_tiles = num_tiles_at_most(num_pairs, num_experts, tile_rows)
    pairs_NR = torch.empty(max_tiles, tile_rows, dtype=torch.int32, device=expert_ids_TA.device)
    tile_experts_N = torch.empty(max_tiles, dtype=torch.int32, device=expert_ids_TA.device)
    if num_pairs:
        is_large = tile_rows >= _LARGE_TILE
        few = min(_BLOCK, max(triton.next_power_of_2(num_pairs), 128))
        _group_rows_kernel[(num_experts,)](
            expert_ids_TA, pairs_NR, tile_experts_N, num_pairs, max_tiles, E=num_experts,
            BLOCK_E=triton.next_power_of_2(num_experts + 1), R=tile_rows,
            BLOCK=_LARGE_BLOCK if is_large else few, PDL=use_pdl, num_warps=8 if is_large else 4, launch_pdl=use_pdl,
        )  # fmt: skip
    return ExpertTiles(pairs_NR, tile_experts_N, num_picks)


@triton.jit(do_not_specialize=["num_places", "max_tiles"])
def _group_places_kernel(
    counts_ptr, places_ptr, tile_experts_ptr, num_places, max_tiles, P: tl.constexpr, X: tl.constexpr,
    BLOCK_P: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # A program per slot.
    slot = tl.program_id(0)
    bins = tl.arange(0, BLOCK_P)
    # Whatever a library says, nothing beyond the tiles is written, nor a place of another slot.
    counts = tl.minimum(tl.maximum(tl.load(counts_ptr + bins, mask=bins < P, other=0), 0), X)
    tiles = (counts + R - 1) // R
    first_tile = tl.minimum(tl.sum(tl.where(bins < slot, tiles, 0), axis=0), max_tiles)
    count = tl.sum(tl.where(bins == slot, counts, 0), axis=0)
    end_tile = tl.minimum(first_tile + (count + R - 1) // R, max_tiles)
    offsets = tl.arange(0, BLOCK)
    for tile in range(first_tile, end_tile, BLOCK):
        tl.store(tile_experts_ptr + tile + offsets, slot + offsets * 0, mask=tile + offsets < end_tile)
    for at in range(first_tile * R, end_tile * R, BLOCK):
        rows = at - first_tile * R + offsets
        places = tl.where(rows < count, slot * X + rows, num_places)
        tl.store(places_ptr + at + offsets, places, mask=at + offsets < end_tile * R)
    if slot == P - 1:
        for tile in range(end_tile, max_tiles, BLOCK):
            tl.store(tile_experts_ptr + tile + offsets, offsets * 0 - 1, mask=tile + offsets < max_tiles)
        for at in range(end_tile * R, max_tiles * R, BLOCK):
            tl.store(places_ptr + at + offsets, num_places + offsets * 0, mask=at + offsets < max_tiles * R)


def group_places(
    counts_P: torch.Tensor, num_rows: int, most: int, tile_rows: int, *, use_pdl: bool = False
) -> ExpertTiles:
    """Tiles of the places [P, num_rows] of which the first counts_P (int32) of each slot hold a row: `most` at most in
    all. Slots of tiles without a row, those of unused tiles too, hold P x num_rows. `use_pdl` as in `rms_norm`."""
    num_slots = len(counts_P)
    assert counts_P.dtype == torch.int32 and counts_P.is_contiguous(), counts_P.dtype
    assert tile_rows & (tile_rows - 1) == 0 and num_slots * num_rows < 1 << 31, (tile_rows, num_slots, num_rows)
    max_tiles = num_tiles_at_most(most, num_slots, tile_rows)
    places_NR = torch.empty(max_tiles, tile_rows, dtype=torch.int32, device=counts_P.device)
    tile_experts_N = torch.empty(max_tiles, dtype=torch.int32, device=counts_P.device)
    if max_tiles:
        _group_places_kernel[(num_slots,)](
            counts_P, places_NR, tile_experts_N, num_slots * num_rows, max_tiles, P=num_slots, X=num_rows,
            BLOCK_P=triton.next_power_of_2(num_slots), R=tile_rows, BLOCK=128, PDL=use_pdl, num_warps=4,
            launch_pdl=use_pdl,
        )  # fmt: skip
    return ExpertTiles(places_NR, tile_experts_N, 1)


def num_tiles_at_most(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Each expert that is hit wastes less than one tile."""
    num_hit = min(num_pairs, num_experts)
    return num_hit + (num_pairs - num_hit) // tile_rows
