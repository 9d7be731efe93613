"""Scatter and embed, the beginning of a decode step: writes what the host sent, looks up the rows' embeddings.

T rows, D hidden size, V vocabulary, S slots, E entries of page tables that change.

The token of a row is the one that the host sent (its slot was just taken), else the last token of its slot. Programs
of one launch see each other's writes at no certain time: a row looks at what was sent for itself before it looks at its
slot, and entries of page tables are read by later kernels only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

_ENTRIES = 128  # Entries that a program writes at a time.
_FEATURES = 1024


@triton.jit
def _scatter_embed_kernel(
    slots_ptr, tokens_ptr, entries_ptr, num_entries_ptr, page_tables_ptr, last_tokens_ptr, embedding_ptr, x_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    sent = tl.load(tokens_ptr + row)
    num_entries = tl.load(num_entries_ptr)
    first = (tl.program_id(1) * tl.num_programs(0) + part) * ENTRIES
    while first < num_entries:
        entry = first + tl.arange(0, ENTRIES)
        is_entry = entry < num_entries
        index = tl.load(entries_ptr + 2 * entry, mask=is_entry, other=0)
        page = tl.load(entries_ptr + 2 * entry + 1, mask=is_entry, other=0)
        tl.store(page_tables_ptr + index, page, mask=is_entry)
        first += tl.num_programs(0) * tl.num_programs(1) * ENTRIES
    if sent < 0:
        token = tl.load(last_tokens_ptr + slot)
    else:
        token = sent
        if part == 0:
            tl.store(last_tokens_ptr + slot, sent)
    features = part * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = features < D
    x = tl.load(embedding_ptr + token.to(tl.int64) * D + features, mask=mask, other=0.0)
    tl.store(x_ptr + row * D + features, x, mask=mask)


def scatter_embed(
    slots_T: torch.Tensor,
    tokens_T: torch.Tensor,
    entries_E2: torch.Tensor,
    num_entries_1: torch.Tensor,
    page_tables: torch.Tensor,
    last_tokens_S: torch.Tensor,
    embedding_VD: torch.Tensor,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """The embeddings [T, D] of the rows' tokens, T > 0. Can be captured in a graph.

    All but the embedding is int32. tokens [T]: the row's token, which becomes its slot's last, or -1: the slot's last
    is the row's. Rows with a token have slots of their own. The first num_entries of `entries` (index, page) are
    written to the flat page tables; no index occurs twice. With `use_pdl` what follows may
    begin before this kernel has ended and must wait (griddepcontrol) before it reads; this one begins when all before
    it is over.
    """
    _check(slots_T, tokens_T, entries_E2, num_entries_1, page_tables, last_tokens_S, embedding_VD)
    num_rows, num_features = len(slots_T), embedding_VD.shape[1]
    x_TD = embedding_VD.new_empty(num_rows, num_features)
    block = min(triton.next_power_of_2(num_features), _FEATURES)
    # Rows are the second axis of the grid, which holds 65,535.
    assert 0 < num_rows < 1 << 16, num_rows
    _scatter_embed_kernel[(triton.cdiv(num_features, block), num_rows)](
        slots_T, tokens_T, entries_E2, num_entries_1, page_tables, last_tokens_S, embedding_VD, x_TD, D=num_features,
        BLOCK_D=block, ENTRIES=_ENTRIES, PDL=use_pdl, num_warps=max(block // 256, 1),
    )  # fmt: skip
    return x_TD


def scatter_embed_reference(
    slots_T: torch.Tensor,
    tokens_T: torch.Tensor,
    entries_E2: torch.Tensor,
    num_entries_1: torch.Tensor,
    page_tables: torch.Tensor,
    last_tokens_S: torch.Tensor,
    embedding_VD: torch.Tensor,
) -> torch.Tensor:
    """`scatter_embed` in torch, with the host waiting."""
    entries = entries_E2[: int(num_entries_1)].long()
    page_tables.view(-1)[entries[:, 0]] = entries[:, 1].int()
    is_sent = tokens_T >= 0
    last_tokens_S[slots_T[is_sent].long()] = tokens_T[is_sent]
    return functional.embedding(last_tokens_S[slots_T.long()], embedding_VD)


def _check(
    slots_T: torch.Tensor,
    tokens_T: torch.Tensor,
    entries_E2: torch.Tensor,
    num_entries_1: torch.Tensor,
    page_tables: torch.Tensor,
    last_tokens_S: torch.Tensor,
    embedding_VD: torch.Tensor,
) -> None:
    for numbers in (slots_T, tokens_T, entries_E2, num_entries_1, page_tables, last_tokens_S):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous(), (numbers.dtype, numbers.stride())
    assert slots_T.shape == tokens_T.shape == (len(slots_T),), (slots_T.shape, tokens_T.shape)
    assert entries_E2.shape == (len(entries_E2), 2) and num_entries_1.shape == (1,), entries_E2.shape
    assert embedding_VD.is_contiguous(), embedding_VD.stride()
