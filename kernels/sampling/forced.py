"""Texts that grammars force, as drafts with the masks of their positions: the host writes them, the device looks once.

    chain        base b, ids c[0], c[1], ...      mask 0 of position b, mask i behind c[0] .. c[i - 1]
    propose      ids of the chain at the row's own length become its drafts               before the forward
    take         mask of each position whose tokens since b are those of the chain; others have none
    confirm      behind sampling: a chain that was written anew meanwhile counts as late; a forbidden token gives way

An output has two chains, and a number for each: the one that is published, and the one that is being written. The host
publishes one and writes the other, so that what the device reads stays as it is for a whole step of the host; if that
was not enough, the second number tells. Ids and masks are added behind those of the chain that is published, and
counted last. The writer may be another process: whatever it writes, it is bounded before it is used.

T positions, B rows, M outputs, F ids of a chain, S slots, L tokens of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths
from radixmesh.kernels.sampling.masks import allowed_token
from radixmesh.kernels.sampling.sample import TokenTarget

_SEARCH = 1024
HEAD = 2
"""Numbers of a chain before its ids: the base, and how many ids there are."""


class HostChains(NamedTuple):
    """Host memory that the device reads where it lies, int32. Chain v of output m is at 2 m + v % 2.

    versions_M2: the chain that is published (0: none yet), and the last one that was begun. chains_CH [2 M, HEAD + F].
    words_MW [2 M (1 + F), words]: masks, those of a chain one after the other.
    """

    versions_M2: torch.Tensor
    chains_CH: torch.Tensor
    words_MW: torch.Tensor

    @property
    def max_forced(self) -> int:
        """F."""
        return self.chains_CH.shape[1] - HEAD


@triton.jit(do_not_specialize=["vocab_size", "window_stride"])
def _propose_kernel(
    slots_ptr, lengths_ptr, starts_ptr, counts_ptr, window_ptr, parents_ptr, slot_lengths_ptr, masks_ptr, versions_ptr,
    chains_ptr, vocab_size, window_stride, W, F: tl.constexpr, HEAD: tl.constexpr, BLOCK_W: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    mask = tl.load(masks_ptr + slot).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    if length < 0:
        length = tl.load(slot_lengths_ptr + slot)
    if mask >= 0:
        version = tl.load(versions_ptr + 2 * mask, volatile=True)
        chain_ptr = chains_ptr + (2 * mask + (version & 1)) * (HEAD + F)
        # Whatever the host is writing now, or has written: drafts may be wrong, if only they are ids.
        base = tl.load(chain_ptr, volatile=True)
        num_ids = tl.maximum(tl.minimum(tl.load(chain_ptr + 1, volatile=True), F), 0)
        skipped = tl.where((base >= 0) & (base <= length), length - base, F)
        count = tl.where(version > 0, tl.minimum(num_ids - tl.minimum(skipped, F), W), 0)
        number = tl.arange(0, BLOCK_W)
        is_draft = number < count
        draft = tl.load(chain_ptr + HEAD + skipped + number, mask=is_draft, other=0, volatile=True)
        draft = tl.minimum(tl.maximum(draft, 0), vocab_size - 1)
        tl.store(window_ptr + number * window_stride + row, draft, mask=is_draft)
        tl.store(starts_ptr + row, length)
        tl.store(counts_ptr + row, tl.maximum(count, 0))
        if parents_ptr is not None:
            tl.store(parents_ptr + row, -1)
    elif not HAS_OTHERS:
        tl.store(starts_ptr + row, length)
        tl.store(counts_ptr + row, 0)


def propose_forced(
    inputs: DraftInputs,
    state: SlotLengths,
    masks_S: torch.Tensor,
    chains: HostChains,
    vocab_size: int,
    *,
    has_others: bool,
) -> None:
    """Drafts of the rows whose slots follow grammars. masks_S: the output of each slot, negative where it follows none;
    has_others: those have drafts by now, else they get none. What is forced is a chain, beside trees too. Can be
    captured."""
    num_rows, num_drafts = len(inputs.slots), len(inputs.window_WB)
    _propose_kernel[(num_rows,)](
        inputs.slots, inputs.lengths, inputs.starts, inputs.counts, inputs.window_WB, inputs.parents_WB, state.lengths,
        masks_S, chains.versions_M2, chains.chains_CH, vocab_size, inputs.window_WB.stride(0), num_drafts,
        F=chains.max_forced, HEAD=HEAD, BLOCK_W=triton.next_power_of_2(num_drafts), HAS_OTHERS=has_others, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens_stride"])
def _take_kernel(
    slots_ptr, positions_ptr, masks_ptr, versions_ptr, chains_ptr, tokens_ptr, taken_ptr, seen_ptr, tokens_stride,
    F: tl.constexpr, HEAD: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    mask = tl.load(masks_ptr + slot).to(tl.int64)
    taken = mask
    version = 0
    if mask >= 0:
        position = tl.load(positions_ptr + row)
        version = tl.load(versions_ptr + 2 * mask, volatile=True)
        chain = 2 * mask + (version & 1)
        chain_ptr = chains_ptr + chain * (HEAD + F)
        base = tl.load(chain_ptr, volatile=True)
        num_ids = tl.load(chain_ptr + 1, volatile=True)
        # Numbers of the host may be anything: nothing is read but from the chain and the row.
        behind = tl.where((base >= 0) & (base <= position), position - base, -1)
        number = tl.arange(0, BLOCK_F)
        is_before = (number < behind) & (number < F)
        forced = tl.load(chain_ptr + HEAD + number, mask=is_before, other=0, volatile=True)
        own = tl.load(tokens_ptr + slot * tokens_stride + base + number, mask=is_before, other=0)
        num_wrong = tl.sum((forced != own).to(tl.int32), axis=0)
        is_there = (version > 0) & (behind >= 0) & (behind <= tl.minimum(num_ids, F)) & (num_wrong == 0)
        taken = tl.where(is_there, chain * (1 + F) + behind, -2)
    tl.store(taken_ptr + row, taken.to(tl.int32))
    tl.store(seen_ptr + row, version)


def take_chains(
    slots_T: torch.Tensor,
    positions_T: torch.Tensor,
    masks_S: torch.Tensor,
    chains: HostChains,
    tokens_SL: torch.Tensor,
    taken_T: torch.Tensor,
    seen_T: torch.Tensor,
) -> None:
    """taken_T: the row of words_MW with the mask of each token, NO_MASK, or LATE; seen_T: the chain that it is of.

    positions: index in prompt + output of the token to be sampled; tokens_SL: what stands before it, drafts too.
    """
    num_rows = len(slots_T)
    assert num_rows <= len(positions_T) and num_rows <= len(taken_T), (slots_T.shape, taken_T.shape)
    if num_rows:
        _take_kernel[(num_rows,)](
            slots_T, positions_T, masks_S, chains.versions_M2, chains.chains_CH, tokens_SL, taken_T, seen_T,
            tokens_SL.stride(0), F=chains.max_forced, HEAD=HEAD,
            BLOCK_F=triton.next_power_of_2(max(chains.max_forced, 1)), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["W", "ring_stride"])
def _confirm_kernel(
    taken_ptr, seen_ptr, slots_ptr, masks_ptr, versions_ptr, words_ptr, ring_ptr, ring_index_ptr, last_tokens_ptr, W,
    ring_stride, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    taken = tl.load(taken_ptr + row).to(tl.int64)
    if taken >= 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        mask = tl.load(masks_ptr + slot).to(tl.int64)
        ring_ptr += tl.load(ring_index_ptr).to(tl.int64) * ring_stride + row
        token = tl.load(ring_ptr)
        allowed = allowed_token(words_ptr + taken * W, token, W, SEARCH)
        # Asked behind the last look at the mask: the host may have begun to write it anew while it was read here.
        tl.debug_barrier()
        if tl.load(versions_ptr + 2 * mask + 1, volatile=True) > tl.load(seen_ptr + row) + 1:
            tl.store(taken_ptr + row, -2)
        elif allowed != token:
            tl.store(ring_ptr, allowed)
            tl.store(last_tokens_ptr + slot, allowed)


def confirm_chains(
    taken_T: torch.Tensor,
    seen_T: torch.Tensor,
    slots_T: torch.Tensor,
    masks_S: torch.Tensor,
    chains: HostChains,
    target: TokenTarget,
) -> None:
    """Behind sampling into `target`, as the module says; taken_T becomes LATE where the chain has changed."""
    num_words = chains.words_MW.shape[1]
    assert chains.words_MW.is_contiguous()
    if len(slots_T):
        _confirm_kernel[(len(slots_T),)](
            taken_T, seen_T, slots_T, masks_S, chains.versions_M2, chains.words_MW, target.ring_RT,
            target.ring_index_1, target.last_tokens_S, num_words, target.ring_RT.stride(0), SEARCH=_SEARCH,
            num_warps=1,
        )  # fmt: skip
