"""Rows of a network that drafts, on the device: what it lacks of each sequence, then one row a draft.

    target's positions      0     1     2     ...    l - 2   l - 1  |  l ...          l: length of the sequence
    network's               -     0     1            l - 3   l - 2  |  l - 1          FIRST = 1: it is fed features
    KV is fresh             ......................                                    up to the slot's fresh length
    rows of a step                                   follow_rows: to the last token   then chain_rows: a draft each

The KV of a position lies in the network's pool at the token whose number the target's KV of that position has. A token
is fresh while the network's KV there was computed from what the target has there: the target's writes make it stale,
the network's make it fresh. The network's positions count from FIRST, so it reads its pool by token, through tables of
its own. B rows, C columns of a row, T rows of a forward, S slots, L tokens of a slot, N tokens of the pool, W drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths
from radixmesh.kernels.sampling.network_rows import ChainRows, FreshTokens, NetworkRows, NetworkShape

_BLOCK = 1024
_ENTRIES = 128
_INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _token_of(page_tables_ptr, stride, slot, positions, mask, PAGE: tl.constexpr):
    """int64: numbers of the pool's tokens at positions of a slot."""
    page = tl.load(page_tables_ptr + slot * stride + positions // PAGE, mask=mask, other=0)
    return page.to(tl.int64) * PAGE + positions % PAGE


@triton.jit
def _fresh_end(
    fresh_ptr, page_tables_ptr, stride, slot, start, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first position in [start, stop) that is not fresh; stop if there is none."""
    end = start
    is_going = 1
    while (end < stop) & (is_going == 1):
        position = end + tl.arange(0, BLOCK)
        is_in = position < stop
        token = _token_of(page_tables_ptr, stride, slot, position, is_in, PAGE)
        is_fresh = tl.load(fresh_ptr + token, mask=is_in, other=0)
        stale = tl.min(tl.where(is_fresh != 0, _INT_MAX, position), axis=0)
        is_going = (stale == _INT_MAX).to(tl.int32)
        end = tl.where(stale == _INT_MAX, end + BLOCK, tl.minimum(stale, stop))
    return end


@triton.jit
def _extend_table(
    tables_ptr, tables_stride, tabled_lens_ptr, page_tables_ptr, stride, slot, stop, FIRST: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the slot's table up to the target's position `stop`."""
    at = tl.maximum(tl.load(tabled_lens_ptr + slot), FIRST)
    if at < stop:
        tl.store(tabled_lens_ptr + slot, stop)
    while at < stop:
        position = at + tl.arange(0, BLOCK)
        is_in = position < stop
        token = _token_of(page_tables_ptr, stride, slot, position, is_in, PAGE)
        tl.store(tables_ptr + slot * tables_stride + position - FIRST, token.to(tl.int32), mask=is_in)
        at += BLOCK


@triton.jit
def _entries_kernel(entries_ptr, num_entries_ptr, page_tables_ptr, ENTRIES: tl.constexpr):
    num_entries = tl.load(num_entries_ptr)
    first = tl.program_id(0) * ENTRIES
    while first < num_entries:
        entry = first + tl.arange(0, ENTRIES)
        is_entry = entry < num_entries
        index = tl.load(entries_ptr + 2 * entry, mask=is_entry, other=0)
        page = tl.load(entries_ptr + 2 * entry + 1, mask=is_entry, other=0)
        tl.store(page_tables_ptr + index, page, mask=is_entry)
        first += tl.num_programs(0) * ENTRIES


def write_entries(inputs: DraftInputs, state: SlotLengths) -> None:
    """Brings the page table entries that were sent with a step to the tables. Can be captured."""
    assert state.page_tables.is_contiguous()
    _entries_kernel[(len(inputs.slots),)](
        inputs.entries_E2, inputs.num_entries_1, state.page_tables, ENTRIES=_ENTRIES, num_warps=1
    )


@triton.jit(do_not_specialize=["dummy_slot", "zero_token", "max_total_len", "slot_tokens_stride", "tables_stride"])
def _follow_kernel(
    slots_ptr, max_lens_ptr, tokens_ptr, lengths_ptr, starts_ptr, counts_ptr, last_tokens_ptr, slot_lengths_ptr,
    page_tables_ptr, slot_tokens_ptr, fresh_ptr, fresh_lens_ptr, tabled_lens_ptr, tables_ptr, row_tokens_ptr,
    positions_ptr, row_slots_ptr, kv_lens_ptr, features_ptr, chunk_slots_ptr, chunk_row_starts_ptr, chunk_kv_lens_ptr,
    last_rows_ptr, num_drafts_ptr, sample_slots_ptr, sample_positions_ptr, dummy_slot, zero_token, max_total_len,
    page_stride, slot_tokens_stride, tables_stride, W, C: tl.constexpr, BLOCK_C: tl.constexpr, FIRST: tl.constexpr,
    PAGE: tl.constexpr, HAS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    last = tl.load(tokens_ptr + row)
    length = tl.load(lengths_ptr + row)
    if length < 0:
        last = tl.load(last_tokens_ptr + slot)
        length = tl.load(slot_lengths_ptr + slot)
    max_len = tl.load(max_lens_ptr + row)
    # Without the last token: its page may not be in the tables yet.
    end = length
    if not HAS_LAST:
        end = length - 1
    is_there = (end > FIRST) & (length <= max_total_len) & (max_len > length) & (slot != dummy_slot)
    end = tl.where(is_there, end, FIRST)
    start = tl.maximum(tl.load(fresh_lens_ptr + slot), FIRST)
    start = _fresh_end(fresh_ptr, page_tables_ptr, page_stride, slot, start, end - 1, PAGE, BLOCK)
    # The last token's row is computed in any case: it gives the first draft.
    latest = end
    if HAS_LAST:
        latest = tl.maximum(end - 1, FIRST)
    start = tl.minimum(start, latest)
    count = tl.maximum(tl.minimum(end - start, C), 0)
    if is_there:
        # Drafts go as far as the row has pages.
        stop = end
        if HAS_LAST:
            stop = tl.minimum(length + W, max_len)
        _extend_table(
            tables_ptr, tables_stride, tabled_lens_ptr, page_tables_ptr, page_stride, slot, stop, FIRST, PAGE, BLOCK
        )
        tl.store(fresh_lens_ptr + slot, start + count)
    number = tl.arange(0, BLOCK_C)
    is_used = number < count
    position = start + number
    is_last = position == length - 1
    token = tl.load(
        slot_tokens_ptr + slot * slot_tokens_stride + position, mask=is_used & (position < length - 1), other=0
    )
    at = row * C + number
    is_row = number < C
    tl.store(row_tokens_ptr + at, tl.where(is_used, tl.where(is_last, last, token), 0), mask=is_row)
    tl.store(positions_ptr + at, tl.where(is_used, position - FIRST, 0), mask=is_row)
    tl.store(row_slots_ptr + at, tl.where(is_used, slot.to(tl.int32), dummy_slot), mask=is_row)
    tl.store(kv_lens_ptr + at, tl.where(is_used, position - FIRST + 1, 0), mask=is_row)
    has_before = is_used & (position > 0)
    before = _token_of(page_tables_ptr, page_stride, slot, position - 1, has_before, PAGE)
    tl.store(features_ptr + at, tl.where(has_before, before, zero_token.to(tl.int64)), mask=is_row)
    own = _token_of(page_tables_ptr, page_stride, slot, position, is_used, PAGE)
    tl.store(fresh_ptr + own, tl.full((BLOCK_C,), 1, tl.int8), mask=is_used)
    tl.store(chunk_slots_ptr + 2 * row, tl.where(count > 0, slot.to(tl.int32), dummy_slot))
    tl.store(chunk_slots_ptr + 2 * row + 1, dummy_slot)
    tl.store(chunk_row_starts_ptr + 2 * row, row * C)
    tl.store(chunk_row_starts_ptr + 2 * row + 1, row * C + count)
    if row == tl.num_programs(0) - 1:
        tl.store(chunk_row_starts_ptr + 2 * row + 2, row * C + C)
    tl.store(chunk_kv_lens_ptr + 2 * row, tl.where(count > 0, start + count - FIRST, 0))
    tl.store(chunk_kv_lens_ptr + 2 * row + 1, 0)
    if HAS_LAST:
        is_reached = is_there & (start + count == length)
        most = tl.minimum(tl.load(counts_ptr + row), W)
        most = tl.minimum(tl.minimum(most, max_len - length - 1), max_total_len - length + 1)
        num_drafts = tl.where(is_reached & (tl.load(starts_ptr + row) < 0), tl.maximum(most, 0), 0)
        tl.store(starts_ptr + row, length)
        tl.store(counts_ptr + row, num_drafts)
        tl.store(num_drafts_ptr + row, num_drafts)
        tl.store(last_rows_ptr + row, row * C + tl.maximum(count - 1, 0))
        tl.store(sample_slots_ptr + row, tl.where(num_drafts > 0, slot.to(tl.int32), dummy_slot))
        tl.store(sample_positions_ptr + row, length)


def follow_rows(
    inputs: DraftInputs,
    state: SlotLengths,
    fresh: FreshTokens,
    shape: NetworkShape,
    rows: NetworkRows,
    chain: ChainRows | None,
) -> None:
    """Fills `rows` with up to T / B tokens of each row that are not fresh, which count as fresh from now on, and with a
    chain, up to the last token, what its first draft needs: `starts` and `counts` of the inputs become position and
    number of the row's drafts, none where tokens are lacking still. Can be captured.

    Without a chain, rows go up to the token before the last one: what comes with a step need not be there.
    """
    num_rows, columns = len(inputs.slots), len(rows.tokens) // len(inputs.slots)
    _check(state, fresh)
    assert len(rows.tokens) == num_rows * columns and len(rows.chunk_slots) == 2 * num_rows
    ints = rows.kv_lens
    of_chain = (ints, ints, ints, ints) if chain is None else chain[:4]
    _follow_kernel[(num_rows,)](
        inputs.slots, inputs.max_lens, inputs.tokens, inputs.lengths, inputs.starts, inputs.counts, state.last_tokens,
        state.lengths, state.page_tables, state.tokens_SL, *fresh, *rows, *of_chain, len(state.lengths) - 1,
        shape.zero_token, shape.max_total_len, state.page_tables.stride(0), state.tokens_SL.stride(0),
        fresh.tables_SL.stride(0), len(inputs.window_WB), C=columns, BLOCK_C=triton.next_power_of_2(columns),
        FIRST=shape.first, PAGE=shape.page_size, HAS_LAST=chain is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["number", "first", "dummy_slot", "window_stride"])
def _chain_kernel(
    sampled_ptr, num_drafts_ptr, starts_ptr, row_slots_ptr, window_ptr, sample_slots_ptr, sample_positions_ptr,
    positions_ptr, slots_ptr, kv_lens_ptr, number, first, dummy_slot, window_stride,
):  # fmt: skip
    row = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + row)
    length = tl.load(starts_ptr + row)
    if number < num_drafts:
        tl.store(window_ptr + number * window_stride + row, tl.load(sampled_ptr + row))
    is_going = number + 1 < num_drafts
    slot = tl.where(is_going, tl.load(row_slots_ptr + row), dummy_slot)
    position = length + number - first
    tl.store(positions_ptr + row, tl.where(is_going, position, 0))
    tl.store(slots_ptr + row, slot)
    tl.store(kv_lens_ptr + row, tl.where(is_going, position + 1, 0))
    tl.store(sample_slots_ptr + row, slot)
    tl.store(sample_positions_ptr + row, length + number + 1)


def chain_rows(
    sampled_B: torch.Tensor, inputs: DraftInputs, number: int, dummy_slot: int, shape: NetworkShape, chain: ChainRows
) -> None:
    """Puts draft `number` of each row, int32, into the window, and the network's next row into `chain`: that of the
    draft, where another one is to follow. Behind follow_rows(). Can be captured."""
    assert sampled_B.dtype == torch.int32 and len(sampled_B) == len(inputs.slots), sampled_B.shape
    _chain_kernel[(len(sampled_B),)](
        sampled_B, chain.num_drafts, inputs.starts, inputs.slots, inputs.window_WB, chain.sample_slots,
        chain.sample_positions, chain.positions, chain.slots, chain.kv_lens, number, shape.first, dummy_slot,
        inputs.window_WB.stride(0), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "page_stride"])
def _written_kernel(
    positions_ptr, slots_ptr, page_tables_ptr, tokens_ptr, fresh_ptr, fresh_lens_ptr, written_ptr, num_rows,
    page_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int64)
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row, mask=is_row, other=0).to(tl.int64)
    else:
        token = _token_of(page_tables_ptr, page_stride, slot, position, is_row, PAGE)
    # Before its fresh length the network has computed from these very tokens.
    is_stale = is_row & (position >= tl.load(fresh_lens_ptr + slot, mask=is_row, other=0))
    tl.store(fresh_ptr + token, tl.full((BLOCK,), 0, tl.int8), mask=is_stale)
    tl.store(written_ptr + row, token, mask=is_row)


