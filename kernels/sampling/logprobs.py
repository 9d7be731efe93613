"""Logprobs of sampled tokens and of the most likely ids, as the CPU tells them (`daemons/worker/sampling/logprobs.py`).

Of the model's own logits in float32, before penalties and temperature: NaN counts as -inf, +inf shares all of the
probability. T rows, V vocabulary, S splits of a row (as an index: slots), K alternatives, R rows of a ring,
L = 1 + 2 K numbers. Rows whose slot asks for nothing cost programs that return at once.

    survey    of each split of a row: the highest value, the sum of exponentials below it, the K best (value, id)
    finish    the row's log-sum-exp; logprobs of its token and of the K best of all splits
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.daemons.runtime.sampling import MAX_TOP_LOGPROBS
from radixmesh.kernels.sampling.candidates import BLOCK
from radixmesh.kernels.sampling.sample_params import SampleParams, packed_order, value_of

# Whatever the batch: sums depend on how a row is cut, and in deterministic mode no bit may depend on other rows.
_MAX_SPLITS = 32


class LogprobScratch:
    """Device memory that `token_logprobs` works in, for up to `max_rows` rows and `max_top` alternatives."""

    def __init__(self, max_rows: int, max_top: int, device: torch.device) -> None:
        self.max_top = max_top
        self.width = triton.next_power_of_2(max(max_top, 1))
        self.highest_TS = torch.empty(max_rows, _MAX_SPLITS, dtype=torch.float32, device=device)
        self.weights_TS = torch.empty(max_rows, _MAX_SPLITS, dtype=torch.float64, device=device)
        self.best_TSK = torch.empty(max_rows, _MAX_SPLITS, self.width, dtype=torch.int64, device=device)


@triton.jit
def _below(x, highest):
    """x - highest as float32, where +inf is all of the probability and what is below it none."""
    infinite = tl.where(x == float("inf"), 0.0, float("-inf"))
    return tl.where(highest == float("inf"), infinite, tl.where(highest == float("-inf"), float("-inf"), x - highest))


@triton.jit(do_not_specialize=["num_blocks"])
def _survey_kernel(
    logits_ptr, row_slots_ptr, num_top_ptr, highest_ptr, weights_ptr, best_ptr, stride, num_blocks, V: tl.constexpr,
    BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_top = tl.load(num_top_ptr + tl.load(row_slots_ptr + row).to(tl.int64))
    if num_top >= 0:
        lane = tl.arange(0, WIDTH)
        # A lane without an alternative is never the least.
        best = tl.where(lane < num_top, tl.full((WIDTH,), -(2**63), tl.int64), tl.full((WIDTH,), 2**63 - 1, tl.int64))
        highest = tl.full((), float("-inf"), tl.float32)
        weight = tl.full((), 0.0, tl.float64)
        block = split * num_blocks
        end = tl.minimum(block + num_blocks, (V + BLOCK - 1) // BLOCK)
        while block < end:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            mask = ids < V
            x = tl.load(logits_ptr + row * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
            x = tl.where(x == x, x, float("-inf"))
            block_highest = tl.max(x, axis=0)
            above = tl.maximum(highest, block_highest)
            weight = weight * tl.exp(_below(highest, above)).to(tl.float64)
            weight += tl.sum(tl.exp(_below(x, above)), axis=0).to(tl.float64)
            highest = above
            packed = tl.where(mask, packed_order(x, ids, False), -(2**63))
            candidate = tl.max(packed, axis=0)
            least = tl.min(best, axis=0)
            # Most blocks end here at once: the best ones are found early.
            while candidate > least:
                first = tl.min(tl.where(best == least, lane, WIDTH), axis=0)
                best = tl.where(lane == first, candidate, best)
                packed = tl.where(packed == candidate, -(2**63), packed)
                candidate = tl.max(packed, axis=0)
                least = tl.min(best, axis=0)
            block += 1
        at = row * MAX_SPLITS + split
        tl.store(highest_ptr + at, highest)
        tl.store(weights_ptr + at, weight)
        tl.store(best_ptr + at * WIDTH + lane, tl.where(lane < num_top, best, -(2**63)))


@triton.jit(do_not_specialize=["num_splits", "ring_stride", "row_stride", "tokens_stride"])
def _finish_logprobs_kernel(
    logits_ptr, row_slots_ptr, num_top_ptr, tokens_ptr, ring_index_ptr, highest_ptr, weights_ptr, best_ptr, ring_ptr, V,
    stride, num_splits, ring_stride, row_stride, tokens_stride, MAX_SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(num_top_ptr + tl.load(row_slots_ptr + row).to(tl.int64))
    if num_top >= 0:
        ring_index = tl.load(ring_index_ptr).to(tl.int64)
        token = tl.load(tokens_ptr + ring_index * tokens_stride + row)
        splits = tl.arange(0, MAX_SPLITS)
        is_split = splits < num_splits
        highests = tl.load(highest_ptr + row * MAX_SPLITS + splits, mask=is_split, other=float("-inf"))
        weights = tl.load(weights_ptr + row * MAX_SPLITS + splits, mask=is_split, other=0.0)
        highest = tl.max(highests, axis=0)
        total = tl.sum(weights * tl.exp(_below(highests, highest)).to(tl.float64), axis=0)
        normaliser = tl.log(tl.maximum(total, 1e-300)).to(tl.float32)
        # A row that yields nothing in this step has -1; nobody reads its logprobs.
        own = tl.load(logits_ptr + row * stride + tl.maximum(token, 0)).to(tl.float32)
        own = tl.where(own == own, own, float("-inf"))
        to_ptr = ring_ptr + ring_index * ring_stride + row * row_stride
        tl.store(to_ptr, (_below(own, highest) - normaliser).to(tl.int32, bitcast=True))
        lane = tl.arange(0, WIDTH)
        at = row * MAX_SPLITS * WIDTH + splits[:, None] * WIDTH + lane[None, :]
        packed = tl.load(best_ptr + at, mask=is_split[:, None], other=-(2**63))
        # In the order of what is told: two values may round to one logprob, and then the lower id comes first.
        told = _below(value_of(packed), highest) - normaliser
        ids = (0xFFFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)
        packed = tl.where(packed == -(2**63), -(2**63), packed_order(told, ids, False))
        rank = tl.full((), 0, tl.int32)
        while rank < num_top:
            first = tl.max(tl.max(packed, axis=1), axis=0)
            tl.store(to_ptr + 1 + rank, (0xFFFFFFFF - (first & 0xFFFFFFFF)).to(tl.int32))
            tl.store(to_ptr + 1 + num_top + rank, value_of(first).to(tl.int32, bitcast=True))
            packed = tl.where(packed == first, -(2**63), packed)
            rank += 1


def token_logprobs(
    logits_TV: torch.Tensor,
    row_slots_T: torch.Tensor,
    num_top_S: torch.Tensor,
    tokens_RT: torch.Tensor,
    ring_index_1: torch.Tensor,
    scratch: LogprobScratch,
    ring_RTL: torch.Tensor,
) -> None:
    """Writes the logprobs of each row whose slot asks for some into ring_RTL[ring_index_1[0]], int32 [>= T, L].

    logits [T, V] of float32, float16 or bfloat16, ids contiguous; not modified. num_top_S int32 by slot: alternatives
    that are asked for, at most `scratch.max_top` and V; -1: no logprobs. tokens_RT[ring_index_1[0], t] is the row's
    token. A row of the ring holds the bits of the token's logprob, then num_top ids, then the bits of their logprobs,
    by (logprob descending, id ascending).
    """
    num_rows, vocab_size = logits_TV.shape
    _check(logits_TV, row_slots_T, num_top_S, tokens_RT, scratch, ring_RTL)
    blocks = triton.cdiv(vocab_size, BLOCK)
    num_blocks = triton.cdiv(blocks, _MAX_SPLITS)
    splits = triton.cdiv(blocks, num_blocks)
    _survey_kernel[(splits, num_rows)](
        logits_TV, row_slots_T, num_top_S, scratch.highest_TS, scratch.weights_TS, scratch.best_TSK,
        logits_TV.stride(0), num_blocks, V=vocab_size, BLOCK=BLOCK, MAX_SPLITS=_MAX_SPLITS, WIDTH=scratch.width,
        num_warps=4,
    )  # fmt: skip
    _finish_logprobs_kernel[(num_rows,)](
        logits_TV, row_slots_T, num_top_S, tokens_RT, ring_index_1, scratch.highest_TS, scratch.weights_TS,
        scratch.best_TSK, ring_RTL, vocab_size, logits_TV.stride(0), splits, ring_RTL.stride(0), ring_RTL.stride(1),
        tokens_RT.stride(0), MAX_SPLITS=_MAX_SPLITS, WIDTH=scratch.width, num_warps=4,
    )  # fmt: skip


def compile_logprobs(params: SampleParams, vocab_size: int, dtype: torch.dtype) -> None:
    """Runs the kernels once for the dummy slot, with logits of `dtype`: no request waits for a compiler."""
    device = params.num_top_S.device
    zeros_T = torch.zeros(1, dtype=torch.int32, device=device)
    num_top_S = torch.ones_like(params.num_top_S)
    ring_RTL = torch.zeros(1, 1, 1 + 2 * MAX_TOP_LOGPROBS, dtype=torch.int32, device=device)
    scratch = LogprobScratch(1, MAX_TOP_LOGPROBS, device)
    logits_TV = torch.zeros(1, vocab_size, dtype=dtype, device=device)
    token_logprobs(logits_TV, zeros_T, num_top_S, zeros_T[None], zeros_T, scratch, ring_RTL)


def _check(
    logits_TV: torch.Tensor,
    row_slots_T: torch.Tensor,
    num_top_S: torch.Tensor,
    tokens_RT: torch.Tensor,
    scratch: LogprobScratch,
    ring_RTL: torch.Tensor,
) -> None:
    num_rows = len(logits_TV)
    assert logits_TV.stride(1) == 1 and num_rows <= len(scratch.highest_TS), (logits_TV.shape, logits_TV.stride())
    assert row_slots_T.dtype == num_top_S.dtype == tokens_RT.dtype == ring_RTL.dtype == torch.int32
    assert row_slots_T.shape == (num_rows,) and num_rows <= ring_RTL.shape[1], (row_slots_T.shape, ring_RTL.shape)
    assert ring_RTL.shape[2] >= 1 + 2 * scratch.max_top and ring_RTL.stride(2) == 1, ring_RTL.shape
    assert tokens_RT.stride(1) == 1 and num_rows <= tokens_RT.shape[1], tokens_RT.shape
