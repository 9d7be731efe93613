"""Slots of the experts that rows pick, where ranks hold copies of experts; counts the picks on the way.

A table says where the copies of each expert are. It lies on the device and is written in place when experts have moved,
so that graphs that read it stay as they are.

    table  | first copy of each expert [E] | number of copies [E] | slots, by expert [S] |     int32

Rows take the copies of an expert in turn. Legend: T rows, A picks of a row, E experts, S slots of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 256


class TokenRows(NamedTuple):
    """Tells rows of a step that are tokens from padding, whose slot is the dummy. row_slots_T int32."""

    row_slots_T: torch.Tensor
    dummy_slot: int


@triton.jit(do_not_specialize=["num_pairs", "rank", "dummy_slot"], do_not_specialize_on_alignment=["row_slots_ptr"])
def _choose_slots_kernel(
    ids_ptr, slots_ptr, table_ptr, picks_ptr, row_slots_ptr, num_pairs, rank, dummy_slot, A: tl.constexpr,
    E: tl.constexpr, HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    experts = tl.load(ids_ptr + pairs, mask=mask, other=0)
    # An id out of range would read, and count in, foreign memory.
    experts = tl.minimum(tl.maximum(experts, 0), E - 1)
    rows = pairs // A
    first = tl.load(table_ptr + experts, mask=mask, other=0)
    copies = tl.load(table_ptr + E + experts, mask=mask, other=1)
    turn = (rows + rank) % copies
    tl.store(slots_ptr + pairs, tl.load(table_ptr + 2 * E + first + turn, mask=mask, other=0), mask=mask)
    if HAS_PADDING:
        mask = mask & (tl.load(row_slots_ptr + rows, mask=mask, other=0) != dummy_slot)
    tl.atomic_add(picks_ptr + experts, experts * 0 + 1, mask=mask, sem="relaxed")


def slot_table(experts_S: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The table of a placement, on the host. experts_S: int64 on the host, the expert at each slot, -1: none; each
    expert has a slot."""
    is_filled_S = experts_S >= 0
    copies_E = experts_S[is_filled_S].bincount(minlength=num_experts)
    assert len(copies_E) == num_experts and int(copies_E.min()) > 0, "each expert has a slot"
    order = is_filled_S.nonzero().flatten()[experts_S[is_filled_S].argsort(stable=True)]
    table = torch.zeros(2 * num_experts + len(experts_S), dtype=torch.int32)
    table[:num_experts] = copies_E.cumsum(0) - copies_E
    table[num_experts : 2 * num_experts] = copies_E
    table[2 * num_experts : 2 * num_experts + len(order)] = order
    return table


def choose_slots(
    expert_ids_TA: torch.Tensor, table: torch.Tensor, picks_E: torch.Tensor, rank: int, tokens: TokenRows | None = None
) -> torch.Tensor:
    """int32 [T, A]: a slot of each pick's expert. Adds the picks of rows that are tokens to picks_E, int32.

    table: as `slot_table` makes it, for len(picks_E) experts. rank: shifts the turns, so that not all ranks begin with
    the same copies. tokens: None: all rows are."""
    num_rows, num_picks = expert_ids_TA.shape
    assert expert_ids_TA.dtype == torch.int32 and expert_ids_TA.is_contiguous(), expert_ids_TA.dtype
    assert table.dtype == picks_E.dtype == torch.int32 and len(table) >= 3 * len(picks_E), (table.shape, picks_E.shape)
    assert tokens is None or len(tokens.row_slots_T) == num_rows, (tokens, num_rows)
    slots_TA = torch.empty_like(expert_ids_TA)
    num_pairs = num_rows * num_picks
    if num_pairs:
        _choose_slots_kernel[(triton.cdiv(num_pairs, _BLOCK),)](
            expert_ids_TA, slots_TA, table, picks_E, table if tokens is None else tokens.row_slots_T, num_pairs, rank,
            -1 if tokens is None else tokens.dummy_slot, A=num_picks, E=len(picks_E), HAS_PADDING=tokens is not None,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return slots_TA


def choose_slots_reference(
    expert_ids_TA: torch.Tensor, table: torch.Tensor, picks_E: torch.Tensor, rank: int, tokens: TokenRows | None = None
) -> torch.Tensor:
    """The same as `choose_slots`, in torch."""
    num_experts = len(picks_E)
    ids_TA = expert_ids_TA.long().clamp(0, num_experts - 1)
    first_TA, copies_TA = table[ids_TA], table[num_experts + ids_TA]
    turn_TA = (torch.arange(len(ids_TA), device=table.device)[:, None] + rank) % copies_TA
    counted_TA = ids_TA if tokens is None else ids_TA[tokens.row_slots_T != tokens.dummy_slot]
    picks_E += counted_TA.flatten().bincount(minlength=num_experts).int()
    return table[2 * num_experts + first_TA + turn_TA]
