"""N-gram drafts on the device: each row's text goes on as it did the last time that its last tokens occurred in it.

The same drafts as `daemons/worker/speculation/ngram.py`, id for id, from the tokens that the device has of each slot.
One program a row looks at the last `window` positions, BLOCK at a time, and compares up to `max_match` tokens at each:
its time is bounded whatever the row's length. B rows, W window of drafts, S slots, L tokens of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths

_BLOCK = 1024
_ENDS = 1 << 32  # Above every position: the number of equal tokens and the position are compared as one number.


@triton.jit(do_not_specialize=["window", "slot_tokens_stride", "drafts_stride"])
def _ngram_kernel(
    slots_ptr, tokens_ptr, lengths_ptr, starts_ptr, counts_ptr, drafts_ptr, last_tokens_ptr, slot_lengths_ptr,
    slot_tokens_ptr, window, slot_tokens_stride, drafts_stride, MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr,
    W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(starts_ptr + row) < 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        last = tl.load(tokens_ptr + row)
        length = tl.load(lengths_ptr + row)
        if length < 0:
            last = tl.load(last_tokens_ptr + slot)
            length = tl.load(slot_lengths_ptr + slot)
        text_ptr = slot_tokens_ptr + slot * slot_tokens_stride
        most = tl.load(counts_ptr + row)
        count = 0
        # Padding has a slot without a text, and length 0.
        if length > 0:
            num_ends = tl.minimum(length - 1, window)
            first = length - 1 - num_ends
            best = tl.full((BLOCK,), 0, tl.int64)
            block = 0
            while block < num_ends:
                end = first + block + tl.arange(0, BLOCK)
                is_equal = end < length - 1
                num_equal = tl.zeros((BLOCK,), tl.int64)
                for back in tl.static_range(MAX_MATCH):
                    # The last token may not be among the slot's tokens yet: `expand_drafts` writes it there.
                    suffix = last
                    if back > 0:
                        suffix = tl.load(text_ptr + length - 1 - back, mask=back < length, other=-1)
                    is_equal = is_equal & (end >= back)
                    token = tl.load(text_ptr + end - back, mask=is_equal, other=-1)
                    is_equal = is_equal & (token == suffix)
                    num_equal += is_equal.to(tl.int64)
                best = tl.maximum(best, num_equal * ENDS + end.to(tl.int64))
                block += BLOCK
            longest = tl.max(best, axis=0)
            if longest >= MIN_MATCH * ENDS:
                end = longest % ENDS
                count = most
                number = tl.arange(0, BLOCK_W)
                at = end + 1 + number % (length - 1 - end)
                is_draft = (number < most) & (number < W)
                draft = tl.load(text_ptr + at, mask=is_draft & (at < length - 1), other=0)
                draft = tl.where(at == length - 1, last, draft)
                tl.store(drafts_ptr + number * drafts_stride + row, draft, mask=is_draft)
        tl.store(starts_ptr + row, length)
        tl.store(counts_ptr + row, tl.minimum(count, W))


def propose_ngrams(inputs: DraftInputs, state: SlotLengths, *, min_match: int, max_match: int, window: int) -> None:
    """Writes drafts of the rows whose `starts` is negative: up to counts[row] of them into window_WB, with their start
    and number. Rows with a start keep what the host sent. Can be captured in a graph.

    state.tokens_SL holds prompt and output of every slot but the last token.
    """
    num_rows, num_drafts = len(inputs.slots), len(inputs.window_WB)
    assert 1 <= min_match <= max_match and window >= 1, (min_match, max_match, window)
    for numbers in (*inputs[:7], *state):
        assert numbers.dtype == torch.int32, numbers.dtype
    for column in inputs[:6]:
        assert column.shape == (num_rows,) and column.is_contiguous(), column.shape
    assert inputs.window_WB.stride(1) == 1 and inputs.window_WB.shape[1] >= num_rows, inputs.window_WB.shape
    assert state.tokens_SL.stride(1) == 1 and len(state.tokens_SL) == len(state.lengths), state.tokens_SL.shape
    _ngram_kernel[(num_rows,)](
        inputs.slots, inputs.tokens, inputs.lengths, inputs.starts, inputs.counts, inputs.window_WB, state.last_tokens,
        state.lengths, state.tokens_SL, window, state.tokens_SL.stride(0), inputs.window_WB.stride(0),
        MIN_MATCH=min_match, MAX_MATCH=max_match, W=num_drafts, BLOCK_W=triton.next_power_of_2(num_drafts),
        BLOCK=_BLOCK, ENDS=_ENDS, num_warps=4,
    )  # fmt: skip
