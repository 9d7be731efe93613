"""Tolerances that follow from the sizes of a computation and from the epsilon of its dtype, for any CPU.

Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), sections 3.1 and 3.4; the square root: Higham and
Mary (2019). u is the unit roundoff, half of epsilon. A sum of n products is off by at most n x u times the sum of the
terms' magnitudes, in whatever order a library adds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # Slow to import, and the tests of kernels need none of it.

# Roundings of one element on its way through a layer: norms, GEMMs, RoPE, softmax, gate, two additions.
_ROUNDINGS_A_LAYER = 12
# Largest of all sums of random terms, in standard deviations: of some millions, and of those on the way to them.
_TAIL_OF_SUMS = 6
# Errors of a GEMM and of a tensor core's together, in units of the first.
_TWO_PRODUCTS = 4
# GEMMs of a layer whose rows are made FP8: QKV, output, gate and up, down.
_FP8_GEMMS_A_LAYER = 4
# Mean of 1 / m^2 over mantissas m in [1, 2), which are spread evenly by their logarithms (Benford).
_MANTISSAS = 3 / (8 * math.log(2))
# Largest of some thousands of normal numbers, in standard deviations.
_TAIL = 4.5
# exp, tanh and their like are off by some units in the last place, and so is a division or a root.
_FUNCTION_ROUNDINGS = 4


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding a number once."""
    return float(torch.finfo(dtype).eps) / 2


Magnitude = TypeVar("Magnitude", float, torch.Tensor)


def sum_tolerance(num_terms: int, magnitude: Magnitude, dtype: torch.dtype = torch.float32) -> Magnitude:
    """Largest absolute error of a sum of products. magnitude: of the terms together, the sum of |x| x |w|."""
    n_u = (num_terms + _FUNCTION_ROUNDINGS) * unit_roundoff(dtype)
    assert n_u < 0.5, f"{num_terms} terms in {dtype} have no digit to compare"
    return magnitude * (n_u / (1 - n_u))


def kernel_tolerance(dtype: torch.dtype, num_terms: int, magnitude: float) -> dict[str, float]:
    """rtol and atol of two computations in float32, each off by `sum_tolerance` and then rounded to `dtype` twice."""
    return {"rtol": 4 * unit_roundoff(dtype), "atol": 2 * sum_tolerance(num_terms, magnitude)}


def random_gemm_tolerance(dtype: torch.dtype, num_terms: int, expected: torch.Tensor) -> dict[str, float]:
    """rtol and atol of two GEMMs of random rows, added in float32, of which intermediate results are of `dtype`.

    The magnitudes of n random terms are together sqrt(n) times their sum, and roundings add like a random walk: n x u
    times the largest sum, with room for the tail of it.
    """
    largest, unit = float(expected.abs().max()), unit_roundoff(dtype)
    intermediate = 0.0 if dtype is torch.float32 else 4 * unit * largest
    return {"rtol": 4 * unit, "atol": 6 * num_terms * unit_roundoff(torch.float32) * largest + intermediate}


def gemm_magnitude(x_TK: torch.Tensor, w_NK: torch.Tensor, *, is_random: bool = False) -> torch.Tensor:
    """[T, N] float64: the largest that sums of each dot product's terms can get, in whatever order they are added.

    is_random: the terms have random signs, so that their partial sums stay within some standard deviations.
    """
    x_TK, w_NK = x_TK.double(), w_NK.double()
    if is_random:
        return _TAIL_OF_SUMS * (x_TK.square() @ w_NK.square().t()).sqrt()
    return x_TK.abs() @ w_NK.abs().t()


