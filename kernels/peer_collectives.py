"""Collectives between GPUs of one host as kernels that read each other's memory, captured in graphs.

    own part -> own region -> flag to every peer (release)
                               flags of all peers (acquire) -> peers' regions -> sum, or parts side by side

That is one shot: a rank reads R - 1 times what it has. Large sums of more than two ranks take two: each rank adds up
one of R parts of a round, and reads the others' sums behind a second meeting: less than twice what it has.

    own parts -> own region -> meet -> peers' regions -> sum of one part -> own results -> meet -> peers' results

Each program is a channel of its own: it has two regions in every rank's memory, takes them in turn, and meets the
programs of the same number on the other ranks. A region is written again two rounds later. By then the peers' next
round, which begins behind their reads of this one, has been seen: two regions are enough, nothing else is waited for.
Each of the two meetings of a large sum is a round in this; results have memory of their own, which the peers have read
when they come to the next meeting.

A waiting program also reads a word in the host's memory: whoever sets it there has all programs leave, now and later,
with results that mean nothing. Source: one-shot and two-shot all-reduce as in vLLM's and TensorRT-LLM's.

Legend: T rows, N features, V vocabulary, R ranks.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHANNELS = 256
"""Programs of a launch at most. All of a launch run at once: two of 8 warps, or one of 16, on an SM."""
REGION_BYTES = 32 << 10
RESULT_BYTES = 8 << 10
MAX_RANKS = 8
FLAG_BYTES = MAX_RANKS * CHANNELS * 8
PEER_BYTES = FLAG_BYTES + CHANNELS * (2 * REGION_BYTES + RESULT_BYTES)
"""Of the memory that each rank shows to the others: flags int64 [ranks, channels], then two regions a channel, then
results by channel."""

IS_FORMED, ABORT_ADDRESS, TAG, FIRST_RANK = 0, 1, 2, 3
"""Entries of a table, int64; from FIRST_RANK on addresses of the ranks' memory."""

# Elements of a round of one program: latency counts for few, bandwidth for many.
_FEW, _MANY = 1024, 8192
_ONE_SHOT_PROGRAMS = 128
_FEW_ELEMENTS = _ONE_SHOT_PROGRAMS * _FEW
# Elements that a rank reads of others in one shot at most, with more than two ranks. On four H200 sums of 64, 128 and
# 192 rows of 4,096 took 16.0, 25.8 and 32.4 us in one shot, and 19.2, 28.5 and 29.8 us in two.
_MOST_READ_AT_ONCE = 12 * _FEW_ELEMENTS
# Elements of a part of a round of two shots, at least and at most.
_LEAST_PART, _MOST_PART = 512, 2048
# Polls between two looks at the host's word, some milliseconds. A look of all programs takes up to 2 ms of the bus, a
# microsecond for each warp; at 128 polls the look of one rank made the others wait, who looked too, in all sums.
_POLLS: tl.constexpr = tl.constexpr(1 << 13)
_TABLE_RANKS: tl.constexpr = tl.constexpr(FIRST_RANK)
_FLAG_BYTES: tl.constexpr = tl.constexpr(FLAG_BYTES)
_REGION_BYTES: tl.constexpr = tl.constexpr(REGION_BYTES)
_RESULT_BYTES: tl.constexpr = tl.constexpr(RESULT_BYTES)
_CHANNELS: tl.constexpr = tl.constexpr(CHANNELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """Memory in which the kernels of one rank find the others. All of it may be rewritten between steps: graphs that
    were captured with it stay good.

    entries: int64 [FIRST_RANK + ranks]. While IS_FORMED is 0 a rank is alone: parts of others are zeros.
    counts: int64 [CHANNELS], rounds so far. aborted: int32 [CHANNELS], 1 where a program has seen the host's word.
    """

    rank: int
    num_ranks: int
    entries: torch.Tensor
    counts: torch.Tensor
    aborted: torch.Tensor

    @classmethod
    def alone(cls, rank: int, num_ranks: int, device: torch.device) -> PeerTable:
        assert 0 <= rank < num_ranks <= MAX_RANKS, (rank, num_ranks)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            entries=torch.zeros(FIRST_RANK + num_ranks, dtype=torch.int64, device=device),
            counts=torch.zeros(CHANNELS, dtype=torch.int64, device=device),
            aborted=torch.zeros(CHANNELS, dtype=torch.int32, device=device),
        )


