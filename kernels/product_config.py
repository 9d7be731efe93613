"""How a product of few rows is cut into programs: the configurations, the choice among them, the splits' workspace."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

MAX_ROWS = 256
_MAX_SPLITS = 16
_CPU_MULTIPROCESSORS = 132  # What the interpreter pretends to run on.
_MIN_STEPS = 4  # Of a program along K: fewer leave nothing to look ahead to.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """num_out: rows of the weight, of gate or up alone if it is gated."""

    num_rows: int
    num_out: int
    num_in: int
    is_gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductConfig:
    """A program computes [rows, block_n] of the output (of a gated one: from as many rows of gate and of up).

    prefetch: steps of block_k of its weight that a program
    asks for before the kernel ahead has ended. use_tma: tiles are brought by the copy engine, else by threads.
    """

    rows: int
    block_n: int
    block_k: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 4
    use_tma: bool = True


class ProductWorkspace:
    """What split products leave for their last program: float32 sums, and counts that are 0 between launches.

    Serves one stream: products that run at the same time need one each.
    """

    def __init__(self, device: torch.device | str, num_bytes: int = 48 << 20, max_tiles: int = 8192) -> None:
        self.parts = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(max_tiles, dtype=torch.int32, device=device)

    def clamped_splits(self, config: ProductConfig, shape: ProductShape) -> int:
        """The configuration's splits, or fewer where K is short or the workspace small."""
        tiles = -(-shape.num_out // config.block_n) * -(-shape.num_rows // config.rows)
        part = config.rows * (config.block_n * (1 + shape.is_gated) + 1)
        if tiles > self.arrivals.numel():
            return 1
        steps = -(-shape.num_in // config.block_k)
        return max(1, min(config.num_splits, steps, self.parts.numel() // (tiles * part)))


# By rows of a tile; then those of gated products. 100 KB of tiles a program, so that a multiprocessor holds two, or one
# and the first of the kernel behind. x, read once a program, is to stay behind the weights in bytes: both come through
# the L2 cache.
_TILES = (
    ProductConfig(rows=16, block_n=64, block_k=128, num_stages=5),
    ProductConfig(rows=32, block_n=128, block_k=64, num_stages=5),
    ProductConfig(rows=64, block_n=128, block_k=64, num_stages=4, num_warps=8),
    ProductConfig(rows=128, block_n=128, block_k=64, num_stages=3, num_warps=8),
    ProductConfig(rows=256, block_n=128, block_k=64, num_stages=4, num_warps=8),
)
_GATED_TILES = (
    ProductConfig(rows=16, block_n=64, block_k=64, num_stages=6),
    ProductConfig(rows=32, block_n=64, block_k=64, num_stages=5),
    ProductConfig(rows=64, block_n=64, block_k=64, num_stages=4, num_warps=8),
    ProductConfig(rows=128, block_n=64, block_k=64, num_stages=3, num_warps=8),
    ProductConfig(rows=256, block_n=64, block_k=64, num_stages=4, num_warps=8),
)

# Of an H200, measured elsewhere; only their proportions matter here.
_MEMORY_GB_S, _TFLOP_S, _PROGRAM_GB_S = 4300.0, 650.0, 60.0
_LAUNCH_US, _SPLIT_US = 2.0, 1.5


@functools.cache
def default_config(shape: ProductShape, num_sms: int) -> ProductConfig:
    """The tile for the number of rows, split along K as far as that fills the multiprocessors better than it costs."""
    tiles = _GATED_TILES if shape.is_gated else _TILES
    tile = next(tile for tile in tiles if tile.rows >= shape.num_rows)
    steps = -(-shape.num_in // tile.block_k)
    out_tiles = -(-shape.num_out // tile.block_n)
    # All parts of a tile are then under way together: two programs a multiprocessor.
    most = min(_MAX_SPLITS, steps // _MIN_STEPS, 2 * num_sms // out_tiles)
    splits = range(1, max(1, most) + 1)
    return min(
        (replace(tile, num_splits=count) for count in splits),
        key=lambda config: expected_micros(config, shape, num_sms),
    )


def expected_micros(config: ProductConfig, shape: ProductShape, num_sms: int) -> float:
    """A coarse model: the busiest multiprocessor's share of reading and multiplying, then adding up the parts."""
    tiles = -(-shape.num_out // config.block_n) * -(-shape.num_rows // config.rows)
    width = config.block_n * (1 + shape.is_gated)
    waves = -(-tiles * config.num_splits // num_sms)
    share = waves * shape.num_in / config.num_splits
    reading = share * width * 2 / (_MEMORY_GB_S / num_sms) / 1e3
    multiplying = share * width * config.rows * 2 / (_TFLOP_S / num_sms) / 1e6
    micros = _LAUNCH_US + max(reading, multiplying)
    if config.num_splits > 1:
        part_bytes = width * config.rows * 4
        micros += _SPLIT_US + (config.num_splits + 1) * part_bytes / _PROGRAM_GB_S / 1e3
    return micros


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
