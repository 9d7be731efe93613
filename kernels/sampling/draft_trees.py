"""Steps that verify trees of drafts: from the parents of drafts to positions, paths and masks, and KV of what was
accepted back in its place.

A row's drafts take KV slots one after the other, in the order in which they come; a draft comes behind the one that it
follows. What a position attends to, and which noise it is sampled with, its depth tells:

    number          0      1      2      3          length l, page tables of the row
    parent          -      0      1      0
    KV at position  l - 1  l      l + 1  l + 2
    computed for    l - 1  l      l + 1  l          its RoPE position; its path is the tail of what it attends to

When 0 and 3 are accepted, the KV of 3 moves to l. A row whose first parent is negative has a chain: one draft follows
the other. B rows, P positions of a row, T = B x P, D = P - 1 drafts, W window of drafts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.split_pieces import Tails
from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths, parents_of
from radixmesh.kernels.sampling.sample_params import Branches

_BLOCK = 512
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TreeRows(NamedTuple):
    """Beside the `DraftRows` of a step whose drafts are trees. tokens_T int32: token of the pool that gets a position's
    KV. tails_TD, ids_TD int32: the pool's tokens and the ids on the path to a position, from the first draft to itself;
    they begin at position starts_T of the sequence. masks_T int64, prefix_lens_B int32: as of `paged_tree_attention`.
    paths_BP int32: of the accepted path the positions, in order, and behind it n at n."""

    tokens_T: torch.Tensor
    starts_T: torch.Tensor
    tails_TD: torch.Tensor
    ids_TD: torch.Tensor
    masks_T: torch.Tensor
    prefix_lens_B: torch.Tensor
    paths_BP: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, num_positions: int, device: torch.device) -> TreeRows:
        """For up to `max_rows` rows."""
        size, depth = max_rows * num_positions, max(1, num_positions - 1)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            tokens_T=ints(size),
            starts_T=ints(size),
            tails_TD=ints(size, depth),
            ids_TD=ints(size, depth),
            masks_T=torch.zeros(size, dtype=torch.int64, device=device),
            prefix_lens_B=ints(max_rows),
            paths_BP=ints(max_rows, num_positions),
        )

    def of(self, num_rows: int) -> TreeRows:
        """Those of the first rows: the same memory."""
        size = num_rows * self.paths_BP.shape[1]
        of_positions = (part[:size] for part in self[:5])
        return TreeRows(*of_positions, *(part[:num_rows] for part in self[5:]))

    @property
    def tails(self) -> Tails:
        return Tails(self.starts_T, self.tails_TD)

    @property
    def branches(self) -> Branches:
        return Branches(self.starts_T, self.ids_TD)


@triton.jit(do_not_specialize=["parents_stride", "page_stride", "dummy_slot"])
def _branch_kernel(
    parents_ptr, row_tokens_ptr, positions_ptr, row_slots_ptr, kv_lens_ptr, num_drafts_ptr, page_tables_ptr, tokens_ptr,
    starts_ptr, tails_ptr, ids_ptr, masks_ptr, prefix_lens_ptr, parents_stride, page_stride, dummy_slot,
    P: tl.constexpr, BLOCK_P: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + row)
    length = tl.load(kv_lens_ptr + row * P)
    slot = tl.load(row_slots_ptr + row * P).to(tl.int64)
    number = tl.arange(0, BLOCK_P)
    is_row = number < P
    is_used = number <= num_drafts
    at = row * P + number
    depth = number * 0
    bits = tl.full((BLOCK_P,), 1, tl.int64) << number.to(tl.int64)
    above = number
    for _ in range(D):
        depth += (is_used & (above > 0)).to(tl.int32)
        above = tl.maximum(parents_of(parents_ptr, parents_stride, row, above, is_used), 0)
        bits = bits | (tl.full((BLOCK_P,), 1, tl.int64) << above.to(tl.int64))
    # From a position up to the first draft, into the path from its end to its beginning.
    above, step = number, depth - 1
    for _ in range(D):
        is_step = is_used & (step >= 0)
        position = length - 1 + above
        page = tl.load(page_tables_ptr + slot * page_stride + position // PAGE, mask=is_step, other=0)
        tl.store(tails_ptr + at * D + step, page * PAGE + position % PAGE, mask=is_step)
        tl.store(
            ids_ptr + at * D + step, tl.load(row_tokens_ptr + row * P + above, mask=is_step, other=0), mask=is_step
        )
        above = tl.maximum(parents_of(parents_ptr, parents_stride, row, above, is_step), 0)
        step -= 1
    # Positions that a row does not use are padding.
    own = tl.where(is_used, length - 1 + number, 0)
    own_slot = tl.where(is_used, slot, dummy_slot)
    page = tl.load(page_tables_ptr + own_slot * page_stride + own // PAGE, mask=is_row, other=0)
    tl.store(tokens_ptr + at, page * PAGE + own % PAGE, mask=is_row)
    tl.store(starts_ptr + at, tl.where(is_used, length, 0), mask=is_row)
    tl.store(masks_ptr + at, tl.where(is_used, bits, 0), mask=is_row)
    tl.store(prefix_lens_ptr + row, tl.maximum(length - 1, 0))
    is_draft = is_used & (number > 0)
    tl.store(positions_ptr + at, length - 1 + depth, mask=is_draft)
    tl.store(kv_lens_ptr + at, length + depth, mask=is_draft)


def branch_rows(inputs: DraftInputs, state: SlotLengths, rows: DraftRows, trees: TreeRows, page_size: int) -> None:
    """Behind `expand_drafts`: positions and KV lengths of `rows` become those of the drafts' depths, and `trees` is
    filled but for its paths. Can be captured.

    inputs.parents_WB: of each draft the position that it follows, which is before it; a row's first one -1: a chain.
    """
    parents_WB = inputs.parents_WB
    num_rows, num_positions = trees.paths_BP.shape
    assert parents_WB is not None and parents_WB.dtype == torch.int32 and parents_WB.stride(1) == 1
    assert len(rows.tokens) == len(trees.tokens_T) == num_rows * num_positions and num_positions > 1
    assert len(parents_WB) >= num_positions - 1 and parents_WB.shape[1] >= num_rows, parents_WB.shape
    assert num_positions <= 64, "masks are bits"
    _branch_kernel[(num_rows,)](
        parents_WB, rows.tokens, rows.positions, rows.slots, rows.kv_lens, rows.num_drafts, state.page_tables,
        trees.tokens_T, trees.starts_T, trees.tails_TD, trees.ids_TD, trees.masks_T, trees.prefix_lens_B,
        parents_WB.stride(0), state.page_tables.stride(0), len(state.lengths) - 1, P=num_positions,
        BLOCK_P=triton.next_power_of_2(num_positions), D=num_positions - 1, PAGE=page_size, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer_stride"])
def _move_kernel(
    plane_ptr, tokens_ptr, paths_ptr, layer_stride, ROW: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = word < ROW
    at = plane_ptr + layer * layer_stride + word
    for depth in range(1, P):
        number = tl.load(paths_ptr + row * P + depth)
        if number != depth:
            source = tl.load(tokens_ptr + row * P + number).to(tl.int64)
            target = tl.load(tokens_ptr + row * P + depth).to(tl.int64)
            moved = tl.load(at + source * ROW, mask=mask, other=0)
            # A position is read before a later one is moved to it: it is behind where it goes.
            tl.debug_barrier()
            tl.store(at + target * ROW, moved, mask=mask)


def move_paths(planes: list[torch.Tensor], trees: TreeRows) -> None:
    """Moves what is kept of the accepted positions to where their depths lie, in planes [layers, tokens, ...], each
    contiguous in what a layer has. Can be captured."""
    num_rows, num_positions = trees.paths_BP.shape
    for plane in planes:
        size = plane.element_size()
        assert plane[0].is_contiguous(), plane.stride()
        row, layer_stride = math.prod(plane.shape[2:]) * size, plane.stride(0) * size if len(plane) > 1 else 0
        word = math.gcd(8, row, layer_stride, plane.data_ptr())
        block = min(triton.next_power_of_2(row // word), _BLOCK)
        _move_kernel[(num_rows, len(plane), triton.cdiv(row // word, block))](
            _as_words(plane, word), trees.tokens_T, trees.paths_BP, layer_stride // word, ROW=row // word,
            P=num_positions, BLOCK=block, num_warps=4,
        )  # fmt: skip


def _as_words(tensor: torch.Tensor, word: int) -> torch.Tensor:
    """The same memory, of words of so many bytes; only its address is used."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor[:1, :1].reshape(-1)
    return flat.view(torch.uint8)[: flat.numel() * flat.element_size() // word * word].view(_WORDS[word])