@triton.jit
def _meet(table_ptr, aborted_ptr, channel, want, is_aborted, RANK: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Tells the peers that this channel's region is written, and waits until theirs are. 1: it was told to leave."""
    abort_ptr = tl.load(table_ptr + 1).to(tl.pointer_type(tl.int32))
    # All threads have written, and have read what they wanted of the round before.
    tl.debug_barrier()
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            flags_ptr = tl.load(table_ptr + _TABLE_RANKS + peer).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(
                flags_ptr + RANK * _CHANNELS + channel, want, mask=is_aborted == 0, sem="release", scope="sys"
            )
    flags_ptr = tl.load(table_ptr + _TABLE_RANKS + RANK).to(tl.pointer_type(tl.int64))
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            flag_ptr = flags_ptr + peer * _CHANNELS + channel
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            polls = 0
            while (seen < want) & (is_aborted == 0):
                polls += 1
                if polls % _POLLS == 0:
                    # By an atomic, whose result all threads share: they must leave the loop together.
                    is_aborted = tl.atomic_max(
                        aborted_ptr + channel, tl.load(abort_ptr, volatile=True), sem="relaxed", scope="gpu"
                    )
                seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    return is_aborted


@triton.jit
def _sum_kernel(
    x_ptr, residual_ptr, out_ptr, table_ptr, counts_ptr, aborted_ptr, num,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    is_formed = tl.load(table_ptr) != 0
    tag = tl.load(table_ptr + 2)
    count = tl.load(counts_ptr + channel)
    is_aborted = tl.full((), 0, tl.int32)
    first = channel * BLOCK
    while first < num:
        mask = first + offsets < num
        x = tl.load(x_ptr + first + offsets, mask=mask, other=0.0)
        total = x.to(tl.float32)
        if is_formed:
            count += 1
            region = _FLAG_BYTES + ((count % 2) * _CHANNELS + channel) * _REGION_BYTES
            own = tl.load(table_ptr + _TABLE_RANKS + RANK)
            tl.store(tl.multiple_of((own + region).to(tl.pointer_type(dtype)), 16) + offsets, x, mask=mask)
            is_aborted = _meet(table_ptr, aborted_ptr, channel, tag + count, is_aborted, RANK, NUM_RANKS)
            # In the order of the ranks, so that all of them have the same bits.
            total = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(NUM_RANKS):
                if peer == RANK:
                    total += x.to(tl.float32)
                else:
                    theirs = tl.load(table_ptr + _TABLE_RANKS + peer)
                    theirs_ptr = tl.multiple_of((theirs + region).to(tl.pointer_type(dtype)), 16)
                    is_there = mask & (is_aborted == 0)
                    total += tl.load(theirs_ptr + offsets, mask=is_there, other=0.0, volatile=True).to(tl.float32)
        if HAS_RESIDUAL:
            total += tl.load(residual_ptr + first + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + first + offsets, total.to(dtype), mask=mask)
        first += tl.num_programs(0) * BLOCK
    tl.store(counts_ptr + channel, count)


@triton.jit
def _sum_by_parts_kernel(
    x_ptr, residual_ptr, out_ptr, table_ptr, counts_ptr, aborted_ptr, num,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, PART)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    is_formed = tl.load(table_ptr) != 0
    tag = tl.load(table_ptr + 2)
    count = tl.load(counts_ptr + channel)
    is_aborted = tl.full((), 0, tl.int32)
    results = _FLAG_BYTES + 2 * _CHANNELS * _REGION_BYTES + channel * _RESULT_BYTES
    first = channel * (NUM_RANKS * PART)
    while first < num:
        at = tl.multiple_of(first, 16)
        own_at = at + RANK * PART
        region = _FLAG_BYTES + (((count + 1) % 2) * _CHANNELS + channel) * _REGION_BYTES
        if is_formed:
            own = tl.load(table_ptr + _TABLE_RANKS + RANK)
            own_ptr = tl.multiple_of((own + region).to(tl.pointer_type(dtype)), 16)
            for part in tl.static_range(NUM_RANKS):
                if part != RANK:
                    mask = at + part * PART + offsets < num
                    x = tl.load(x_ptr + at + part * PART + offsets, mask=mask, other=0.0)
                    tl.store(own_ptr + part * PART + offsets, x, mask=mask)
            is_aborted = _meet(table_ptr, aborted_ptr, channel, tag + count + 1, is_aborted, RANK, NUM_RANKS)
            mask = own_at + offsets < num
            # In the order of the ranks, as in one shot.
            total = tl.zeros((PART,), tl.float32)
            for peer in tl.static_range(NUM_RANKS):
                if peer == RANK:
                    total += tl.load(x_ptr + own_at + offsets, mask=mask, other=0.0).to(tl.float32)
                else:
                    theirs = tl.load(table_ptr + _TABLE_RANKS + peer)
                    theirs_ptr = tl.multiple_of((theirs + region).to(tl.pointer_type(dtype)), 16) + RANK * PART
                    is_there = mask & (is_aborted == 0)
                    total += tl.load(theirs_ptr + offsets, mask=is_there, other=0.0, volatile=True).to(tl.float32)
            if HAS_RESIDUAL:
                total += tl.load(residual_ptr + own_at + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + own_at + offsets, total.to(dtype), mask=mask)
            results_ptr = tl.multiple_of((own + results).to(tl.pointer_type(dtype)), 16)
            tl.store(results_ptr + offsets, total.to(dtype), mask=mask)
            is_aborted = _meet(table_ptr, aborted_ptr, channel, tag + count + 2, is_aborted, RANK, NUM_RANKS)
            for peer in tl.static_range(NUM_RANKS):
                if peer != RANK:
                    mask = at + peer * PART + offsets < num
                    theirs = tl.load(table_ptr + _TABLE_RANKS + peer)
                    theirs_ptr = tl.multiple_of((theirs + results).to(tl.pointer_type(dtype)), 16)
                    is_there = mask & (is_aborted == 0)
                    part = tl.load(theirs_ptr + offsets, mask=is_there, other=0.0, volatile=True)
                    tl.store(out_ptr + at + peer * PART + offsets, part, mask=mask)
            count += 2
        else:
            for part in tl.static_range(NUM_RANKS):
                mask = at + part * PART + offsets < num
                total = tl.load(x_ptr + at + part * PART + offsets, mask=mask, other=0.0).to(tl.float32)
                if HAS_RESIDUAL:
                    total += tl.load(residual_ptr + at + part * PART + offsets, mask=mask, other=0.0).to(tl.float32)
                tl.store(out_ptr + at + part * PART + offsets, total.to(dtype), mask=mask)
        first += tl.num_programs(0) * (NUM_RANKS * PART)
    tl.store(counts_ptr + channel, count)


@triton.jit
def _gather_kernel(
    x_ptr, out_ptr, table_ptr, counts_ptr, aborted_ptr, num, widest, V,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    is_formed = tl.load(table_ptr) != 0
    tag = tl.load(table_ptr + 2)
    count = tl.load(counts_ptr + channel)
    is_aborted = tl.full((), 0, tl.int32)
    own_start = (V * RANK) // NUM_RANKS
    own_width = (V * (RANK + 1)) // NUM_RANKS - own_start
    first = channel * BLOCK
    while first < num:
        rows = (first + offsets) // widest
        columns = (first + offsets) % widest
        is_row = first + offsets < num
        is_own = is_row & (columns < own_width)
        x = tl.load(x_ptr + rows * own_width + columns, mask=is_own, other=0.0)
        tl.store(out_ptr + rows * V + own_start + columns, x, mask=is_own)
        region = tl.full((), 0, tl.int64)
        if is_formed:
            count += 1
            region = _FLAG_BYTES + ((count % 2) * _CHANNELS + channel) * _REGION_BYTES
            own = tl.load(table_ptr + _TABLE_RANKS + RANK)
            tl.store(tl.multiple_of((own + region).to(tl.pointer_type(dtype)), 16) + offsets, x, mask=is_own)
            is_aborted = _meet(table_ptr, aborted_ptr, channel, tag + count, is_aborted, RANK, NUM_RANKS)
        is_there = is_formed & (is_aborted == 0)
        for peer in tl.static_range(NUM_RANKS):
            if peer != RANK:
                start = (V * peer) // NUM_RANKS
                is_column = is_row & (columns < (V * (peer + 1)) // NUM_RANKS - start)
                theirs = tl.load(table_ptr + _TABLE_RANKS + peer) + region
                theirs_ptr = tl.multiple_of(theirs.to(tl.pointer_type(dtype)), 16)
                part = tl.load(theirs_ptr + offsets, mask=is_column & is_there, other=0.0, volatile=True)
                tl.store(out_ptr + rows * V + start + columns, part, mask=is_column)
        first += tl.num_programs(0) * BLOCK
    tl.store(counts_ptr + channel, count)


def sum_of_ranks(
    x: torch.Tensor, table: PeerTable, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum of x over the ranks, and of the residual: in float32, in the order of the ranks, rounded once, alike on all.

    x: contiguous, of any shape, float32, float16 or bfloat16; residual and out likewise, both may be x or each other.
    All ranks call it with the same number of elements.
    """
    out = torch.empty_like(x) if out is None else out
    for each in (x, out, *(() if residual is None else (residual,))):
        assert each.is_contiguous() and each.numel() == x.numel() and each.dtype == x.dtype, (each.shape, each.dtype)
    num = x.numel()
    if table.num_ranks > 2 and (table.num_ranks - 1) * num > _MOST_READ_AT_ONCE:
        part, num_warps = _part(num, table.num_ranks, x.dtype)
        programs = min(CHANNELS, 2 * _num_sms(x.device), triton.cdiv(num, part * table.num_ranks))
        _sum_by_parts_kernel[(programs,)](
            x, x if residual is None else residual, out, table.entries, table.counts, table.aborted, num,
            RANK=table.rank, NUM_RANKS=table.num_ranks, HAS_RESIDUAL=residual is not None, PART=part,
            num_warps=num_warps,
        )  # fmt: skip
    elif num:
        block, num_warps = _tile(num, x.dtype)
        _sum_kernel[(min(_ONE_SHOT_PROGRAMS, triton.cdiv(num, block)),)](
            x, x if residual is None else residual, out, table.entries, table.counts, table.aborted, num,
            RANK=table.rank, NUM_RANKS=table.num_ranks, HAS_RESIDUAL=residual is not None, BLOCK=block,
            num_warps=num_warps,
        )  # fmt: skip
    return out


def gather_of_ranks(x_TW: torch.Tensor, table: PeerTable, vocab_size: int) -> torch.Tensor:
    """[T, V]: the ranks' columns side by side; rank r has those of [V r / R, V (r + 1) / R)."""
    rank, ranks = table.rank, table.num_ranks
    starts = [vocab_size * each // ranks for each in range(ranks + 1)]
    widths = [stop - start for start, stop in itertools.pairwise(starts)]
    assert x_TW.is_contiguous() and x_TW.dim() == 2 and x_TW.shape[1] == widths[rank], (x_TW.shape, widths)
    widest = max(widths)
    num, out_TV = len(x_TW) * widest, x_TW.new_empty(len(x_TW), vocab_size)
    if num:
        block, num_warps = _tile(num, x_TW.dtype)
        _gather_kernel[(min(_ONE_SHOT_PROGRAMS, triton.cdiv(num, block)),)](
            x_TW, out_TV, table.entries, table.counts, table.aborted, num, widest, vocab_size,
            RANK=rank, NUM_RANKS=ranks, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return out_TV


def _tile(num: int, dtype: torch.dtype) -> tuple[int, int]:
    """Elements of a round of one program, and its warps."""
    assert dtype in (torch.float32, torch.float16, torch.bfloat16), dtype
    assert _MANY * dtype.itemsize <= REGION_BYTES
    return (_FEW, 4) if num <= _FEW_ELEMENTS else (_MANY, 16)


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Those of a rank's GPU, of which all ranks of a host have the same; under the interpreter, as many as are used."""
    if device.type != "cuda":
        return CHANNELS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _part(num: int, num_ranks: int, dtype: torch.dtype) -> tuple[int, int]:
    """Elements of one of a program's parts of a round, and its warps: as many programs as there can be."""
    part = triton.next_power_of_2(triton.cdiv(num, num_ranks * CHANNELS))
    most = min(_MOST_PART, RESULT_BYTES // dtype.itemsize, REGION_BYTES // (MAX_RANKS * dtype.itemsize))
    part = min(max(part, _LEAST_PART), most)
    return part, 8 if part == most else 4
