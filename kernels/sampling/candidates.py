"""The few ids of a row that filters decide on, found in two passes over the logits by many programs at once.

    survey    how many ids lie how far below the highest score (a histogram), and what all weigh together
    collect   the packed (value, id) of those nearer than the distance within which at most C ids lie

Scores are (value - highest) / temperature, weights their exponentials. T rows, V vocabulary, S splits of a row, C
candidates, B buckets of the histogram.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.sample_params import SampleParams, packed_order, value_of

BLOCK = 1024
"""Ids that a program looks at together: a constant, so that no sum depends on how rows are cut."""
_BUCKETS = 256
# Eight buckets an e-fold: the last holds all that lies 32 and more below, e^-32 of the highest.
_PER_NAT = 8


class CandidateScratch:
    """Device memory of the candidates of up to `max_rows` rows; histogram and counts are zero between calls."""

    def __init__(self, max_rows: int, max_splits: int, num_candidates: int, device: torch.device) -> None:
        assert num_candidates & (num_candidates - 1) == 0, num_candidates
        self.histogram_TB = torch.zeros(max_rows, _BUCKETS, dtype=torch.int32, device=device)
        self.counts_T = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.weights_TS = torch.zeros(max_rows, max_splits, dtype=torch.float64, device=device)
        self.packed_TC = torch.empty(max_rows, num_candidates, dtype=torch.int64, device=device)


@triton.jit
def bounded_inverse(temperature):
    """1 / temperature as float32, bounded so that no score is NaN: at 1e30 only the highest weighs anything anyway."""
    return tl.minimum(1.0 / temperature, 1e30).to(tl.float32)


@triton.jit
def score_of(x, highest, inverse):
    """float32, 0 of the highest; NaN as -inf; where the highest is +inf, all below it are at -inf."""
    distance = tl.where(highest == float("inf"), tl.where(x == highest, 0.0, float("-inf")), x - highest)
    return tl.where(x == x, distance * inverse, float("-inf"))


@triton.jit
def is_ranked(temperature, highest, top_k, top_p, V: tl.constexpr):
    """True if the row's ranking matters: it is sampled, and has a top-k or a top-p that keeps less than all."""
    has_top_k = (top_k > 0) & (top_k < V)
    return (temperature > 0.0) & (highest > float("-inf")) & (has_top_k | (top_p < 1.0))


@triton.jit
def _bucket(score, PER_NAT: tl.constexpr, BUCKETS: tl.constexpr):
    return tl.minimum(-score * PER_NAT, BUCKETS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["num_blocks"])
def _survey_kernel(
    logits_ptr, highest_ptr, row_slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, histogram_ptr, weights_ptr, stride,
    num_blocks, V: tl.constexpr, BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, PER_NAT: tl.constexpr,
    BUCKETS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    highest = value_of(tl.load(highest_ptr + row))
    if is_ranked(temperature, highest, tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), V):
        inverse = bounded_inverse(temperature)
        histogram = tl.zeros((BUCKETS,), tl.int32)
        weight = tl.full((), 0.0, tl.float64)
        block = split * num_blocks
        end = tl.minimum(block + num_blocks, (V + BLOCK - 1) // BLOCK)
        while block < end:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            mask = ids < V
            x = tl.load(logits_ptr + row * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
            score = score_of(x, highest, inverse)
            histogram += tl.histogram(_bucket(score, PER_NAT, BUCKETS), BUCKETS, mask=mask)
            # Sums of blocks do not depend on how many blocks a program has, and so not on the batch.
            weight += tl.sum(tl.exp(score), axis=0).to(tl.float64)
            block += 1
        buckets = tl.arange(0, BUCKETS)
        at = histogram_ptr + row * BUCKETS + buckets
        tl.atomic_add(at, histogram, mask=histogram > 0, sem="relaxed")
        tl.store(weights_ptr + row * MAX_SPLITS + split, weight)


@triton.jit(do_not_specialize=["num_blocks"])
def _collect_kernel(
    logits_ptr, highest_ptr, row_slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, histogram_ptr, counts_ptr,
    packed_ptr, stride, num_blocks, V: tl.constexpr, BLOCK: tl.constexpr, PER_NAT: tl.constexpr,
    BUCKETS: tl.constexpr, CANDIDATES: tl.constexpr, IS_ADJUSTED: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    highest = value_of(tl.load(highest_ptr + row))
    if is_ranked(temperature, highest, tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), V):
        inverse = bounded_inverse(temperature)
        within = tl.cumsum(tl.load(histogram_ptr + row * BUCKETS + tl.arange(0, BUCKETS)), axis=0)
        # The last bucket has no bottom.
        num_buckets = tl.minimum(tl.sum((within <= CANDIDATES).to(tl.int32), axis=0), BUCKETS - 1)
        block = split * num_blocks
        end = tl.minimum(block + num_blocks, (V + BLOCK - 1) // BLOCK)
        while block < end:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            mask = ids < V
            x = tl.load(logits_ptr + row * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
            score = score_of(x, highest, inverse)
            is_near = (mask & (_bucket(score, PER_NAT, BUCKETS) < num_buckets)).to(tl.int32)
            num_near = tl.sum(is_near, axis=0)
            if num_near > 0:
                # In the order of arrival: whoever reads them sorts them.
                first = tl.atomic_add(counts_ptr + row, num_near, sem="relaxed")
                at = row * CANDIDATES + first + tl.cumsum(is_near, axis=0) - 1
                tl.store(packed_ptr + at, packed_order(x, ids, IS_ADJUSTED), mask=is_near > 0)
            block += 1


def collect(
    logits_TV: torch.Tensor,
    params: SampleParams,
    row_slots_T: torch.Tensor,
    highest_T: torch.Tensor,
    scratch: CandidateScratch,
    splits: int,
    num_blocks: int,
    *,
    is_adjusted: bool,
) -> None:
    """Fills the scratch for rows with top-k or top-p: counts, packed candidates in any order, weights of all splits.

    `splits` programs a row look at `num_blocks` times BLOCK ids each. The caller zeroes histogram and counts.
    """
    num_rows, vocab_size = logits_TV.shape
    assert splits <= scratch.weights_TS.shape[1], splits
    arrays = (logits_TV, highest_T, row_slots_T, params.temperature_S, params.top_k_S, params.top_p_S)
    _survey_kernel[(splits, num_rows)](
        *arrays, scratch.histogram_TB, scratch.weights_TS, logits_TV.stride(0), num_blocks, V=vocab_size,
        BLOCK=BLOCK, MAX_SPLITS=scratch.weights_TS.shape[1], PER_NAT=_PER_NAT, BUCKETS=_BUCKETS, num_warps=4,
    )  # fmt: skip
    _collect_kernel[(splits, num_rows)](
        *arrays, scratch.histogram_TB, scratch.counts_T, scratch.packed_TC, logits_TV.stride(0), num_blocks,
        V=vocab_size, BLOCK=BLOCK, PER_NAT=_PER_NAT, BUCKETS=_BUCKETS, CANDIDATES=scratch.packed_TC.shape[1],
        IS_ADJUSTED=is_adjusted, num_warps=4,
    )  # fmt: skip
