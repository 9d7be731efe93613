"""Drafted tokens on the device: from a row to the positions that verify its drafts, and from the tokens sampled there
to the row's new length.

A row of length l computes 1 + n positions: its last token at l - 1, then n drafts. What is sampled behind each of them
is what a decode would sample there if the drafts before it are right, so a row yields the tokens up to and with the
first one that its draft did not foresee.

    position     l - 1     l          l + 1        ...
    computes     last      draft 0    draft 1            the first n of the window that continue the row
    samples      t0        t1         t2                 t0 == draft 0: t1 counts; t1 == draft 1: t2 counts; ...

The host knows lengths late. It sends a window of drafts with the position at which it starts; the device takes those at
its own positions. A step has as many positions for each row, or for each its own number, one row's behind the other's.

B rows, P the most positions of a row (1 + the most drafts), T those of all rows (B * P where each has as many), W
window of drafts, S slots, L tokens of a slot, E entries of page tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_ENTRIES = 128  # Entries that a program writes at a time.


class DraftInputs(NamedTuple):
    """Inputs of a step as the host sends them, int32 on the device.

    slots, max_lens [B]: slot, and the total length that its pages and its request allow; a row that has reached it
    yields nothing. tokens, lengths [B]: last token and length of a slot that was just taken, -1: as on the device.
    starts, counts [B]: position of the first draft of the window, and number of drafts. window_WB [W, >= B]. Before a
    drafter on the device ran: starts < 0, and the most drafts of the row.
    The first num_entries_1 of entries_E2 (index, page) are written to the flat page tables. parents_WB: as window_WB,
    where a step verifies trees, of each draft the position that it follows (`draft_trees.py`); None: chains.
    firsts [B]: of each row the first of its positions, ascending from 0; the next row's follow, or the end of all: at
    most P, of a row of padding maybe none. None: each row has P.
    """

    slots: torch.Tensor
    max_lens: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    window_WB: torch.Tensor
    entries_E2: torch.Tensor
    num_entries_1: torch.Tensor
    parents_WB: torch.Tensor | None = None
    firsts: torch.Tensor | None = None


class SlotLengths(NamedTuple):
    """State by slot, int32: last_tokens, lengths [S], page_tables [S, pages], tokens_SL (prompt and output, which
    penalties count and drafters read). The last slot is the dummy of padding."""

    last_tokens: torch.Tensor
    lengths: torch.Tensor
    page_tables: torch.Tensor
    tokens_SL: torch.Tensor


class DraftRows(NamedTuple):
    """The positions of a step, int32 [T] each, row after row: token, position, slot, KV length with its own token.
    Those that a row does not use are the dummy slot's, with KV length 0. num_drafts [B]; -1: the row has no room.

    The same as chunks, two a row: those that it uses, and those that it does not, with KV length 0. chunk_slots,
    chunk_kv_lens [2 B], chunk_row_starts [2 B + 1].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    num_drafts: torch.Tensor
    chunk_slots: torch.Tensor
    chunk_row_starts: torch.Tensor
    chunk_kv_lens: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, num_positions: int, device: torch.device) -> DraftRows:
        """For up to `max_rows` rows."""
        sizes = [max_rows * num_positions] * 4 + [max_rows, 2 * max_rows, 2 * max_rows + 1, 2 * max_rows]
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    def of(self, num_rows: int, size: int | None = None) -> DraftRows:
        """Those of the first rows: the same memory. size: positions of all of them; None: each has as many."""
        if size is None:
            size = num_rows * (len(self.tokens) // len(self.num_drafts))
        return DraftRows(
            self.tokens[:size],
            self.positions[:size],
            self.slots[:size],
            self.kv_lens[:size],
            self.num_drafts[:num_rows],
            self.chunk_slots[: 2 * num_rows],
            self.chunk_row_starts[: 2 * num_rows + 1],
            self.chunk_kv_lens[: 2 * num_rows],
        )


@triton.jit
def _positions_of(firsts_ptr, row, T, P: tl.constexpr):
    """The first of a row's positions, and how many there are."""
    first = row * P
    size = row * 0 + P
    if firsts_ptr is not None:
        first = tl.load(firsts_ptr + row)
        is_last = row == tl.num_programs(0) - 1
        end = tl.load(firsts_ptr + row + 1, mask=row < tl.num_programs(0) - 1, other=0)
        size = tl.minimum(tl.where(is_last, T, end) - first, P)
    return first, size


@triton.jit(do_not_specialize=["dummy_slot", "window_stride", "slot_tokens_stride", "T"])
def _expand_kernel(
    slots_ptr, max_lens_ptr, tokens_ptr, lengths_ptr, starts_ptr, counts_ptr, window_ptr, entries_ptr, num_entries_ptr,
    last_tokens_ptr, slot_lengths_ptr, page_tables_ptr, slot_tokens_ptr, row_tokens_ptr, positions_ptr, row_slots_ptr,
    kv_lens_ptr, num_drafts_ptr, chunk_slots_ptr, chunk_row_starts_ptr, chunk_kv_lens_ptr, firsts_ptr, dummy_slot,
    window_stride, slot_tokens_stride, T, P: tl.constexpr, BLOCK_P: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_entries = tl.load(num_entries_ptr)
    first = row * ENTRIES
    while first < num_entries:
        entry = first + tl.arange(0, ENTRIES)
        is_entry = entry < num_entries
        index = tl.load(entries_ptr + 2 * entry, mask=is_entry, other=0)
        page = tl.load(entries_ptr + 2 * entry + 1, mask=is_entry, other=0)
        tl.store(page_tables_ptr + index, page, mask=is_entry)
        first += tl.num_programs(0) * ENTRIES
    slot = tl.load(slots_ptr + row).to(tl.int64)
    last = tl.load(tokens_ptr + row)
    length = tl.load(lengths_ptr + row)
    # Rows with something sent have slots of their own: no other program reads what is written here.
    if length >= 0:
        tl.store(last_tokens_ptr + slot, last)
        tl.store(slot_lengths_ptr + slot, length)
    else:
        last = tl.load(last_tokens_ptr + slot)
        length = tl.load(slot_lengths_ptr + slot)
    room = tl.load(max_lens_ptr + row) - length
    row_first, size = _positions_of(firsts_ptr, row, T, P)
    skipped = length - tl.load(starts_ptr + row)
    left = tl.where(skipped >= 0, tl.load(counts_ptr + row) - skipped, 0)
    num_drafts = tl.maximum(tl.minimum(tl.minimum(left, room - 1), size - 1), 0)
    number = tl.arange(0, BLOCK_P)
    is_draft = (number > 0) & (number <= num_drafts)
    draft = tl.load(window_ptr + (skipped + number - 1) * window_stride + row, mask=is_draft, other=0)
    is_used = (number <= num_drafts) & (room > 0)
    position = length - 1 + number
    at = row_first + number
    is_row = number < size
    tl.store(row_tokens_ptr + at, tl.where(is_used, tl.where(number == 0, last, draft), 0), mask=is_row)
    tl.store(positions_ptr + at, tl.where(is_used, position, 0), mask=is_row)
    tl.store(row_slots_ptr + at, tl.where(is_used, slot.to(tl.int32), dummy_slot), mask=is_row)
    tl.store(kv_lens_ptr + at, tl.where(is_used, position + 1, 0), mask=is_row)
    tl.store(num_drafts_ptr + row, tl.where(room > 0, num_drafts, -1))
    # The token that a prompt's last chunk sampled is the slot's last one, and not among its tokens yet.
    tl.store(slot_tokens_ptr + slot * slot_tokens_stride + length - 1, last, mask=(room > 0) & (length > 0))
    num_used = tl.where(room > 0, num_drafts + 1, 0)
    tl.store(chunk_slots_ptr + 2 * row, tl.where(room > 0, slot.to(tl.int32), dummy_slot))
    tl.store(chunk_slots_ptr + 2 * row + 1, dummy_slot)
    tl.store(chunk_row_starts_ptr + 2 * row, row_first)
    tl.store(chunk_row_starts_ptr + 2 * row + 1, row_first + num_used)
    if row == tl.num_programs(0) - 1:
        tl.store(chunk_row_starts_ptr + 2 * row + 2, row_first + size)
    tl.store(chunk_kv_lens_ptr + 2 * row, tl.where(room > 0, length + num_drafts, 0))
    tl.store(chunk_kv_lens_ptr + 2 * row + 1, 0)
    # Penalties of a position count the drafts before it.
    tl.store(slot_tokens_ptr + slot * slot_tokens_stride + position, draft, mask=is_draft & is_used)


def expand_drafts(inputs: DraftInputs, state: SlotLengths, rows: DraftRows, num_positions: int | None = None) -> None:
    """Fills `rows` from the inputs and the slots' state, and brings what was sent into that. num_positions: the most of
    a row, where the inputs have firsts. Can be captured."""
    num_rows, num_positions = _check(inputs, state, rows, num_positions)
    _expand_kernel[(num_rows,)](
        inputs.slots, inputs.max_lens, inputs.tokens, inputs.lengths, inputs.starts, inputs.counts, inputs.window_WB,
        inputs.entries_E2, inputs.num_entries_1, state.last_tokens, state.lengths, state.page_tables, state.tokens_SL,
        *rows, inputs.firsts, len(state.lengths) - 1, inputs.window_WB.stride(0), state.tokens_SL.stride(0),
        len(rows.tokens), P=num_positions, BLOCK_P=triton.next_power_of_2(num_positions), ENTRIES=_ENTRIES,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def parents_of(parents_ptr, stride, row, number, mask):
    """The positions that positions of a row follow; -1: none, or outside of the mask. A row whose first draft follows
    -1 has a chain."""
    is_draft = mask & (number > 0)
    parent = tl.load(parents_ptr + (number - 1) * stride + row, mask=is_draft, other=-1)
    return tl.where(is_draft, tl.where(tl.load(parents_ptr + row) < 0, number - 1, parent), -1)


@triton.jit(do_not_specialize=["slot_tokens_stride", "ring_stride", "num_rows", "parents_stride", "T"])
def _accept_kernel(
    sampled_ptr, row_tokens_ptr, num_drafts_ptr, slots_ptr, last_tokens_ptr, slot_lengths_ptr, slot_tokens_ptr,
    ring_ptr, ring_index_ptr, taken_ptr, parents_ptr, paths_ptr, waits_ptr, firsts_ptr, slot_tokens_stride, ring_stride,
    num_rows, parents_stride, T, HAS_MASKS: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + row)
    number = tl.arange(0, BLOCK_P)
    row_first, size = _positions_of(firsts_ptr, row, T, P)
    is_row = number < size
    sampled = tl.load(sampled_ptr + row_first + number, mask=is_row, other=-1)
    has_draft = number < num_drafts
    draft = tl.load(row_tokens_ptr + row_first + number + 1, mask=has_draft, other=-1)
    is_late = number >= size
    if HAS_MASKS:
        is_late = tl.load(taken_ptr + row_first + number, mask=is_row, other=-2) == -2
    ring_ptr += tl.load(ring_index_ptr).to(tl.int64) * ring_stride
    if parents_ptr is not None:
        # From the last token on, the draft that follows and is what was sampled there: siblings differ.
        is_draft = (number > 0) & (number <= num_drafts)
        own = tl.load(row_tokens_ptr + row_first + number, mask=is_draft, other=-1)
        parent = parents_of(parents_ptr, parents_stride, row, number, is_draft)
        path = number
        last_number = tl.min(tl.where(is_late, number, BLOCK_P), axis=0) - 1
        last_number = tl.where(last_number < 0, -1, 0)
        at = last_number
        while at >= 0:
            wanted = tl.sum(tl.where(number == at, sampled, 0), axis=0)
            is_next = is_draft & (parent == at) & (own == wanted) & ~is_late
            following = tl.min(tl.where(is_next, number, BLOCK_P), axis=0)
            at = tl.where(following < BLOCK_P, following, -1)
            last_number += (at >= 0).to(tl.int32)
            path = tl.where((number == last_number) & (at >= 0), at, path)
        tl.store(paths_ptr + row_first + number, path, mask=is_row)
        tl.store(ring_ptr + T + 2 * num_rows + row_first + number, path, mask=is_row)
        sampled = tl.load(sampled_ptr + row_first + path, mask=is_row, other=-1)
    else:
        # The number of the first token that no right draft follows: it is the last one of the row.
        last_number = tl.min(tl.where(has_draft & (draft == sampled), BLOCK_P, number), axis=0)
        last_number = tl.minimum(last_number, tl.min(tl.where(is_late, number, BLOCK_P), axis=0) - 1)
    count = tl.where(num_drafts >= 0, last_number + 1, 0)
    if waits_ptr is not None:
        count = tl.where(tl.load(waits_ptr + row) != 0, 0, count)
    tl.store(ring_ptr + row_first + number, sampled, mask=is_row)
    tl.store(ring_ptr + T + row, count)
    tl.store(ring_ptr + T + num_rows + row, tl.maximum(num_drafts, 0))
    if count > 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        tl.store(last_tokens_ptr + slot, tl.sum(tl.where(number == last_number, sampled, 0), axis=0))
        length = tl.load(slot_lengths_ptr + slot)
        # Drafters look up what the row has by now.
        tl.store(slot_tokens_ptr + slot * slot_tokens_stride + length + number, sampled, mask=number < count)
        tl.store(slot_lengths_ptr + slot, length + count)


def accept_drafts(
    sampled_T: torch.Tensor,
    slots_B: torch.Tensor,
    rows: DraftRows,
    state: SlotLengths,
    ring_RN: torch.Tensor,
    ring_index_1: torch.Tensor,
    taken_T: torch.Tensor | None = None,
    parents_WB: torch.Tensor | None = None,
    paths_BP: torch.Tensor | None = None,
    waits_B: torch.Tensor | None = None,
    firsts_B: torch.Tensor | None = None,
    num_positions: int | None = None,
) -> None:
    """Advances the slots by what their rows yield, from the tokens int32 [T] sampled at the positions of `rows`.
    taken_T: masks of the positions, of which a row yields nothing from the first one on that is LATE.

    ring_RN[ring_index_1[0]], int32: gets the T sampled tokens, then the count of each row, 0 where it had no room, then
    the number of drafts that each row computed.

    parents_WB: of trees, as of the inputs. Then the tokens are those of the accepted positions, in order, as many as
    the row's count says, and these positions are in paths_BP int32, which also follows the rest in the ring; n is at n
    where nothing was accepted.

    waits_B int32: rows with another number than 0 are sampled again behind this call, and advance by a later one.
    firsts_B, num_positions: as of expand_drafts(). Can be captured.
    """
    num_rows = len(slots_B)
    assert (firsts_B is None) == (num_positions is None) and (firsts_B is None or parents_WB is None)
    if num_positions is None:
        num_positions = len(sampled_T) // num_rows
    assert sampled_T.dtype == slots_B.dtype == ring_RN.dtype == torch.int32 and sampled_T.is_contiguous()
    assert ring_RN.stride(1) == 1 and len(sampled_T) + 2 * num_rows <= ring_RN.shape[1], ring_RN.shape
    assert (parents_WB is None) == (paths_BP is None)
    if paths_BP is not None:
        assert paths_BP.is_contiguous() and 2 * (len(sampled_T) + num_rows) <= ring_RN.shape[1], ring_RN.shape
    _accept_kernel[(num_rows,)](
        sampled_T, rows.tokens, rows.num_drafts, slots_B, state.last_tokens, state.lengths, state.tokens_SL, ring_RN,
        ring_index_1, sampled_T if taken_T is None else taken_T, parents_WB, paths_BP, waits_B, firsts_B,
        state.tokens_SL.stride(0), ring_RN.stride(0), num_rows, 0 if parents_WB is None else parents_WB.stride(0),
        len(sampled_T), HAS_MASKS=taken_T is not None, P=num_positions, BLOCK_P=triton.next_power_of_2(num_positions),
        num_warps=1,
    )  # fmt: skip


def _check(inputs: DraftInputs, state: SlotLengths, rows: DraftRows, num_positions: int | None) -> tuple[int, int]:
    num_rows = len(inputs.slots)
    assert (inputs.firsts is None) == (num_positions is None), num_positions
    if num_positions is None or inputs.firsts is None:
        num_positions = len(rows.tokens) // num_rows
        assert len(rows.tokens) == num_rows * num_positions, rows.tokens.shape
    else:
        assert inputs.firsts.shape == (num_rows,) and inputs.firsts.is_contiguous(), inputs.firsts.shape
        assert len(rows.tokens) <= num_rows * num_positions, rows.tokens.shape
    for numbers in (*inputs, *state, *rows):
        assert numbers is None or numbers.dtype == torch.int32, numbers.dtype
    for column in (inputs.slots, inputs.max_lens, inputs.tokens, inputs.lengths, inputs.starts, inputs.counts):
        assert column.shape == (num_rows,) and column.is_contiguous(), column.shape
    assert inputs.window_WB.stride(1) == 1 and inputs.window_WB.shape[1] >= num_rows, inputs.window_WB.shape
    assert state.page_tables.is_contiguous() and state.tokens_SL.stride(1) == 1
    assert rows.num_drafts.shape == (num_rows,), rows.num_drafts.shape
    return num_rows, num_positions
