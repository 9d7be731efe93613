"""Candidate configurations of the sm90 GEMMs, ranked by a cost model; the autotuner measures them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from radixmesh.kernels.gemm_sm90.variants import (
    FEW_ROWS_CONFIGS,
    HALF_BYTES,
    MAX_CLUSTER,
    MAX_SUMS,
    SHARED_BYTES,
    TILE_K,
    GemmConfig,
    takes_few_rows,
    variant_of,
)

# Work in a microsecond: bytes from memory, from the L2 cache, into one SM; its operations; bytes that one
# sends to others of its cluster, and stores. A k block takes no less than _BLOCK_US; a load arrives
# _LATENCY_US later.
_MEMORY_BYTES_US, _CACHE_BYTES_US, _SM_BYTES_US, _SM_FLOP_US = 4.3e6, 6.0e6, 85e3, 7.0e6
_SENT_BYTES_US, _STORED_BYTES_US, _BLOCK_US, _LATENCY_US = 23e3, 45e3, 0.15, 1.6
# Of clusters of so many, where each CTA has a multiprocessor: they have to fit into the GPU's processing clusters.
_CTAS_AT_ONCE = {1: 132, 2: 132, 4: 112, 8: 104}
_TILES, _COLUMNS, _ROW_TILES = (64, 128, 256), (48, 64, 80, 96, 112, 128, 160, 192, 224, 256), (64, 128)
# Up to this many rows, row-tiled kernels are not worth measuring.
_MAX_SMALL_M = 64


def candidates(num_rows: int, num_out: int, num_in: int, *, is_gated: bool = False, count: int = 8) -> list[GemmConfig]:
    """Configurations worth measuring, `count` of each kernel, its likely fastest first; `num_out` of gate or up alone.

    By a model whose figures come from measurements on one H200: a CTA's k blocks follow each other as fast as its
    multiprocessor takes them in and multiplies; all of them no faster than memory and L2 cache give weights and rows;
    then come the sums that CTAs send each other and the results.
    """
    micros = {
        config: _model_micros(config, num_rows, num_out, num_in, is_gated)
        for config in _possible(num_rows, num_in, is_gated)
    }
    ordered = sorted(micros, key=lambda config: micros[config])
    small_m = [config for config in ordered if config.row_tile is None]
    row_tiled = [config for config in ordered if config.row_tile is not None]
    return small_m[:count] + row_tiled[:count]


def few_rows_candidates(num_rows: int, num_out: int, num_in: int, *, is_gated: bool = False) -> list[GemmConfig]:
    """Those of few_rows.cu that compute such a GEMM; `num_out` as for `candidates`."""
    columns = num_out * (1 + is_gated)
    return [config for config in FEW_ROWS_CONFIGS if takes_few_rows(config, num_rows, columns, num_in)]


def cache_bytes(config: GemmConfig, num_rows: int, num_out: int, num_in: int, *, is_gated: bool = False) -> float:
    """Read from the L2 cache: what is shared, once for those that share it. `num_out` as for `candidates`."""
    variant = variant_of(config, num_rows, is_gated, torch.bfloat16)
    tile, rows = float(config.tile), float(variant.rows)
    if config.row_tile is None:
        rows /= config.multicast
    else:
        tile /= config.multicast
    return variant.num_ctas(num_rows, num_out) / config.split_k * (tile + rows) * num_in * 2


def _possible(num_rows: int, num_in: int, is_gated: bool) -> Iterator[GemmConfig]:
    for tile, multicast, split_k in itertools.product(_TILES, (1, 2, 4), (1, 2, 4, 8)):
        if multicast * split_k <= MAX_CLUSTER and split_k <= math.ceil(num_in / TILE_K):
            yield from _with_stages(tile, split_k, multicast, None, num_rows, is_gated)
    if is_gated or num_rows <= _MAX_SMALL_M:
        return
    for columns, row_tile, multicast in itertools.product(_COLUMNS, _ROW_TILES, (1, 2, 4)):
        if columns % (8 * multicast) == 0 and math.ceil(num_rows / row_tile) % multicast == 0:
            yield from _with_stages(columns, 1, multicast, row_tile, num_rows, is_gated)


def _with_stages(
    tile: int, split_k: int, multicast: int, row_tile: int | None, num_rows: int, is_gated: bool
) -> Iterator[GemmConfig]:
    """With as many stages as two CTAs of a multiprocessor find room for, and one; 3 at least and 10 at most."""
    for num_ctas, limit in ((2, HALF_BYTES), (1, SHARED_BYTES)):
        for stages in range(10 if row_tile else 8, 2, -1):
            config = GemmConfig(tile=tile, split_k=split_k, stages=stages, multicast=multicast, row_tile=row_tile)
            variant = variant_of(config, num_rows, is_gated, torch.bfloat16)
            if variant.shared_bytes <= limit:
                if variant.a_multiprocessor == num_ctas and variant.sums_a_thread <= MAX_SUMS:
                    yield config
                break


def _model_micros(config: GemmConfig, num_rows: int, num_out: int, num_in: int, is_gated: bool) -> float:
    variant = variant_of(config, num_rows, is_gated, torch.bfloat16)
    rows = variant.rows
    num_ctas = variant.num_ctas(num_rows, num_out)
    waves = math.ceil(num_ctas / (variant.a_multiprocessor * _CTAS_AT_ONCE[config.cluster]))
    at_once = min(variant.a_multiprocessor, math.ceil(num_ctas / 132))
    block_bytes, num_blocks = at_once * variant.stage_bytes, math.ceil(num_in / TILE_K / config.split_k)
    block_micros = max(
        block_bytes / min(_SM_BYTES_US, block_bytes * config.stages / _LATENCY_US),
        at_once * 2 * config.tile * rows * TILE_K / _SM_FLOP_US,
        _BLOCK_US,
    )
    loop = max(
        waves * num_blocks * block_micros,
        num_out * (1 + is_gated) * num_in * 2 / _MEMORY_BYTES_US,
        cache_bytes(config, num_rows, num_out, num_in, is_gated=is_gated) / _CACHE_BYTES_US,
    )
    sums_bytes = config.tile * rows * 4
    sent = 0.5 + sums_bytes * (1 - 1 / config.split_k) / _SENT_BYTES_US if config.split_k > 1 else 0.0
    # A kernel that finds no room beside this one begins later.
    behind = 0.6 if variant.a_multiprocessor == 1 else 0.0
    return loop + sent + sums_bytes / config.split_k / _STORED_BYTES_US + behind
