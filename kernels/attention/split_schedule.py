"""The schedule of split-KV attention: how the device cuts a step's KV tiles into equal shares. See `split_kv.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Programs whose first unit one program of the planning kernel finds, and units that it looks at in one step.
_PLANNED_AT_ONCE = 16
UNITS_AT_ONCE = 1024
_CPU_PROGRAMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Tuning of split-KV attention.

    heads: KV heads of a program. block_n: KV tokens of a tile. min_tiles: a program's least share.
    num_stages: page table -> keys and values -> matmul is a pipeline of three, whose loads are (num_stages - 1) / 2
    tiles ahead: 3, 5 or 7. programs_per_sm: must all be resident at once, or the last ones wait for the first.
    is_whole: units are never cut, so that a row's bits depend on nothing but the row. A unit belongs to the program
    in whose share it starts.
    is_sm90: by the kernel of `mla_split_sm90.py`, which has its own warps and stages.
    """

    heads: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int
    is_whole: bool = False
    is_sm90: bool = False

    @property
    def max_registers(self) -> int:
        """Of a thread, so that `programs_per_sm` fit the 65,536 of an SM."""
        return min(255, 65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """Shape shared by all layers and steps. members: the most rows of a unit (1: plain decode)."""

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
        """Query rows of a unit's matmul, padded to a power of two."""
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

    def fill(
        self,
        ends_U: torch.Tensor,
        begins_U: torch.Tensor | None,
        window: int | None,
        least_tiles: int,
        *,
        attention_chunk: int | None = None,
        use_pdl: bool = False,
    ) -> None:
        """Lays out KV positions [begin, end) of each unit; a unit gets at least `least_tiles` tiles, seen or not.

        window, attention_chunk: as of `paged_decode`; what a unit's last token does not see has no tiles.

        Units without tiles must all follow those with some. With `use_pdl` it runs beside the previous kernel, which
        must have begun behind all that wrote begins and ends or used the plan before (Hopper and later).
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
            UNITS=min(UNITS_AT_ONCE, max(2, triton.next_power_of_2(self.max_units))),
            CHUNK=attention_chunk,
            PDL=use_pdl,
            launch_pdl=use_pdl,
        )


class SplitParts:
    """Buffers for the parts of units that programs' shares cut, and the count of parts that have arrived.

    Used by one layer at a time: two streams need one each. Counts are 0 whenever no kernel runs.
    """

    def __init__(self, plans: list[SplitPlan], device: torch.device, num_whole: int = 0) -> None:
        """num_whole: units that have places of their own behind the programs', for when none is written as a whole."""
        scales = max((2 * p.num_programs + num_whole) * p.shape.query_rows(p.config) for p in plans)
        floats = scales * max(p.shape.padded_dim for p in plans)
        self.outputs = torch.empty(floats, dtype=torch.float32, device=device)
        self.lses = torch.empty(scales, dtype=torch.float32, device=device)
        # The kernel of `mla_split_sm90.py` counts for each half of the columns.
        self.arrivals = torch.zeros(2 * max(p.num_programs for p in plans), dtype=torch.int32, device=device)


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
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Once for the total, from which a program's share follows, and once for where units begin.
    total = 0
    for begin in range(0, num_units, UNITS):
        tiles = _unit_tiles(begins_ptr, ends_ptr, begin, num_units, WINDOW, BLOCK_N, LEAST_TILES, UNITS, CHUNK)
        total += tl.sum(tiles, 0)
    share = tl.maximum((total * HEAD_BLOCKS + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)
    program = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    first = tl.zeros([AT_ONCE], tl.int32)
    before = 0
    if tl.program_id(0) == 0:
        tl.store(tile_starts_ptr, 0)
    for begin in range(0, num_units, UNITS):
        unit = begin + tl.arange(0, UNITS)
        tiles = _unit_tiles(begins_ptr, ends_ptr, begin, num_units, WINDOW, BLOCK_N, LEAST_TILES, UNITS, CHUNK)
        ends = before + tl.cumsum(tiles, 0)
        if tl.program_id(0) == 0:
            tl.store(tile_starts_ptr + 1 + unit, ends, mask=unit < num_units)
        is_before = (ends[:, None] * HEAD_BLOCKS <= program[None, :] * share) & (unit < num_units)[:, None]
        first += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tiles, 0)
    tl.store(first_units_ptr + program, tl.minimum(first, num_units - 1), mask=program < NUM_PROGRAMS)
    if PDL:
        # Nothing here needs the kernel ahead; what waits for this one takes it to be over too.
        tl.extra.cuda.gdc_wait()


@triton.jit
def _unit_tiles(
    begins_ptr,
    ends_ptr,
    begin,
    num_units,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tiles of one block of heads of UNITS units from `begin` on; 0 past the last."""
    unit = begin + tl.arange(0, UNITS)
    is_unit = unit < num_units
    length = tl.load(ends_ptr + unit, mask=is_unit, other=0)
    if begins_ptr is not None:
        length -= tl.load(begins_ptr + unit, mask=is_unit, other=0)
    if WINDOW is not None:
        length = tl.minimum(length, WINDOW)
    if CHUNK is not None:
        length -= tl.maximum(length - 1, 0) // CHUNK * CHUNK
    return tl.where(is_unit, tl.maximum((length + BLOCK_N - 1) // BLOCK_N, LEAST_TILES), 0)
