"""Pieces of what the programs of split-KV attention do: `split_kv.py` has the algorithm and the kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Below every score and finite: a row that has seen no key yet must not compute inf - inf.
LOWEST = tl.constexpr(-1.0e30)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def soft_capped(scores, factor):
    """tanh(scores x factor): scores of dot products as a share of the cap, by the exponential that every device has."""
    return 1.0 - 2.0 / (tl.exp2(scores * (factor * 2.8853900817779268)) + 1.0)


@triton.jit
def fp8_pairs(pairs):
    """The first and the second of each two FP8 numbers, int16, as float16, which holds all of them.

    float16: sm_90 converts two numbers in one instruction; to bfloat16 each takes one more, at an eighth of the rate.
    Two as one of 16 bits: fragments of matmuls are read from shared memory by the instructions for that width.
    """
    if _IS_INTERPRETED:
        first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)
    asm: tl.constexpr = """
    {
        .reg .b32 bytes;
        .reg .b16 firsts, seconds;
        prmt.b32 bytes, $2, 0, 0x3120;
        mov.b32 {firsts, seconds}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, firsts;
        cvt.rn.f16x2.e4m3x2 $1, seconds;
    }
    """
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def row_powers(highest):
    """Power of two by which a row of a bfloat16 query, of such a largest number, is divided to be float16: float32 [M].

    The quotients are below 2; what is below 2^-14 of the largest loses its last digits."""
    exponent = highest.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(exponent, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def query_pairs(even, odd):
    """A bfloat16 query for an FP8 pool, its even and its odd dims [M, X]: both as float16, and `row_powers`."""
    power = row_powers(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1))
    divisor = power[:, None]
    return (even.to(tl.float32) / divisor).to(tl.float16), (odd.to(tl.float32) / divisor).to(tl.float16), power


@triton.jit
def store_dims(ptr, even, odd, mask, PACK: tl.constexpr):
    """Stores a row's dims; with PACK 2 the even and the odd ones, which alternate."""
    tl.store(ptr, even.to(ptr.dtype.element_ty), mask=mask)
    if PACK == 2:
        tl.store(ptr + 1, odd.to(ptr.dtype.element_ty), mask=mask)


class Tails(NamedTuple):
    """Ends of rows whose KV does not lie where the page tables say, as those of the branches of a tree: of row t the KV
    of position starts_T[t] + n is token tokens_TD[t, n] of the pool. int32 both; a row has at most D such positions."""

    starts_T: torch.Tensor
    tokens_TD: torch.Tensor


def with_tail(tokens: torch.Tensor, positions: torch.Tensor, tails: Tails, row: int) -> torch.Tensor:
    """Tokens of the pool at positions of a row, int64: those of its tail in the place of what the tables say."""
    offsets = positions - tails.starts_T[row]
    of_tail = tails.tokens_TD[row, offsets.clamp(0, tails.tokens_TD.shape[1] - 1)]
    return torch.where(offsets >= 0, of_tail.long(), tokens)


@triton.jit
def tail_index(token, tails_ptr, unit, offset, is_in, TAIL: tl.constexpr):
    """`token`, but for the positions whose offset in the unit's tail is not negative."""
    is_tail = is_in & (offset >= 0)
    return tl.where(is_tail, tl.load(tails_ptr + unit * TAIL + offset, mask=is_tail, other=0).to(tl.int64), token)


