"""Masks of grammars before sampling: the host sends them while the forward runs, the device looks once for them.

    take      the mask of each row: there, if the host has told so for just this position     read once, no wait
    apply     logits of ids that a mask forbids become -inf, and the row's highest is found among the others
    settle    behind sampling: a forbidden token gives way to the lowest allowed id; a row whose mask was not there
              leaves its slot as it was, and tells -1 as its token

A slot that follows a grammar has its exact length on the device, because the host, which launches steps ahead, does not
know yet which rows yielded nothing. T rows, V vocabulary, W words of a mask, M masks in host memory, S slots with the
dummy slot of padding, which follows none. Rows without a mask cost nothing but programs that return at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.candidates import BLOCK
from radixmesh.kernels.sampling.sample import TokenTarget, cut_of
from radixmesh.kernels.sampling.sample_params import packed_order

NO_MASK = -1
"""Of a slot that follows no grammar."""
NO_LENGTH = 2**31 - 1
"""Likewise: no position is behind it."""
LATE = -2
_WORDS = 128  # Words of a mask that a program reads at a time.
_SEARCH = 1024
_ROWS = 128


class HostMasks(NamedTuple):
    """int32. words_MW: bit i of word w is id 32 w + i, 1 = allowed; on the device, or host memory that it reads.

    positions_M: index in prompt + output of the token that a mask is for, in host memory that the device reads; the
    host writes it when the mask's words are there.
    """

    words_MW: torch.Tensor
    positions_M: torch.Tensor


class GuidedSlots(NamedTuple):
    """State by slot on the device, int32 [S]. masks: the slot's row in HostMasks, NO_MASK where it follows no grammar.

    lengths: prompt and output with the last token; NO_LENGTH where it follows none. last_tokens: that token.
    """

    masks: torch.Tensor
    lengths: torch.Tensor
    last_tokens: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _clamp_kernel(
    ids_ptr, slots_ptr, positions_ptr, kv_lens_ptr, lengths_ptr, num_rows, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    if HAS_IDS:
        is_row = is_row & (tl.load(ids_ptr + row, mask=is_row, other=0) < 0)
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    length = tl.load(lengths_ptr + slot, mask=is_row, other=2**31 - 1)
    is_behind = is_row & (length <= tl.load(positions_ptr + row, mask=is_row, other=0))
    tl.store(positions_ptr + row, length - 1, mask=is_behind)
    tl.store(kv_lens_ptr + row, length, mask=is_behind)


def clamp_positions(
    slots_T: torch.Tensor,
    positions_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    lengths_S: torch.Tensor,
    ids_T: torch.Tensor | None = None,
) -> None:
    """Brings decode rows that are ahead of their slot's length back to its last token, in place: the host counts a
    token a step. All int32. ids: only rows whose id is negative are decodes. Can be captured."""
    num_rows = len(kv_lens_T)
    assert len(slots_T) >= num_rows and len(positions_T) >= num_rows
    if num_rows:
        _clamp_kernel[(triton.cdiv(num_rows, _ROWS),)](
            slots_T if ids_T is None else ids_T, slots_T, positions_T, kv_lens_T, lengths_S, num_rows,
            HAS_IDS=ids_T is not None, BLOCK=_ROWS, num_warps=_ROWS // 32,
        )  # fmt: skip


@triton.jit
def _take_kernel(row_slots_ptr, positions_ptr, masks_ptr, lengths_ptr, host_positions_ptr, taken_ptr):
    row = tl.program_id(0)
    slot = tl.load(row_slots_ptr + row)
    mask = tl.load(masks_ptr + slot)
    taken = mask
    if mask >= 0:
        position = tl.minimum(tl.load(positions_ptr + row), tl.load(lengths_ptr + slot))
        tl.store(positions_ptr + row, position)
        # The host may be writing this very word. It wrote the mask before it, and the kernels behind this one read it.
        is_there = tl.load(host_positions_ptr + mask, volatile=True) == position
        taken = tl.where(is_there, mask, -2)
    tl.store(taken_ptr + row, taken)


@triton.jit(do_not_specialize=["W", "num_ids"])
def _apply_kernel(
    logits_ptr, taken_ptr, words_ptr, highest_ptr, V, W, stride, words_stride, highest_stride, num_ids,
    WORDS: tl.constexpr, HAS_HIGHEST: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    mask = tl.load(taken_ptr + row).to(tl.int64)
    if mask >= 0:
        best = tl.full((WORDS, 32), -(2**63), tl.int64)
        gone = tl.full((WORDS, 32), float("-inf"), tl.float32)
        bit = tl.arange(0, 32)
        start = split * num_ids
        end = tl.minimum(start + num_ids, V)
        while start < end:
            at = start // 32 + tl.arange(0, WORDS)
            words = tl.load(words_ptr + mask * words_stride + at, mask=at < W, other=0)
            ids = at[:, None] * 32 + bit[None, :]
            is_allowed = ((words[:, None] >> bit[None, :]) & 1) != 0
            is_own = ids < end
            tl.store(logits_ptr + row * stride + ids, gone, mask=is_own & ~is_allowed)
            if HAS_HIGHEST:
                x = tl.load(logits_ptr + row * stride + ids, mask=is_own & is_allowed, other=float("-inf"))
                best = tl.maximum(best, tl.where(is_own, packed_order(x.to(tl.float32), ids, False), -(2**63)))
            start += WORDS * 32
        if HAS_HIGHEST:
            tl.store(highest_ptr + row * highest_stride + split, tl.max(tl.max(best, axis=1), axis=0))


def take_masks(
    slots_T: torch.Tensor, positions_T: torch.Tensor, state: GuidedSlots, host: HostMasks, taken_T: torch.Tensor
) -> None:
    """taken_T int32: the row in `host` of the mask of each row's token, NO_MASK, or LATE. slots, positions int32: slot
    of a row, and the index in prompt + output of its token, which becomes exact in place."""
    assert slots_T.dtype == positions_T.dtype == taken_T.dtype == torch.int32
    assert len(slots_T) == len(positions_T) <= len(taken_T), (slots_T.shape, positions_T.shape, taken_T.shape)
    if len(slots_T):
        _take_kernel[(len(slots_T),)](
            slots_T, positions_T, state.masks, state.lengths, host.positions_M, taken_T, num_warps=1
        )


def apply_masks(
    logits_TV: torch.Tensor, taken_T: torch.Tensor, host: HostMasks, highest_TS: torch.Tensor | None = None
) -> None:
    """Sets what the taken masks forbid to -inf, in place.

    highest_TS: as `sample_rows` left it for these logits; that of masked rows becomes what it would have left for the
    masked ones. None: nobody asks for it.
    """
    (num_rows, vocab_size), num_words = logits_TV.shape, host.words_MW.shape[1]
    assert logits_TV.stride(1) == 1 and num_words == triton.cdiv(vocab_size, 32), (logits_TV.shape, num_words)
    if not num_rows:
        return
    splits, num_ids = triton.cdiv(vocab_size, _WORDS * 32), _WORDS * 32
    if highest_TS is not None:
        cut = cut_of(num_rows, vocab_size)
        splits, num_ids = cut.splits, cut.num_blocks * BLOCK
    _apply_kernel[(splits, num_rows)](
        logits_TV, taken_T, host.words_MW, taken_T if highest_TS is None else highest_TS, vocab_size, num_words,
        logits_TV.stride(0), host.words_MW.stride(0), 0 if highest_TS is None else highest_TS.stride(0), num_ids,
        WORDS=_WORDS, HAS_HIGHEST=highest_TS is not None, num_warps=8,
    )  # fmt: skip


@triton.jit
def allowed_token(words_ptr, token, W, SEARCH: tl.constexpr):
    """The token, or the lowest one that its mask allows: logits are broken, or nothing is allowed but what min_tokens
    suppresses."""
    if ((tl.load(words_ptr + (token >> 5)) >> (token & 31)) & 1) == 0:
        start = tl.full((), 0, tl.int32)
        found = tl.full((), 2**31 - 1, tl.int32)
        while (start < W) & (found == 2**31 - 1):
            at = start + tl.arange(0, SEARCH)
            words = tl.load(words_ptr + at, mask=at < W, other=0)
            found = tl.min(tl.where(words != 0, at, 2**31 - 1), axis=0)
            start += SEARCH
        found = tl.minimum(found, W - 1)
        bit = tl.arange(0, 32)
        is_allowed = ((tl.load(words_ptr + found) >> bit) & 1) == 1
        token = found * 32 + tl.min(tl.where(is_allowed, bit, 31), axis=0)
    return token


@triton.jit(do_not_specialize=["W", "ring_stride", "tokens_stride"])
def _settle_kernel(
    taken_ptr, row_slots_ptr, positions_ptr, words_ptr, lengths_ptr, guided_last_ptr, ring_ptr, ring_index_ptr,
    last_tokens_ptr, tokens_ptr, W, words_stride, ring_stride, tokens_stride, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(taken_ptr + row).to(tl.int64)
    if mask != -1:
        slot = tl.load(row_slots_ptr + row).to(tl.int64)
        ring_ptr += tl.load(ring_index_ptr).to(tl.int64) * ring_stride + row
        if mask == -2:
            tl.store(ring_ptr, -1)
            tl.store(last_tokens_ptr + slot, tl.load(guided_last_ptr + slot))
        else:
            words_ptr += mask * words_stride
            token = tl.load(ring_ptr)
            allowed = allowed_token(words_ptr, token, W, SEARCH)
            if allowed != token:
                token = allowed
                tl.store(ring_ptr, token)
                tl.store(last_tokens_ptr + slot, token)
            position = tl.load(positions_ptr + row)
            tl.store(guided_last_ptr + slot, token)
            tl.store(lengths_ptr + slot, position + 1)
            # Penalties count it.
            tl.store(tokens_ptr + slot * tokens_stride + position, token)


def settle_masks(
    taken_T: torch.Tensor,
    slots_T: torch.Tensor,
    positions_T: torch.Tensor,
    state: GuidedSlots,
    host: HostMasks,
    target: TokenTarget,
    tokens_SL: torch.Tensor,
) -> None:
    """Advances the slots that follow grammars by the tokens in `target`, as the module says; -1 there for late rows."""
    if len(slots_T):
        _settle_kernel[(len(slots_T),)](
            taken_T, slots_T, positions_T, host.words_MW, state.lengths, state.last_tokens, target.ring_RT,
            target.ring_index_1, target.last_tokens_S, tokens_SL, host.words_MW.shape[1], host.words_MW.stride(0),
            target.ring_RT.stride(0), tokens_SL.stride(0), SEARCH=_SEARCH, num_warps=1,
        )  # fmt: skip
