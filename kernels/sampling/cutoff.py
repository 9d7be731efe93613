"""Cuts of a row's ranking by top-k, top-p and min-p (CPU: `sampling/filters.py`), without sorting the row.

Each filter keeps a start of the ranking by (value descending, id ascending): all three together are one cut, the
packed (value, id) of the last that is kept. A row's best candidates (`candidates.py`) are sorted, and nearly always
the cut is among them. Where it is not (a flat row, a large top_k), values are bisected in their integer order, one pass
over the row a step. T rows, V vocabulary, S splits of a row, C candidates, B buckets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.candidates import CandidateScratch, bounded_inverse, collect, is_ranked, score_of
from radixmesh.kernels.sampling.sample_params import SampleParams, order_of, value_of, value_of_order

NO_CUT = -(2**63)
_BLOCK = 4096


@triton.jit
def _cut_among(
    packed_ptr, weights_ptr, num_near, num_splits, highest, inverse, top_k, top_p, V: tl.constexpr,
    CANDIDATES: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """The cut, and whether it is certain to be among the candidates."""
    rank = tl.arange(0, CANDIDATES)
    packed = tl.load(packed_ptr + rank, mask=rank < num_near, other=-(2**63))
    packed = tl.sort(packed, descending=True)
    score = score_of(value_of(packed), highest, inverse)
    weight = tl.where(rank < num_near, tl.exp(score), 0.0).to(tl.float64)
    splits = tl.arange(0, MAX_SPLITS)
    total = tl.sum(tl.load(weights_ptr + splits, mask=splits < num_splits, other=0.0), axis=0)
    last_rank = tl.where((top_k > 0) & (top_k < V), top_k, V)
    if last_rank <= num_near:
        total = tl.sum(tl.where(rank < last_rank, weight, 0.0), axis=0)
    wanted = tl.where(top_p < 1.0, top_p * total, float("inf"))
    reached = tl.cumsum(weight, axis=0)
    is_kept = (rank == 0) | ((rank < last_rank) & (reached - weight < wanted))
    cut = tl.min(tl.where(is_kept, packed, 2**63 - 1), axis=0)
    is_among = (last_rank <= num_near) | ((last_rank == V) & (tl.sum(weight, axis=0) >= wanted) & (num_near > 0))
    return cut, is_among


@triton.jit
def _above(
    row_ptr, pivot, highest, inverse, V: tl.constexpr, BLOCK: tl.constexpr, IS_ADJUSTED: tl.constexpr
):  # fmt: skip
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
        weight += tl.where(order > pivot, tl.exp(score_of(x, highest, inverse)), 0.0)
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
def _cut_by_bisection(
    row_ptr, highest, highest_order, inverse, top_k, top_p, V: tl.constexpr, BLOCK: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
):  # fmt: skip
    # The order of the last value kept (at first that of -inf), how many ids have it, and how many of those are kept.
    last = tl.full((), -2139095041, tl.int32)
    num_equal = tl.full((), 2**31 - 1, tl.int32)
    num_last = num_equal
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
        last_weight = tl.exp(score_of(value_of_order(last), highest, inverse)).to(tl.float64)
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
        low_weight = tl.exp(score_of(value_of_order(low), highest, inverse)).to(tl.float64)
        # Equal weights: the j-th of them is kept while those before it weigh less than what is wanted.
        share = tl.ceil((wanted - weight) / tl.maximum(low_weight, 1e-300))
        num_kept = tl.maximum(tl.minimum(share, num_equal.to(tl.float64)), 1.0).to(tl.int32)
        num_last = tl.where(low == last, tl.minimum(num_kept, num_last), num_kept)
        last = low
    cut = last.to(tl.int64) << 32
    if num_last < num_equal:
        cut += 0xFFFFFFFF - _id_of_equal(row_ptr, last, num_last, V, BLOCK, IS_ADJUSTED).to(tl.int64)
    return cut


@triton.jit
def _min_p_cut(highest, highest_order, temperature, min_p):
    """The cut before the lowest value with at least min_p times the probability of the highest."""
    low = tl.full((), -2139095041, tl.int32)
    high = highest_order
    while low < high:
        middle = _middle(low, high)
        distance = value_of_order(middle).to(tl.float64) - highest.to(tl.float64)
        if tl.exp(distance / temperature) >= min_p:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int64) << 32


@triton.jit(do_not_specialize=["num_splits"])
def _cut_off_kernel(
    logits_ptr, highest_ptr, row_slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, histogram_ptr, counts_ptr,
    weights_ptr, packed_ptr, cut_ptr, stride, num_splits, V: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr, MAX_SPLITS: tl.constexpr, BUCKETS: tl.constexpr, IS_ADJUSTED: tl.constexpr,
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
    if is_ranked(temperature, highest, top_k, top_p, V):
        inverse = bounded_inverse(temperature)
        num_near = tl.load(counts_ptr + row)
        cut, is_among = _cut_among(
            packed_ptr + row * CANDIDATES, weights_ptr + row * MAX_SPLITS, num_near, num_splits, highest, inverse,
            top_k, top_p, V, CANDIDATES, MAX_SPLITS,
        )  # fmt: skip
        if is_among == 0:
            row_ptr = logits_ptr + row * stride
            cut = _cut_by_bisection(row_ptr, highest, highest_order, inverse, top_k, top_p, V, BLOCK, IS_ADJUSTED)
        # Left as it was found, for the next call.
        tl.store(histogram_ptr + row * BUCKETS + tl.arange(0, BUCKETS), tl.zeros((BUCKETS,), tl.int32))
        tl.store(counts_ptr + row, 0)
    if (min_p > 0.0) & (temperature > 0.0) & (highest > float("-inf")):
        cut = tl.maximum(cut, _min_p_cut(highest, highest_order, temperature, min_p))
    tl.store(cut_ptr + row, cut)


def cut_off(
    logits_TV: torch.Tensor,
    params: SampleParams,
    row_slots_T: torch.Tensor,
    highest_T: torch.Tensor,
    scratch: CandidateScratch,
    cut_T: torch.Tensor,
    splits: int,
    num_blocks: int,
    *,
    is_adjusted: bool,
) -> None:
    """Writes each row's cut, int64 [>= T]: an id is kept if its packed (value, id) is not below it.

    highest int64 [T] holds the packed maxima of the rows. Rows that are greedy or have no filter keep all. `splits`
    programs a row collect the candidates, of `num_blocks` blocks of ids each.
    """
    num_rows, vocab_size = logits_TV.shape
    assert highest_T.shape == (num_rows,) and highest_T.dtype == cut_T.dtype == torch.int64
    collect(logits_TV, params, row_slots_T, highest_T, scratch, splits, num_blocks, is_adjusted=is_adjusted)
    _cut_off_kernel[(num_rows,)](
        logits_TV, highest_T, row_slots_T, params.temperature_S, params.top_k_S, params.top_p_S, params.min_p_S,
        scratch.histogram_TB, scratch.counts_T, scratch.weights_TS, scratch.packed_TC, cut_T, logits_TV.stride(0),
        splits, V=vocab_size, BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        CANDIDATES=scratch.packed_TC.shape[1], MAX_SPLITS=scratch.weights_TS.shape[1],
        BUCKETS=scratch.histogram_TB.shape[1], IS_ADJUSTED=is_adjusted, num_warps=16,
    )  # fmt: skip
