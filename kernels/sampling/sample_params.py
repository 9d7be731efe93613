"""Shared by the sampler's kernels: parameters by slot on the device, and values as integers in rank order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Needs(IntFlag):
    """Sampling options beyond an argmax: noise; top-k, top-p or min-p; penalties, biases or suppressed ids; logprobs,
    which change no token."""

    NOTHING = 0
    NOISE = 1
    FILTERS = 2
    PENALTIES = 4
    LOGPROBS = 8


class Branches(NamedTuple):
    """Ends of rows that are not in their slot's tokens, int32: of row t the token at position starts_T[t] + n is
    ids_TD[t, n]."""

    starts_T: torch.Tensor
    ids_TD: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """Device arrays by slot [S], one more than there are slots: the last is the dummy slot of padding rows, greedy.

    L is the most tokens of a slot, B the most biases, U the most suppressed ids. Meanings and defaults are those of
    `daemons.runtime.sampling.Sampling`.
    """

    temperature_S: torch.Tensor
    """float64; 0 is greedy."""
    seed_S: torch.Tensor
    """int64 with the bits of the unsigned seed."""
    top_k_S: torch.Tensor
    """int32; 0 keeps all."""
    top_p_S: torch.Tensor
    """float64; 1 keeps all."""
    min_p_S: torch.Tensor
    """float64; 0 keeps all."""
    repetition_S: torch.Tensor
    """float32; 1 for none."""
    frequency_S: torch.Tensor
    """float32; 0 for none."""
    presence_S: torch.Tensor
    """float32; 0 for none."""
    prompt_len_S: torch.Tensor
    """int32: tokens before are the prompt's, from there to the sampled one the output's."""
    tokens_SL: torch.Tensor
    """int32: prompt and output of the slot, up to the position of the token to sample."""
    bias_ids_SB: torch.Tensor
    """int32; each id once."""
    bias_values_SB: torch.Tensor
    """float32."""
    num_biases_S: torch.Tensor
    """int32: how many of a slot's biases count."""
    suppressed_ids_SU: torch.Tensor
    """int32."""
    num_suppressed_S: torch.Tensor
    """int32: how many of a slot's suppressed ids count."""
    min_tokens_S: torch.Tensor
    """int32: ids are suppressed while the output has fewer tokens."""
    num_top_S: torch.Tensor
    """int32: alternatives whose logprobs are asked for; -1: no logprobs."""

    @classmethod
    def allocate(
        cls, num_slots: int, *, max_total_len: int, max_biases: int, max_suppressed: int, device: torch.device
    ) -> SampleParams:
        """Of `num_slots` slots and a dummy, all greedy with no option set."""
        size = num_slots + 1

        def full(dtype: torch.dtype, value: float, *shape: int) -> torch.Tensor:
            return torch.full((size, *shape), value, dtype=dtype, device=device)

        return cls(
            temperature_S=full(torch.float64, 0.0),
            seed_S=full(torch.int64, 0),
            top_k_S=full(torch.int32, 0),
            top_p_S=full(torch.float64, 1.0),
            min_p_S=full(torch.float64, 0.0),
            repetition_S=full(torch.float32, 1.0),
            frequency_S=full(torch.float32, 0.0),
            presence_S=full(torch.float32, 0.0),
            prompt_len_S=full(torch.int32, 0),
            tokens_SL=full(torch.int32, 0, max_total_len),
            bias_ids_SB=full(torch.int32, 0, max_biases),
            bias_values_SB=full(torch.float32, 0.0, max_biases),
            num_biases_S=full(torch.int32, 0),
            suppressed_ids_SU=full(torch.int32, 0, max_suppressed),
            num_suppressed_S=full(torch.int32, 0),
            min_tokens_S=full(torch.int32, 0),
            num_top_S=full(torch.int32, -1),
        )


@triton.jit
def order_of(x, IS_ADJUSTED: tl.constexpr):
    """int32 that orders float32 values: -0 as +0, NaN as -inf, or below it where NaN marks what is suppressed."""
    is_nan = x != x
    x = tl.where(is_nan, float("-inf"), tl.where(x == 0.0, 0.0, x))
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    if IS_ADJUSTED:
        order = tl.where(is_nan, -(2**31), order)
    return order


@triton.jit
def packed_order(x, ids, IS_ADJUSTED: tl.constexpr):
    """int64 that orders (value, id): the larger value first, then the lower id."""
    return (order_of(x, IS_ADJUSTED).to(tl.int64) << 32) + (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def value_of_order(order):
    """The float32 value of an int32 order; what is suppressed reads as -inf."""
    order = tl.where(order == -(2**31), -2139095041, order)
    return tl.where(order >= 0, order, order ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def value_of(packed):
    """The float32 value of a packed (value, id)."""
    return value_of_order((packed >> 32).to(tl.int32))
