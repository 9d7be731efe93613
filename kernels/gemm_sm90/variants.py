"""Compile-time variants of gemm.cu and gemm_row_tiled.cu, and their launch parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

TILE_K = 64  # Numbers along K of a tile: 128 bytes.
MAX_CLUSTER = 8  # CTAs of a portable one.
SHARED_BYTES = 227 << 10  # Most that a CTA may have.
HALF_BYTES = 113 << 10  # Most that each of two on a multiprocessor may have.
MAX_SUMS = 128  # A thread's.
# Of a multiprocessor, which gives them to whole warpgroups; and what a thread needs beside its sums.
_REGISTERS, _OTHER_REGISTERS = 65536, 40
_ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterTiling:
    """Tiling of few_rows.cu beside tile and stages, which are its slots of copies under way.

    warps: of a CTA, which share K. batch: blocks of 32 numbers of K that a slot has of each warp. resident: CTAs of an
    SM that find room."""

    warps: int = 8
    batch: int = 1
    resident: int = 2

    def __str__(self) -> str:
        return f"{self.warps}x{self.batch}x{self.resident}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Tiling of a GEMM.

    tile: weight rows of a CTA. split_k: CTAs that share K. stages: tiles of the ring. multicast: CTAs of a cluster that
    share one read from the L2 cache (1, 2, 4): of rows of x, for neighbouring tiles, or, with row_tile, of the tile's
    weights. row_tile: rows of x of a CTA (64, 128); None: all rows (small-M). registers: of few_rows.cu; None: of any
    other kernel.
    """

    tile: int
    split_k: int
    stages: int
    multicast: int = 1
    row_tile: int | None = None
    registers: RegisterTiling | None = None

    @property
    def cluster(self) -> int:
        """CTAs, MAX_CLUSTER at most."""
        return self.split_k * self.multicast

    def __str__(self) -> str:
        """tile[:row_tile][xmulticast]/split_k/stages[/registers]."""
        registers = f"/{self.registers}" if self.registers else ""
        row_tile = f":{self.row_tile}" if self.row_tile else ""
        multicast = f"x{self.multicast}" if self.multicast > 1 else ""
        return f"{self.tile}{row_tile}{multicast}/{self.split_k}/{self.stages}{registers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(ABC):
    """One compiled kernel. Those that are equal are the same. tile: weight rows of a CTA; rows: of x, padded."""

    entry: ClassVar[str]
    source_file: ClassVar[str]

    tile: int
    rows: int
    stages: int
    is_half: bool
    multicast: int

    @property
    def stage_bytes(self) -> int:
        return (self.tile + self.rows) * TILE_K * 2

    @property
    @abstractmethod
    def weight_rows(self) -> int:
        """Of a box."""

    @property
    @abstractmethod
    def activation_rows(self) -> int:
        """Of a box of x."""

    @property
    @abstractmethod
    def num_threads(self) -> int: ...

    @property
    @abstractmethod
    def sums_a_thread(self) -> int:
        """Registers that hold them."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """With what the kernel needs to align its ring. As its source lays it out."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Features out of a tile."""

    @abstractmethod
    def num_ctas(self, num_rows: int, num_out: int) -> int: ...

    def num_tiles(self, num_out: int) -> int:
        """Of features out."""
        return math.ceil(num_out / self.columns)

    @abstractmethod
    def constants(self) -> str:
        """Constants that the source wants set."""

    @property
    @abstractmethod
    def instruction(self) -> tuple[int, bool]:
        """Columns of a wgmma; whether it is of float16."""

    @property
    def a_multiprocessor(self) -> int:
        """CTAs, of this kernel or the next, that share one."""
        registers = _REGISTERS // (2 * math.ceil(self.num_threads / 128) * 128)
        return 2 if self.shared_bytes <= HALF_BYTES and self.sums_a_thread + _OTHER_REGISTERS <= registers else 1

    def kernel_source(self) -> str:
        """Without what is set."""
        folder = Path(__file__).parent
        kernel = (folder / self.source_file).read_text(encoding="utf-8")
        for name in ("ptx.cuh", "gemm_results.cuh"):
            kernel = kernel.replace(f"// {name} stands here.\n", (folder / name).read_text(encoding="utf-8"))
        return kernel

    def source(self) -> str:
        """For NVRTC or nvcc (sm_90a)."""
        return self.constants() + _wgmma_source(*self.instruction) + self.kernel_source()


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallM(Variant):
    """gemm.cu. rows: all of x's; split_k: CTAs that share K."""

    entry: ClassVar[str] = "gemm_sm90"
    source_file: ClassVar[str] = "gemm.cu"

    is_gated: bool
    split_k: int

    @property
    def weight_rows(self) -> int:
        return self.tile

    @property
    def activation_rows(self) -> int:
        return self.rows // self.multicast

    @property
    def num_threads(self) -> int:
        return (128 if self.tile == 64 else 256) + 32

    @property
    def sums_a_thread(self) -> int:
        return max(self.tile // 128, 1) * self.rows // 2

    @property
    def columns(self) -> int:
        return self.tile // 2 if self.is_gated else self.tile

    @property
    def shared_bytes(self) -> int:
        bands = self.rows // 8
        band_bytes = self.tile // 64 * 4 * (32 * 16 + 64)
        finish = (bands + (self.split_k - 1) * math.ceil(bands / self.split_k)) * band_bytes
        own_rows = math.ceil(bands / self.split_k) * 8
        square_sums = self.split_k * self.rows if self.is_gated else own_rows * self.columns // 8
        return max(self.stages * self.stage_bytes, finish) + square_sums * 4 + 16 * self.stages + 16 + 1024

    def num_ctas(self, num_rows: int, num_out: int) -> int:
        return math.ceil(num_out / (self.columns * self.multicast)) * self.multicast * self.split_k

    @property
    def instruction(self) -> tuple[int, bool]:
        return self.rows, self.is_half

    def constants(self) -> str:
        return (
            f"constexpr int kTileN = {self.tile}, kRows = {self.rows}, kStages = {self.stages};\n"
            f"constexpr int kMinCtas = {self.a_multiprocessor}, kSplitK = {self.split_k};\n"
            f"constexpr int kMulticast = {self.multicast}, kMaxPolls = 0;\n"
            f"constexpr bool kIsGated = {str(self.is_gated).lower()}, kIsHalf = {str(self.is_half).lower()};\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiled(Variant):
    """gemm_row_tiled.cu. rows: of a tile."""

    entry: ClassVar[str] = "gemm_sm90_row_tiled"
    source_file: ClassVar[str] = "gemm_row_tiled.cu"

    @property
    def weight_rows(self) -> int:
        return self.tile // self.multicast

    @property
    def activation_rows(self) -> int:
        return self.rows

    @property
    def columns(self) -> int:
        return self.tile

    @property
    def num_threads(self) -> int:
        return self.rows * 2 + 32

    @property
    def sums_a_thread(self) -> int:
        return self.tile // 2

    @property
    def shared_bytes(self) -> int:
        pitch = self.tile + (40 - self.tile % 32) % 32
        finish = self.rows * (pitch + self.tile // 8) * 4
        return max(self.stages * self.stage_bytes, finish) + 16 * self.stages + 1024

    def num_ctas(self, num_rows: int, num_out: int) -> int:
        row_tiles = math.ceil(num_rows / (self.rows * self.multicast)) * self.multicast
        return math.ceil(num_out / self.tile) * row_tiles

    @property
    def instruction(self) -> tuple[int, bool]:
        return self.tile, self.is_half

    def constants(self) -> str:
        return (
            f"constexpr int kTileN = {self.tile}, kGroups = {self.rows // 64}, kStages = {self.stages};\n"
            f"constexpr int kMinCtas = {self.a_multiprocessor}, kMulticast = {self.multicast}, kMaxPolls = 0;\n"
            f"constexpr bool kIsHalf = {str(self.is_half).lower()};\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRows(Variant):
    """few_rows.cu: up to 8 rows, every thread with a ring of its own. stages: slots of it."""

    entry: ClassVar[str] = "few_rows"
    source_file: ClassVar[str] = "few_rows.cu"

    is_gated: bool
    tiling: RegisterTiling

    @property
    def weight_rows(self) -> int:
        return self.tile

    @property
    def activation_rows(self) -> int:
        return self.rows

    @property
    def num_threads(self) -> int:
        return 32 * self.tiling.warps

    @property
    def sums_a_thread(self) -> int:
        return self.tile // 4

    @property
    def columns(self) -> int:
        return self.tile // 2 if self.is_gated else self.tile

    @property
    def shared_bytes(self) -> int:
        """The ring, beside what the kernel declares."""
        return self.stages * self.tiling.batch * (self.tile // 8 + 1) * self.num_threads * 16

    def num_ctas(self, num_rows: int, num_out: int) -> int:
        return num_out // self.columns

    @property
    def instruction(self) -> tuple[int, bool]:
        return self.rows, self.is_half

    def constants(self) -> str:
        tiling = self.tiling
        return (
            f"constexpr int kWarps = {tiling.warps}, kTiles = {self.tile // 16}, kDepth = {self.stages};\n"
            f"constexpr int kBatch = {tiling.batch}, kMinCtas = {tiling.resident}, kMaxPolls = 0;\n"
            f"constexpr bool kIsGated = {str(self.is_gated).lower()}, kIsHalf = {str(self.is_half).lower()};\n"
        )


FEW_ROWS_MOST = 8
# The fastest ones of a matrix of Llama-3.1-8B each, of those that were tried (bench/gpu/few_rows.py).
FEW_ROWS_CONFIGS = tuple(
    GemmConfig(tile=tile, split_k=1, stages=stages, registers=RegisterTiling(warps=warps, resident=resident))
    for tile, stages, warps, resident in ((32, 4, 8, 2), (16, 8, 8, 2), (32, 4, 4, 4), (16, 5, 8, 3))
)
FEW_ROWS = FEW_ROWS_CONFIGS[0]


def takes_few_rows(config: GemmConfig, num_rows: int, num_out: int, num_in: int) -> bool:
    """True where such a configuration of few_rows.cu computes such a GEMM; num_out: weight rows, gate's and up's."""
    tiling = config.registers
    assert tiling is not None, config
    slot = 32 * tiling.warps * tiling.batch
    return num_rows <= FEW_ROWS_MOST and num_out % config.tile == 0 and num_in % slot == 0


def variant_of(config: GemmConfig, num_rows: int, is_gated: bool, dtype: torch.dtype) -> Variant:
    """The kernel for GEMMs of 1 to 256 rows with this configuration; gated GEMMs have no row tiles."""
    tile, stages, multicast, is_half = config.tile, config.stages, config.multicast, dtype == torch.float16
    if config.row_tile is not None:
        assert config.split_k == 1 and not is_gated, config
        return RowTiled(tile=tile, rows=config.row_tile, stages=stages, is_half=is_half, multicast=multicast)
    if config.registers is not None:
        return FewRows(
            tile=tile,
            rows=FEW_ROWS_MOST,
            stages=stages,
            is_half=is_half,
            multicast=multicast,
            is_gated=is_gated,
            tiling=config.registers,
        )
    rows = padded_rows(num_rows, multicast)
    return SmallM(
        tile=tile,
        rows=rows,
        stages=stages,
        is_half=is_half,
        multicast=multicast,
        is_gated=is_gated,
        split_k=config.split_k,
    )


def padded_rows(num_rows: int, multicast: int = 1) -> int:
    """Each neighbour loads as many, 8 or a multiple: the swizzle's atom."""
    return next(rows for rows in _ROWS if rows >= num_rows and rows % (8 * multicast) == 0)


def _wgmma_source(columns: int, is_half: bool) -> str:
    """wgmma names each of its registers."""
    count, dtype = columns // 2, "f16" if is_half else "bf16"
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, unsigned long long b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} '
        f'{{{registers}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;" : {outputs} : "l"(a), "l"(b));\n}}\n'
    )
