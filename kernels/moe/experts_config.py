"""Configurations of the grouped GEMMs of routed experts, by how many pairs an expert gets."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """columns and depth: of a program's block of a weight, gate and up of so many columns each. by_tma: weights are
    loaded by TMA, where a device has it."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    by_tma: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """tile_rows: slots of a tile, 16 or a larger power of two."""

    tile_rows: int
    gate_up: GroupedConfig
    down: GroupedConfig


# Pairs of an expert up to which it is used, slots of a tile, gate and up, and down.
_MEASURED = (
    (8, 16, GroupedConfig(64, 128, 4, 3, by_tma=True), GroupedConfig(64, 128, 4, 3, by_tma=True)),
    (28, 32, GroupedConfig(64, 128, 4, 2, by_tma=True), GroupedConfig(128, 128, 4, 3, by_tma=True)),
    (64, 64, GroupedConfig(64, 64, 4, 4), GroupedConfig(128, 64, 4, 3, by_tma=True)),
    (float("inf"), 128, GroupedConfig(128, 64, 8, 4, by_tma=True), GroupedConfig(128, 64, 8, 3, by_tma=True)),
)


def default_config(num_pairs: int, num_experts: int, itemsize: int = 2) -> ExpertsConfig:
    """By the pairs that an expert gets on average: weights are read once a tile, empty slots cost arithmetic alone.

    Measured on one H200 with the shapes of Qwen3-30B-A3B and DeepSeek-V2-Lite in bf16; blocks of float32 have half the
    depth, since shared memory holds as many bytes.
    """
    average = num_pairs / num_experts
    _, tile_rows, *of_two_bytes = next(row for row in _MEASURED if average <= row[0])
    gate_up, down_ = (replace(block, depth=block.depth * 2 // itemsize) for block in of_two_bytes)
    return ExpertsConfig(tile_rows=tile_rows, gate_up=gate_up, down=down_)
