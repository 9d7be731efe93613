"""The schedule of split-KV attention: how the device cuts a step's KV tiles into equal shares. See `split_kv.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Programs whose first unit one program of the planning kernel finds.
_PLANNED_AT_ONCE = 16
_CPU_PROGRAMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """How split-KV attention runs.

    heads: KV heads of a program. block_n: KV tokens of a tile. min_tiles: a program's least share.
    num_stages: page table -> keys and values -> product is a pipeline of three, whose loads are (num_stages - 1) / 2
    tiles ahead: 3, 5 or 7. programs_per_sm: must all be resident at once, or the last ones wait for the first.
    """

    heads: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int

    @property
    def max_registers(self) -> int:
        """Of a thread, so that `programs_per_sm` fit the 65,536 of an SM."""
        return min(255, 65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """What is the same for all layers and steps. members: the most rows of a unit (1: plain decode)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    members: int = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads")

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        return max(16, int(triton.next_power_of_2(self.head_dim)))

    def query_rows(self, config: SplitConfig) -> int:
        """Query rows of a unit's product, padded to a power of two."""
        return int(triton.next_power_of_2(self.members * config.heads * self.group_size))


class SplitPlan:
    """One step's shares, for up to `max_units` units of up to 2^31 tiles in all; valid for any number of layers.

    Filled by `fill` on the device without the host knowing a length. Buffers are reused by the next step.
    """

    def __init__(self, shape: SplitShape, config: SplitConfig, max_units: int, device: torch.device) -> None:
        if shape.num_kv_heads % config.heads:
            raise ValueError(f"{config.heads} heads a program do not divide {shape.num_kv_heads} KV heads")
        self.shape = shape
        self.config = config
        self.max_units = max_units
        self.num_programs = config.programs_per_sm * _num_sms(device)
        # tile_starts [units + 1]: tiles of one block of heads before each unit. first_units [programs].
        self.tile_starts = torch.zeros(max_units + 1, dtype=torch.int32, device=device)
        self.first_units = torch.zeros(self.num_programs, dtype=torch.int32, device=device)

    def fill(self, ends_U: torch.Tensor, begins_U: torch.Tensor | None, window: int | None, least_tiles: int) -> None:
        """Lays out KV positions [begin, end) of each unit; a unit gets at least `least_tiles` tiles, seen or not.

        Units without tiles must all follow those with some.
        """
        num_units = ends_U.shape[0]
        if num_units > self.max_units:
            raise ValueError(f"{num_units} rows, but the workspace was made for {self.max_units}")
        config = self.config
        _plan_kernel[(triton.cdiv(self.num_programs, _PLANNED_AT_ONCE),)](
            begins_U,
            ends_U,
            self.tile_starts,
            self.first_units,
            num_units,
            WINDOW=window,
            BLOCK_N=config.block_n,
            HEAD_BLOCKS=self.shape.num_kv_heads // config.heads,
            MIN_TILES=config.min_tiles,
            LEAST_TILES=least_tiles,
            NUM_PROGRAMS=self.num_programs,
            AT_ONCE=_PLANNED_AT_ONCE,
            UNITS=max(2, triton.next_power_of_2(self.max_units)),
        )


class SplitParts:
    """Where programs leave the parts of units that their shares cut, and the count of those that have arrived.

    Used by one layer at a time: two streams need one each. Counts are 0 whenever no kernel runs.
    """

    def __init__(self, plans: list[SplitPlan], device: torch.device) -> None:
        floats = max(2 * p.num_programs * p.shape.query_rows(p.config) * p.shape.padded_dim for p in plans)
        scales = max(2 * p.num_programs * p.shape.query_rows(p.config) for p in plans)
        self.outputs = torch.empty(floats, dtype=torch.float32, device=device)
        self.lses = torch.empty(scales, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(max(p.num_programs for p in plans), dtype=torch.int32, device=device)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["begins_ptr", "ends_ptr"])
def _plan_kernel(
    begins_ptr,
    ends_ptr,
    tile_starts_ptr,
    first_units_ptr,
    num_units,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    UNITS: tl.constexpr,
):
    unit = tl.arange(0, UNITS)
    is_unit = unit < num_units
    length = tl.load(ends_ptr + unit, mask=is_unit, other=0)
    if begins_ptr is not None:
        length -= tl.load(begins_ptr + unit, mask=is_unit, other=0)
    if WINDOW is not None:
        length = tl.minimum(length, WINDOW)
    tiles = tl.where(is_unit, tl.maximum((length + BLOCK_N - 1) // BLOCK_N, LEAST_TILES), 0)
    ends = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(tile_starts_ptr, 0)
        tl.store(tile_starts_ptr + 1 + unit, ends, mask=is_unit)
    share = tl.maximum((tl.sum(tiles, 0) * HEAD_BLOCKS + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)
    program = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_before = (ends[:, None] * HEAD_BLOCKS <= program[None, :] * share) & is_unit[:, None]
    first = tl.minimum(tl.sum(is_before.to(tl.int32), 0), num_units - 1)
    tl.store(first_units_ptr + program, first, mask=program < NUM_PROGRAMS)