def tokens_written(
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    state: SlotLengths,
    fresh: FreshTokens,
    page_size: int,
    tokens_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Numbers of the pool's tokens that a step of decodes writes, int64 [T], which are stale from now on. Can be
    captured. tokens_T: those numbers, int32, where positions do not tell."""
    _check(state, fresh)
    # Not empty(): where kernels are only compiled, copies by these numbers run all the same.
    written_T = torch.zeros(len(positions_T), dtype=torch.int64, device=positions_T.device)
    _written_kernel[(triton.cdiv(len(positions_T), 128),)](
        positions_T, slots_T, state.page_tables, tokens_T, fresh.is_fresh_N, fresh.fresh_lens_S, written_T,
        len(positions_T), state.page_tables.stride(0), PAGE=page_size, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return written_T


@triton.jit(do_not_specialize=["dummy_slot", "zero_token", "max_total_len", "page_stride", "tables_stride"])
def _follow_chunks_kernel(
    of_slots_ptr, of_starts_ptr, of_kv_lens_ptr, row_positions_ptr, page_tables_ptr, fresh_ptr, fresh_lens_ptr,
    tabled_lens_ptr, tables_ptr, positions_ptr, row_slots_ptr, kv_lens_ptr, features_ptr, chunk_slots_ptr,
    chunk_row_starts_ptr, chunk_kv_lens_ptr, written_ptr, dummy_slot, zero_token, max_total_len, page_stride,
    tables_stride, FIRST: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    slot = tl.load(of_slots_ptr + chunk).to(tl.int64)
    row_start = tl.load(of_starts_ptr + chunk)
    row_end = tl.load(of_starts_ptr + chunk + 1)
    end = tl.load(of_kv_lens_ptr + chunk)
    num_rows = row_end - row_start
    start = end - num_rows
    is_chunk = (end > 0) & (slot != dummy_slot)
    known = tl.minimum(tl.load(fresh_lens_ptr + slot), start)
    before = tl.maximum(known, FIRST)
    stop = tl.where(is_chunk, start, 0)
    before = tl.minimum(_fresh_end(fresh_ptr, page_tables_ptr, page_stride, slot, before, stop, PAGE, BLOCK), start)
    is_computed = is_chunk & (before == start) & (end <= max_total_len)
    if is_chunk:
        _extend_table(
            tables_ptr, tables_stride, tabled_lens_ptr, page_tables_ptr, page_stride, slot, end, FIRST, PAGE, BLOCK
        )
        tl.store(fresh_lens_ptr + slot, tl.where(is_computed, end, before))
    skipped = tl.where(is_computed, tl.minimum(tl.maximum(FIRST - start, 0), num_rows), num_rows)
    tl.store(chunk_slots_ptr + 2 * chunk, dummy_slot)
    tl.store(chunk_slots_ptr + 2 * chunk + 1, tl.where(skipped < num_rows, slot.to(tl.int32), dummy_slot))
    tl.store(chunk_row_starts_ptr + 2 * chunk, row_start)
    tl.store(chunk_row_starts_ptr + 2 * chunk + 1, row_start + skipped)
    if chunk == tl.num_programs(0) - 1:
        tl.store(chunk_row_starts_ptr + 2 * chunk + 2, row_end)
    tl.store(chunk_kv_lens_ptr + 2 * chunk, 0)
    tl.store(chunk_kv_lens_ptr + 2 * chunk + 1, tl.where(skipped < num_rows, end - FIRST, 0))
    at = row_start
    while at < row_end:
        row = at + tl.arange(0, BLOCK)
        is_row = row < row_end
        position = tl.load(row_positions_ptr + row, mask=is_row, other=0)
        is_used = is_row & (row >= row_start + skipped)
        own = _token_of(page_tables_ptr, page_stride, slot, position, is_row, PAGE)
        tl.store(written_ptr + row, own, mask=is_row)
        tl.store(fresh_ptr + own, tl.where(is_used, 1, 0).to(tl.int8), mask=is_row & is_chunk)
        has_before = is_used & (position > 0)
        of_before = _token_of(page_tables_ptr, page_stride, slot, position - 1, has_before, PAGE)
        tl.store(features_ptr + row, tl.where(has_before, of_before, zero_token.to(tl.int64)), mask=is_row)
        tl.store(positions_ptr + row, tl.where(is_used, position - FIRST, 0), mask=is_row)
        tl.store(row_slots_ptr + row, tl.where(is_used, slot.to(tl.int32), dummy_slot), mask=is_row)
        tl.store(kv_lens_ptr + row, tl.where(is_used, position - FIRST + 1, 0), mask=is_row)
        at += BLOCK


def follow_chunks(
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions_T: torch.Tensor,
    page_tables: torch.Tensor,
    fresh: FreshTokens,
    shape: NetworkShape,
    rows: NetworkRows,
) -> torch.Tensor:
    """Fills `rows`, all but the tokens, with the rows of a step's chunks, where all before them is fresh: those count
    as fresh from now on, all others as stale. Returns numbers of the pool's tokens that the target wrote, int64 [T].
    Can be captured.

    chunks: slots [C], row_starts [C + 1] and KV lengths [C] as of `DeviceStep`, which have all rows of the step.
    """
    slots_C, starts_C, kv_lens_C = chunks
    assert len(starts_C) == len(slots_C) + 1 and len(rows.chunk_slots) == 2 * len(slots_C), rows.chunk_slots.shape
    assert len(rows.positions) == len(positions_T)
    written_T = torch.zeros(len(positions_T), dtype=torch.int64, device=positions_T.device)
    _follow_chunks_kernel[(len(slots_C),)](
        slots_C, starts_C, kv_lens_C, positions_T, page_tables, *fresh, *rows[1:], written_T,
        len(fresh.fresh_lens_S) - 1, shape.zero_token, shape.max_total_len, page_tables.stride(0),
        fresh.tables_SL.stride(0), FIRST=shape.first, PAGE=shape.page_size, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return written_T


def _check(state: SlotLengths, fresh: FreshTokens) -> None:
    assert fresh.is_fresh_N.dtype == torch.int8 and fresh.is_fresh_N.is_contiguous()
    for numbers in (*state, *fresh[1:]):
        assert numbers.dtype == torch.int32, numbers.dtype
    assert state.page_tables.stride(1) == fresh.tables_SL.stride(1) == state.tokens_SL.stride(1) == 1
    assert len(fresh.fresh_lens_S) == len(fresh.tables_SL) == len(state.lengths), fresh.tables_SL.shape
