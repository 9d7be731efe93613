"""Adjustments of logits before sampling: penalties, biases, suppressed ids (CPU: `sampling/penalties.py`).

Counts of a slot's tokens are made from its token list for the rows of this call: tables of every slot over a big
vocabulary would not fit. T rows, V vocabulary, S slots, L tokens of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.sample_params import Branches, SampleParams

_BLOCK = 1024
_LIST_BLOCK = 256


@triton.jit
def _is_penalised(slot, repetition_ptr, frequency_ptr, presence_ptr):
    has_repetition = tl.load(repetition_ptr + slot) != 1.0
    return has_repetition | (tl.load(frequency_ptr + slot) != 0.0) | (tl.load(presence_ptr + slot) != 0.0)


@triton.jit
def _count_kernel(
    tokens_ptr, prompt_len_ptr, repetition_ptr, frequency_ptr, presence_ptr, row_slots_ptr, positions_ptr,
    branch_starts_ptr, branch_ids_ptr, counts_ptr, V, tokens_stride, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    first = tl.program_id(0) * BLOCK
    if first < position:
        if _is_penalised(slot, repetition_ptr, frequency_ptr, presence_ptr):
            at = first + tl.arange(0, BLOCK)
            ids = tl.load(tokens_ptr + slot * tokens_stride + at, mask=at < position, other=-1)
            if branch_ids_ptr is not None:
                step = at - tl.load(branch_starts_ptr + row)
                is_branch = (step >= 0) & (at < position)
                ids = tl.where(is_branch, tl.load(branch_ids_ptr + row * D + step, mask=is_branch, other=-1), ids)
            is_valid = (ids >= 0) & (ids < V)
            is_output = at >= tl.load(prompt_len_ptr + slot)
            # Low bits: number of times that the output has the id. Bit 30: the prompt has it.
            tl.atomic_add(counts_ptr + row * V + ids, 1, mask=is_valid & is_output, sem="relaxed")
            tl.atomic_or(counts_ptr + row * V + ids, 1 << 30, mask=is_valid & ~is_output, sem="relaxed")


@triton.jit
def _adjust_kernel(
    logits_ptr, counts_ptr, repetition_ptr, frequency_ptr, presence_ptr, row_slots_ptr, adjusted_ptr, V, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < V
    x = tl.load(logits_ptr + row * stride + ids, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    if _is_penalised(slot, repetition_ptr, frequency_ptr, presence_ptr):
        count = tl.load(counts_ptr + row * V + ids, mask=mask, other=0)
        tl.store(counts_ptr + row * V + ids, tl.zeros_like(count), mask=mask & (count != 0))
        repetition = tl.load(repetition_ptr + slot)
        repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(count != 0, repeated, x)
        num_output = (count & 0x3FFFFFFF).to(tl.float32)
        penalised = x - tl.load(frequency_ptr + slot) * num_output - tl.load(presence_ptr + slot)
        x = tl.where(num_output > 0, penalised, x)
    tl.store(adjusted_ptr + row * V + ids, x, mask=mask)


@triton.jit
def _bias_kernel(
    adjusted_ptr, bias_ids_ptr, bias_values_ptr, num_biases_ptr, suppressed_ids_ptr, num_suppressed_ptr,
    prompt_len_ptr, min_tokens_ptr, row_slots_ptr, positions_ptr, V, bias_stride, suppressed_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    num_biases = tl.load(num_biases_ptr + slot)
    # The interpreter has no range of a loaded value.
    start = tl.full((), 0, tl.int32)
    while start < num_biases:
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids_ptr + slot * bias_stride + at, mask=at < num_biases, other=-1)
        mask = (ids >= 0) & (ids < V)
        bias = tl.load(bias_values_ptr + slot * bias_stride + at, mask=mask, other=0.0)
        x = tl.load(adjusted_ptr + row * V + ids, mask=mask, other=0.0)
        tl.store(adjusted_ptr + row * V + ids, x + bias, mask=mask)
        start += BLOCK
    # An id may be both: suppression is written last.
    tl.debug_barrier()
    num_output = tl.load(positions_ptr + row) - tl.load(prompt_len_ptr + slot)
    if num_output < tl.load(min_tokens_ptr + slot):
        num_suppressed = tl.load(num_suppressed_ptr + slot)
        start = tl.full((), 0, tl.int32)
        while start < num_suppressed:
            at = start + tl.arange(0, BLOCK)
            ids = tl.load(suppressed_ids_ptr + slot * suppressed_stride + at, mask=at < num_suppressed, other=-1)
            marks = tl.full((BLOCK,), float("nan"), tl.float32)
            tl.store(adjusted_ptr + row * V + ids, marks, mask=(ids >= 0) & (ids < V))
            start += BLOCK


def adjust(
    logits_TV: torch.Tensor,
    params: SampleParams,
    row_slots_T: torch.Tensor,
    positions_T: torch.Tensor,
    counts_TV: torch.Tensor,
    adjusted_TV: torch.Tensor,
    branches: Branches | None = None,
) -> None:
    """Writes the adjusted rows, float32 [>= T, V]: NaN in logits as -inf, and NaN for what is suppressed.

    counts int32 [>= T, V] are all zero before and after. Ids outside [0, V) have no effect. The order and the
    rounding of each step are the CPU sampler's. branches: tokens that penalties count in the place of the slots' own.
    """
    num_rows, vocab_size = logits_TV.shape
    assert counts_TV.shape[1] == adjusted_TV.shape[1] == vocab_size and counts_TV.is_contiguous()
    assert counts_TV.dtype == torch.int32 and adjusted_TV.dtype == torch.float32 and adjusted_TV.is_contiguous()
    penalties = (params.repetition_S, params.frequency_S, params.presence_S)
    tokens_SL = params.tokens_SL
    starts_T, ids_TD = (None, None) if branches is None else branches
    _count_kernel[(triton.cdiv(tokens_SL.shape[1], _BLOCK), num_rows)](
        tokens_SL, params.prompt_len_S, *penalties, row_slots_T, positions_T, starts_T, ids_TD, counts_TV, vocab_size,
        tokens_SL.stride(0), D=1 if ids_TD is None else ids_TD.shape[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    # A product and a difference in one rounding would not be the CPU's.
    _adjust_kernel[(triton.cdiv(vocab_size, _BLOCK), num_rows)](
        logits_TV, counts_TV, *penalties, row_slots_T, adjusted_TV, vocab_size, logits_TV.stride(0), BLOCK=_BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _bias_kernel[(num_rows,)](
        adjusted_TV, params.bias_ids_SB, params.bias_values_SB, params.num_biases_S, params.suppressed_ids_SU,
        params.num_suppressed_S, params.prompt_len_S, params.min_tokens_S, row_slots_T, positions_T, vocab_size,
        params.bias_ids_SB.stride(0), params.suppressed_ids_SU.stride(0), BLOCK=_LIST_BLOCK, num_warps=4,
    )  # fmt: skip
