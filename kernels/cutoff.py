"""Where top-k, top-p and min-p cut a row's ranking (CPU: `sampling/filters.py`), without sorting it.

Each filter keeps a start of the ranking by (value descending, id ascending): all three together are one cut, the
packed (value, id) of the last that is kept. Values are bisected in their integer order, one pass over the row a step:
at most 32 steps, whatever the values. T rows, V vocabulary, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sample_params import SampleParams, order_of, value_of, value_of_order

NO_CUT = -(2**63)
_BLOCK = 4096


@triton.jit
def _weights(x, highest, inverse):
    """Shares of the largest probability, float32; NaN and what is below +inf, where that is the highest, have none."""
    distance = tl.where(highest == float("inf"), tl.where(x == highest, 0.0, float("-inf")), x - highest)
    weight = tl.exp(distance * inverse)
    return tl.where(x == x, weight, 0.0)


@triton.jit
def _above(row_ptr, pivot, highest, inverse, V: tl.constexpr, BLOCK: tl.constexpr, IS_ADJUSTED: tl.constexpr):
    """Count and weight of the values above the pivot (an order), and the count of those at it."""
    count = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        order = tl.where(ids < V, order_of(x, IS_ADJUSTED), -(2**31))
        count += (order > pivot).to(tl.int32)
        equal += (order == pivot).to(tl.int32)
        weight += tl.where(order > pivot, _weights(x, highest, inverse), 0.0)
    return tl.sum(count, axis=0), tl.sum(weight.to(tl.float64), axis=0), tl.sum(equal, axis=0)


@triton.jit
def _middle(low, high):
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def _id_of_equal(row_ptr, pivot, num_kept, V: tl.constexpr, BLOCK: tl.constexpr, IS_ADJUSTED: tl.constexpr):
    """The id of the num_kept-th (from 1) value at the pivot."""
    before = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < V, other=0.0).to(tl.float32)
        is_equal = (ids < V) & (order_of(x, IS_ADJUSTED) == pivot)
        rank = before + tl.cumsum(is_equal.to(tl.int32), axis=0)
        found = tl.maximum(found, tl.max(tl.where(is_equal & (rank == num_kept), ids, -1), axis=0))
        before += tl.sum(is_equal.to(tl.int32), axis=0)
    return found


@triton.jit
def _cut_off_kernel(
    logits_ptr, highest_ptr, row_slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cut_ptr, stride,
    V: tl.constexpr, BLOCK: tl.constexpr, IS_ADJUSTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    packed = tl.load(highest_ptr + row)
    highest = value_of(packed)
    highest_order = (packed >> 32).to(tl.int32)
    cut = tl.full((), -(2**63), tl.int64)
    row_ptr = logits_ptr + row * stride
    if (temperature > 0.0) & (highest > float("-inf")):
        # Bounded, so that no distance becomes NaN: at 1e30 all but the highest have no weight anyway.
        inverse = tl.minimum(1.0 / temperature, 1e30).to(tl.float32)
        last = tl.full(
            (), -2139095041, tl.int32
        )  # -inf. The order of the last value kept, and how many of its ids are.
        num_last = tl.full((), 2**31 - 1, tl.int32)
        num_equal = num_last
        if (top_k > 0) & (top_k < V):
            # The lowest value that fewer than top_k are above.
            high = highest_order
            while last < high:
                middle = _middle(last, high)
                count, _, _ = _above(row_ptr, middle, highest, inverse, V, BLOCK, IS_ADJUSTED)
                if count < top_k:
                    high = middle
                else:
                    last = middle + 1
            count, _, num_equal = _above(row_ptr, last, highest, inverse, V, BLOCK, IS_ADJUSTED)
            num_last = tl.minimum(top_k - count, num_equal)
        if top_p < 1.0:
            _, weight, equal = _above(row_ptr, last, highest, inverse, V, BLOCK, IS_ADJUSTED)
            last_weight = _weights(value_of_order(last), highest, inverse).to(tl.float64)
            wanted = top_p * (weight + last_weight * tl.minimum(num_last, equal).to(tl.float64))
            low = last
            high = highest_order
            while low < high:
                middle = _middle(low, high)
                _, weight, _ = _above(row_ptr, middle, highest, inverse, V, BLOCK, IS_ADJUSTED)
                if weight < wanted:
                    high = middle
                else:
                    low = middle + 1
            _, weight, num_equal = _above(row_ptr, low, highest, inverse, V, BLOCK, IS_ADJUSTED)
            low_weight = _weights(value_of_order(low), highest, inverse).to(tl.float64)
            # Equal weights: the j-th of them is kept while those before it weigh less than what is wanted.
            share = tl.ceil((wanted - weight) / tl.maximum(low_weight, 1e-300))
            num_kept = tl.maximum(tl.minimum(share, num_equal.to(tl.float64)), 1.0).to(tl.int32)
            num_last = tl.where(low == last, tl.minimum(num_kept, num_last), num_kept)
            last = low
        cut = last.to(tl.int64) << 32
        if num_last < num_equal:
            last_id = _id_of_equal(row_ptr, last, num_last, V, BLOCK, IS_ADJUSTED)
            cut += 0xFFFFFFFF - last_id.to(tl.int64)
        if min_p > 0.0:
            low = tl.full((), -2139095041, tl.int32)
            high = highest_order
            while low < high:
                middle = _middle(low, high)
                distance = value_of_order(middle).to(tl.float64) - highest.to(tl.float64)
                if tl.exp(distance / temperature) >= min_p:
                    high = middle
                else:
                    low = middle + 1
            cut = tl.maximum(cut, low.to(tl.int64) << 32)
    tl.store(cut_ptr + row, cut)


def cut_off(
    logits_TV: torch.Tensor,
    params: SampleParams,
    row_slots_T: torch.Tensor,
    highest_T: torch.Tensor,
    cut_T: torch.Tensor,
    *,
    is_adjusted: bool,
) -> None:
    """Writes each row's cut, int64 [>= T]: an id is kept if its packed (value, id) is not below it.

    highest int64 [T] holds the packed maxima of the rows. Rows that are greedy or have no filter keep all.
    """
    num_rows, vocab_size = logits_TV.shape
    assert highest_T.shape == (num_rows,) and highest_T.dtype == cut_T.dtype == torch.int64
    _cut_off_kernel[(num_rows,)](
        logits_TV, highest_T, row_slots_T, params.temperature_S, params.top_k_S, params.top_p_S, params.min_p_S, cut_T,
        logits_TV.stride(0), V=vocab_size, BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        IS_ADJUSTED=is_adjusted, num_warps=16,
    )  # fmt: skip
