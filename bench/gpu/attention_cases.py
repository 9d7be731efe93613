"""Shapes that bench/gpu/attention.py measures, and configurations of the kernels that it compares."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.kernels.attention.extend_attention import ExtendConfig
from radixmesh.kernels.attention.split_schedule import SplitConfig


def _split(heads: int, block_n: int, warps: int, stages: int, per_sm: int, min_tiles: int = 2) -> SplitConfig:
    return SplitConfig(
        heads=heads, block_n=block_n, num_warps=warps, num_stages=stages, programs_per_sm=per_sm, min_tiles=min_tiles
    )


DECODE_CONFIGS = [
    _split(1, 64, 4, 5, 3),
    _split(1, 64, 4, 5, 3, 4),
    _split(1, 64, 4, 3, 4),
    _split(1, 64, 4, 3, 4, 1),
    _split(1, 64, 4, 7, 2),
    _split(1, 32, 4, 7, 4, 4),
    _split(1, 32, 4, 5, 4, 4),
    _split(2, 32, 4, 5, 3),
    _split(2, 32, 4, 7, 2),
    _split(2, 64, 4, 3, 2),
    _split(4, 32, 8, 3, 1),
]
FEW_ROWS_CONFIGS = [
    _split(1, 64, 4, 3, 4, 1),
    _split(1, 64, 4, 3, 4, 2),
    _split(1, 64, 4, 3, 4, 4),
    _split(1, 64, 4, 7, 2, 1),
    _split(1, 64, 8, 7, 1, 2),
    _split(1, 32, 4, 7, 4, 2),
    _split(1, 128, 8, 5, 1, 1),
]
PREFIX_CONFIGS = [
    _split(1, 64, 4, 3, 2),
    _split(1, 64, 4, 5, 1),
    _split(1, 32, 4, 7, 2),
    _split(1, 64, 8, 5, 1),
    _split(1, 128, 8, 3, 1),
]
EXTEND_CONFIGS = [
    ExtendConfig(block_m=128, block_n=128, num_warps=8, num_stages=3),
    ExtendConfig(block_m=128, block_n=64, num_warps=8, num_stages=5),
    ExtendConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
    ExtendConfig(block_m=64, block_n=64, num_warps=4, num_stages=5),
    ExtendConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """lengths: uniform (all `context`) or random (1 .. 2 x context)."""

    batch: int
    context: int
    lengths: str = "uniform"
    page_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendCase:
    chunks: int
    chunk_len: int
    context: int
    page_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCase:
    groups: int
    rows: int
    prefix: int
    own: int


DECODE_KEY_CASES = [
    DecodeCase(batch=256, context=384),
    DecodeCase(batch=1, context=256),
    DecodeCase(batch=1, context=8192),
    DecodeCase(batch=512, context=1500, lengths="random"),
    DecodeCase(batch=32, context=2048),
]
FEW_ROWS_CASES = [
    DecodeCase(batch=1, context=256),
    DecodeCase(batch=1, context=384),
    DecodeCase(batch=1, context=2048),
    DecodeCase(batch=1, context=8192),
    DecodeCase(batch=4, context=384),
    DecodeCase(batch=8, context=2048),
    DecodeCase(batch=16, context=384),
]
DECODE_CASES = [
    *(DecodeCase(batch=b, context=c) for b in (1, 8, 32, 64, 128, 256, 512) for c in (128, 384, 2048, 8192)),
    *(DecodeCase(batch=b, context=c, lengths="random") for b in (8, 64, 256) for c in (384, 3000)),
    *(DecodeCase(batch=b, context=c, page_size=16) for b in (1, 64, 256) for c in (384, 2048)),
]
EXTEND_KEY_CASES = [
    ExtendCase(chunks=1, chunk_len=8192, context=8192),
    ExtendCase(chunks=16, chunk_len=512, context=512),
    ExtendCase(chunks=48, chunk_len=128, context=2176),
]
EXTEND_CASES = [
    *EXTEND_KEY_CASES,
    ExtendCase(chunks=1, chunk_len=2048, context=32768),
    ExtendCase(chunks=1, chunk_len=128, context=8192),
    ExtendCase(chunks=4, chunk_len=2048, context=2048),
    ExtendCase(chunks=1, chunk_len=8192, context=8192, page_size=16),
]
SHARED_CASES = [
    SharedCase(groups=32, rows=16, prefix=2048, own=192),
    SharedCase(groups=4, rows=64, prefix=4096, own=256),
    SharedCase(groups=16, rows=4, prefix=2048, own=256),
]