@triton.jit
def token_index(table_ptr, position, is_in, PAGE_SIZE: tl.constexpr):
    """Index in the pool of the token at each position, int64; token 0 where it is not in."""
    page = tl.load(table_ptr + position // PAGE_SIZE, mask=is_in, other=0).to(tl.int64)
    return page * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def merge_parts(parts_ptr, lses_ptr, first, num_parts, ROWS: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr):
    """Softmax-weighted mean of a unit's parts: outputs [ROWS, DIM] and their base-2 logarithms of sums [ROWS].

    All loads of AT_ONCE parts are under way before the first is used. Parts were written by other SMs: read past this
    SM's L1 (.cg).
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, DIM], tl.float32)
    for begin in range(0, num_parts, AT_ONCE):
        lses = ()
        outputs = ()
        for part in tl.static_range(AT_ONCE):
            is_part = row * 0 + begin + part < num_parts
            # A program's second partial result is of the unit that it ended in, which is where the unit starts.
            partial = 2 * (first + begin + part) + tl.where(begin + part == 0, 1, 0)
            row_offset = partial * ROWS + row
            lses = lses + (tl.load(lses_ptr + row_offset, mask=is_part, other=LOWEST, cache_modifier=".cg"),)
            offset = row_offset[:, None] * DIM + dim[None, :]
            mask = is_part[:, None]
            outputs = outputs + (tl.load(parts_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg"),)
        new_highest = highest
        for part in tl.static_range(AT_ONCE):
            new_highest = tl.maximum(new_highest, lses[part])
        correction = tl.exp2(highest - new_highest)
        total = total * correction
        merged = merged * correction[:, None]
        for part in tl.static_range(AT_ONCE):
            weight = tl.exp2(lses[part] - new_highest)
            total += weight
            merged += outputs[part] * weight[:, None]
        highest = new_highest
    return merged / total[:, None], highest + tl.log2(total)


@triton.jit
def prefetch_tile(
    keys_ptr, values_ptr, page_tables_ptr, slots_ptr, begins_ptr, ends_ptr, tile_starts_ptr, table_stride, unit, work,
    KV_HEADS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Has the keys and values of the tile that a program begins with brought to the L2 cache; nobody waits for them.

    A row's own token is among them and may be on its way there still: what is read later is read from the same cache.
    """
    LINES: tl.constexpr = (HEADS * D * keys_ptr.dtype.element_ty.primitive_bitwidth // 8 + 127) // 128
    LINES_PADDED: tl.constexpr = triton.next_power_of_2(LINES)
    LINE: tl.constexpr = 128 * 8 // keys_ptr.dtype.element_ty.primitive_bitwidth
    unit_begin = tl.load(tile_starts_ptr + unit)
    tiles = tl.load(tile_starts_ptr + unit + 1) - unit_begin
    head_block = (work - unit_begin * HEAD_BLOCKS) // tiles
    tile = work - unit_begin * HEAD_BLOCKS - head_block * tiles
    kv_end = tl.load(ends_ptr + unit)
    kv_begin = 0
    if begins_ptr is not None:
        kv_begin = tl.load(begins_ptr + unit)
    if WINDOW is not None:
        kv_begin = tl.maximum(kv_end - WINDOW, 0)
    if CHUNK is not None:
        kv_begin = tl.maximum(kv_end - 1, 0) // CHUNK * CHUNK
    # Positions past the end ask for the last one again.
    position = tl.minimum(kv_begin + tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.maximum(kv_end - 1, 0))
    table_ptr = page_tables_ptr + tl.load(slots_ptr + unit).to(tl.int64) * table_stride
    token = token_index(table_ptr, position, position >= 0, PAGE_SIZE)
    line = tl.minimum(tl.arange(0, LINES_PADDED), LINES - 1) * LINE
    offset = token[:, None] * (KV_HEADS * D) + head_block * (HEADS * D) + line[None, :]
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [(keys_ptr + offset).to(tl.int64)], tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(asm, "=r,l", [(values_ptr + offset).to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def query_lanes(
    members_ptr, unit, head_block, H: tl.constexpr, UNIT_HEADS: tl.constexpr, MEMBERS: tl.constexpr,
    M: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Indexes [M] of a unit's queries in [rows x H] for a block of heads, and which of them there are."""
    m = tl.arange(0, M)
    if members_ptr is None:
        row = unit + m * 0
        is_query = m < UNIT_HEADS
    else:
        member = m // UNIT_HEADS
        row = tl.load(members_ptr + unit * MEMBERS + member, mask=member < MEMBERS, other=-1, cache_modifier=CACHE)
        is_query = row >= 0
    return row * H + head_block * UNIT_HEADS + m % UNIT_HEADS, is_query