def rounding_tolerance(expected: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Largest difference of numbers that were `error` apart and then each rounded to the dtype of `expected`."""
    unit = unit_roundoff(expected.dtype)
    # Below the smallest normal number steps are as large as there.
    return error + 2 * unit * (expected.double().abs() + error + torch.finfo(expected.dtype).tiny)


def gemm_tolerance(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    expected_TN: torch.Tensor,
    residual_TN: torch.Tensor | None = None,
    *,
    is_random: bool = False,
) -> torch.Tensor:
    """[T, N]: largest difference of two GEMMs added in float32 in any order, of which one may be a tensor core's.
    is_random: as `gemm_magnitude` has it.

    Tensor cores cut what others round, sixteen terms and a sum at a time: off by less than 3 u for each term.
    """
    magnitude_TN = gemm_magnitude(x_TK, w_NK, is_random=is_random)
    if residual_TN is not None:
        magnitude_TN = magnitude_TN + residual_TN.double().abs()
    return rounding_tolerance(expected_TN, _TWO_PRODUCTS * sum_tolerance(x_TK.shape[1] + 1, magnitude_TN))


def gated_tolerance(
    x_TK: torch.Tensor,
    w_2FK: torch.Tensor,
    expected_TF: torch.Tensor,
    factor_T1: torch.Tensor | None = None,
    *,
    is_random: bool = False,
) -> torch.Tensor:
    """[T, F]: largest difference of two silu(gate) x up of float32 GEMMs, rounded once at the end.

    factor_T1: the inverse RMS that both GEMMs are multiplied by, itself of a sum of K numbers of one sign.
    """
    factor = 1.0 if factor_T1 is None else factor_T1.double()
    gate_TF, up_TF = (x_TK.double() @ w_2FK.double().t() * factor).chunk(2, dim=1)
    magnitude_T2F = gemm_magnitude(x_TK, w_2FK, is_random=is_random) * factor
    # The factor is off, relatively, by half of what its sum is.
    error_T2F = sum_tolerance(x_TK.shape[1], magnitude_T2F + torch.cat((gate_TF, up_TF), dim=1).abs() / 2)
    gate_error_TF, up_error_TF = (_TWO_PRODUCTS * error_T2F).chunk(2, dim=1)
    # silu grows by at most 1.1 times what its argument grows by, and |silu(x)| <= |x|; exp is off by |x| u as well.
    error_TF = 1.1 * gate_error_TF * (up_TF.abs() + up_error_TF) + gate_TF.abs() * up_error_TF
    functions_TF = 2 * (gate_TF.abs() + 2 * _FUNCTION_ROUNDINGS) * unit_roundoff(torch.float32)
    return rounding_tolerance(expected_TF, error_TF + functions_TF * (gate_TF * up_TF).abs())


def is_within(actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> bool:
    """False where a number is further off, or is none."""
    return bool(((actual.double() - expected.double()).abs() <= tolerance).all())


def excess(actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> float:
    """Largest difference in units of its tolerance, for messages."""
    return float(((actual.double() - expected.double()).abs() / tolerance).max())


def attention_tolerance(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, num_keys: int
) -> float:
    """Largest error of softmax attention in float32. NaN in keys and values is what no row sees.

    A score is off by a sum over the head dim, a weight relatively by twice that, and the output adds up all keys.
    """
    query_norm, key_norm = (float(x.double().nan_to_num().norm(dim=-1).max()) for x in (query, keys))
    largest = float(values.double().nan_to_num().abs().max())
    score = sum_tolerance(query.shape[-1], scale * query_norm * key_norm)
    return 2 * score * largest + sum_tolerance(2 * num_keys, largest)


def attention_kernel_tolerance(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, num_keys: int
) -> dict[str, float]:
    """rtol and atol of two attentions over a pool of the query's dtype: weights and results are rounded to it."""
    exact = attention_tolerance(query, keys, values, scale=scale, num_keys=num_keys)
    largest = float(values.double().nan_to_num().abs().max())
    rounded = 0.0 if query.dtype is torch.float32 else 4 * unit_roundoff(query.dtype) * largest
    return {"rtol": 4 * unit_roundoff(query.dtype), "atol": 2 * exact + rounded}


def chain_tolerance(sizes: list[int], magnitude: float, dtype: torch.dtype = torch.float32) -> float:
    """Absolute error of functions that follow one another, each a sum over so many terms of about `magnitude` together.

    Errors of the first order add; norms between the functions keep them from growing otherwise.
    """
    return float(sum_tolerance(sum(size + _FUNCTION_ROUNDINGS for size in sizes), magnitude, dtype))


def model_sizes(config: PreTrainedConfig, num_keys: int) -> list[int]:
    """Numbers of terms of all sums between a token and its logits. num_keys: the longest context."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    latent = [getattr(config, name, None) or 0 for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")]
    picks = getattr(config, "num_experts_per_tok", None) or 0
    mlp = max(config.intermediate_size, getattr(config, "moe_intermediate_size", None) or 0)
    query = heads * max(head_dim, getattr(config, "v_head_dim", None) or 0)
    norms = 3 * hidden
    layer = [norms, hidden, *latent, head_dim, num_keys, num_keys, query, hidden, mlp, picks]
    return layer * config.num_hidden_layers + [2 * hidden]


def model_tolerance(config: PreTrainedConfig, num_keys: int, magnitude: float) -> float:
    """Largest difference of two computations of a model in float32, each off by `chain_tolerance`.

    magnitude: the largest of the values that are compared, e.g. of the logits.
    """
    return 2 * chain_tolerance(model_sizes(config, num_keys), magnitude)


def typical_model_error(config: PreTrainedConfig, spread: float, dtype: torch.dtype) -> float:
    """Mean absolute error, generously, of a model whose values are rounded to `dtype` and added in float32.

    Errors of n roundings add like a random walk, to sqrt(n) x u. spread: standard deviation of what is compared.
    """
    return 2 * math.sqrt(_ROUNDINGS_A_LAYER * config.num_hidden_layers) * unit_roundoff(dtype) * spread


def largest_logprob_error(
    config: PreTrainedConfig, num_keys: int, spread: float, pool_dtype: torch.dtype = torch.float32
) -> float:
    """Largest difference of some thousands of logprobs of two computations in float32 whose keys and values are of
    `pool_dtype`. spread: standard deviation of the logits.

    Roundings add like a random walk: n of float32, counted as in `model_tolerance`, which holds for any signs of them.
    """
    num_roundings = sum(size + _FUNCTION_ROUNDINGS for size in model_sizes(config, num_keys))
    error = math.sqrt(2 * num_roundings) * unit_roundoff(torch.float32)
    if pool_dtype is not torch.float32:
        error += math.sqrt(_ROUNDINGS_A_LAYER * config.num_hidden_layers) * unit_roundoff(pool_dtype)
    return _TAIL * error * spread


def typical_chain_error(num_roundings: int, dtype: torch.dtype) -> float:
    """Norm of a computation's error relative to its result's, generously, after so many roundings to `dtype`.

    A rounding is off by at most u, evenly spread; errors of several add like a random walk.
    """
    return 2 * math.sqrt(num_roundings * _MANTISSAS / 3) * unit_roundoff(dtype)


def typical_fp8_error(config: PreTrainedConfig, *, has_fp8_weights: bool = False) -> float:
    """The same of a model whose rows are made FP8 for each GEMM, and whose weights may have been too."""
    num_gemms = _FP8_GEMMS_A_LAYER * config.num_hidden_layers
    return typical_chain_error(num_gemms * (1 + has_fp8_weights), torch.float8_e4m3fn)
