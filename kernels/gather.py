"""What changes place between steps on the device: last tokens by slot, lengths, page lists. All can be captured.

T rows, S slots (the last one the dummy of padding rows), L tokens of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 256
_PAGES = 256


@triton.jit(do_not_specialize=["T"])
def _gather_kernel(
    tokens_ptr, lens_ptr, row_slots_ptr, ids_ptr, positions_ptr, kv_lens_ptr, T, stride, dummy, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < T
    slots = tl.load(row_slots_ptr + rows, mask=mask, other=0).to(tl.int64)
    # The dummy slot has one token of KV: attention over none would be undefined.
    lens = tl.where(slots == dummy, 1, tl.load(lens_ptr + slots, mask=mask, other=1))
    positions = tl.maximum(lens - 1, 0)
    ids = tl.load(tokens_ptr + slots * stride + positions, mask=mask, other=0)
    tl.store(ids_ptr + rows, tl.where(slots == dummy, 0, ids), mask=mask)
    tl.store(positions_ptr + rows, positions, mask=mask)
    tl.store(kv_lens_ptr + rows, positions + 1, mask=mask)


@triton.jit(do_not_specialize=["T"])
def _scatter_kernel(drawn_ptr, tokens_ptr, lens_ptr, row_slots_ptr, T, stride, L, dummy, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(row_slots_ptr + rows, mask=rows < T, other=dummy).to(tl.int64)
    mask = slots != dummy
    lens = tl.load(lens_ptr + slots, mask=mask, other=0)
    # A slot that is full stays as it is: its request is over, though its step was under way.
    mask = mask & (lens < L)
    drawn = tl.load(drawn_ptr + rows, mask=mask, other=0)
    tl.store(tokens_ptr + slots * stride + lens, drawn, mask=mask)
    tl.store(lens_ptr + slots, lens + 1, mask=mask)


@triton.jit(do_not_specialize=["T"])
def _indptr_kernel(kv_lens_ptr, indptr_ptr, last_lens_ptr, T, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    tl.store(indptr_ptr, total)
    while start < T:
        rows = start + tl.arange(0, BLOCK)
        mask = rows < T
        lens = tl.load(kv_lens_ptr + rows, mask=mask, other=0)
        num_pages = (lens + PAGE_SIZE - 1) // PAGE_SIZE
        tl.store(indptr_ptr + 1 + rows, total + tl.cumsum(num_pages, axis=0), mask=mask)
        tl.store(last_lens_ptr + rows, lens - (num_pages - 1) * PAGE_SIZE, mask=mask & (lens > 0))
        tl.store(last_lens_ptr + rows, tl.zeros_like(lens), mask=mask & (lens <= 0))
        total += tl.sum(num_pages, axis=0)
        start += BLOCK


@triton.jit
def _pages_kernel(tables_ptr, row_slots_ptr, indptr_ptr, indices_ptr, table_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(indptr_ptr + row)
    mask = at < tl.load(indptr_ptr + row + 1) - first
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    tl.store(indices_ptr + first + at, tl.load(tables_ptr + slot * table_stride + at, mask=mask, other=0), mask=mask)


def gather_last(
    tokens_SL: torch.Tensor,
    total_lens_S: torch.Tensor,
    row_slots_T: torch.Tensor,
    ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
) -> None:
    """Writes each row's last token, its position (total_len - 1) and the KV length of its attention (total_len).

    All int32; the last slot of `tokens` is the dummy: its rows get token 0, position 0 and KV length 1.
    """
    num_rows = _check_rows(tokens_SL, total_lens_S, row_slots_T, ids_T, positions_T, kv_lens_T)
    if num_rows:
        _gather_kernel[(triton.cdiv(num_rows, _ROWS),)](
            tokens_SL, total_lens_S, row_slots_T, ids_T, positions_T, kv_lens_T, num_rows, tokens_SL.stride(0),
            len(tokens_SL) - 1, BLOCK=_ROWS,
        )  # fmt: skip


def scatter_last(
    drawn_T: torch.Tensor, tokens_SL: torch.Tensor, total_lens_S: torch.Tensor, row_slots_T: torch.Tensor
) -> None:
    """Appends each row's token to its slot: tokens[slot, total_len] = drawn, total_len += 1; all int32.

    Rows of the dummy slot (the last), and slots with L tokens, are left alone. No slot may be in two rows.
    """
    num_rows = _check_rows(tokens_SL, total_lens_S, row_slots_T, drawn_T)
    if num_rows:
        _scatter_kernel[(triton.cdiv(num_rows, _ROWS),)](
            drawn_T, tokens_SL, total_lens_S, row_slots_T, num_rows, tokens_SL.stride(0), tokens_SL.shape[1],
            len(tokens_SL) - 1, BLOCK=_ROWS,
        )  # fmt: skip


def page_lists(
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_lens_T: torch.Tensor,
) -> None:
    """The rows' page tables back to back (as FlashInfer takes them), from lengths on the device; all int32.

    Row t's pages are indices[indptr[t] : indptr[t + 1]] of its first kv_lens[t] tokens; last_lens[t] tokens are in the
    last (0 of an empty row). indptr [T + 1]; indices has room for the pages of all rows together.
    """
    num_rows = len(row_slots_T)
    assert indptr.shape == (num_rows + 1,) and last_lens_T.shape == kv_lens_T.shape == (num_rows,), indptr.shape
    for array in (page_tables, row_slots_T, kv_lens_T, indptr, indices, last_lens_T):
        assert array.dtype == torch.int32, array.dtype
    _indptr_kernel[(1,)](kv_lens_T, indptr, last_lens_T, num_rows, PAGE_SIZE=page_size, BLOCK=_ROWS)
    if num_rows:
        _pages_kernel[(triton.cdiv(page_tables.shape[1], _PAGES), num_rows)](
            page_tables, row_slots_T, indptr, indices, page_tables.stride(0), BLOCK=_PAGES
        )


def page_lists_reference(
    page_tables: torch.Tensor, row_slots_T: torch.Tensor, kv_lens_T: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, indices and last_lens of `page_lists`, in torch."""
    num_pages_T = (kv_lens_T + page_size - 1) // page_size
    indptr = torch.cat((num_pages_T.new_zeros(1), num_pages_T.cumsum(0))).to(torch.int32)
    rows = [page_tables[slot, :n] for slot, n in zip(row_slots_T.tolist(), num_pages_T.tolist(), strict=True)]
    last_lens_T = torch.where(kv_lens_T > 0, kv_lens_T - (num_pages_T - 1) * page_size, 0)
    return indptr, torch.cat(rows), last_lens_T.to(torch.int32)


def _check_rows(
    tokens_SL: torch.Tensor, total_lens_S: torch.Tensor, row_slots_T: torch.Tensor, *rows: torch.Tensor
) -> int:
    assert tokens_SL.dtype == total_lens_S.dtype == row_slots_T.dtype == torch.int32
    assert total_lens_S.shape == tokens_SL.shape[:1] and tokens_SL.stride(1) == 1, (total_lens_S.shape, tokens_SL.shape)
    for array in rows:
        assert array.dtype == torch.int32 and array.shape == row_slots_T.shape, (array.dtype, array.shape)
    return len(row_slots_T)
