"""GEMV kernels against torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.rounding import random_gemm_tolerance

from radixmesh.kernels.gemv import (
    GemvConfig,
    Shape,
    default_config,
    gate_up_silu,
    gate_up_silu_reference,
    linear,
    linear_reference,
)

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class _Case:
    num_rows: int
    num_in: int
    num_out: int
    config: GemvConfig | None = None


_CASES = [
    _Case(1, 256, 24),
    _Case(1, 896, 10),
    _Case(2, 3072, 5, GemvConfig(rows=4, num_warps=4)),
    _Case(1, 2048, 9, GemvConfig(rows=2, num_warps=8)),
    _Case(3, 320, 7, GemvConfig(rows=1, num_warps=1)),
    _Case(8, 128, 16),
]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_a_plain_gemm_equals_the_reference(case: _Case, dtype: torch.dtype, device: torch.device) -> None:
    x, w = _operands(case, dtype, device)
    _assert_near(case, linear(x, w, config=case.config), linear_reference(x, w))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("case", _CASES[:4], ids=str)
def test_bias_residual_and_norm_are_fused(case: _Case, dtype: torch.dtype, device: torch.device) -> None:
    x, w = _operands(case, dtype, device)
    norm = torch.randn(case.num_in, device=device).to(dtype)
    bias = torch.randn(case.num_out, device=device).to(dtype)
    residual = torch.randn(case.num_rows, case.num_out, device=device).to(dtype)
    expected = linear_reference(x, w, bias, residual, norm, 1e-5)
    _assert_near(case, linear(x, w, bias, residual, norm, 1e-5, config=case.config), expected)
    linear(x, w, bias, residual, norm, 1e-5, out=residual, config=case.config)
    _assert_near(case, residual, expected)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("case", _CASES[:4], ids=str)
def test_a_norm_without_a_weight_scales_the_gemm(case: _Case, dtype: torch.dtype, device: torch.device) -> None:
    x, w = _operands(case, dtype, device)
    x *= 5
    bias = torch.randn(case.num_out, device=device).to(dtype)
    actual = linear(x, w, bias, eps=1e-5, config=case.config)
    _assert_near(case, actual, linear_reference(x, w, bias, eps=1e-5))
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    _assert_near(case, actual, (normed @ w.double().T + bias.double()).to(dtype))


def test_a_norms_weight_without_its_eps_is_refused(device: torch.device) -> None:
    x, w = _operands(_Case(1, 64, 8), torch.float32, device)
    with pytest.raises(AssertionError):
        linear(x, w, norm_weight_K=x[0])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_gate_and_up_equal_the_reference(case: _Case, dtype: torch.dtype, device: torch.device) -> None:
    x, w = _operands(_Case(case.num_rows, case.num_in, 2 * case.num_out), dtype, device)
    norm = torch.randn(case.num_in, device=device).to(dtype)
    for weight, eps in ((None, None), (None, 1e-6), (norm, 1e-6)):
        actual = gate_up_silu(x, w, weight, eps, config=case.config)
        _assert_near(case, actual, gate_up_silu_reference(x, w, weight, eps))


def test_logits_may_be_wider_than_the_weights(device: torch.device) -> None:
    x, w = _operands(_Case(1, 256, 33), torch.float16, device)
    out = torch.empty(1, 33, device=device)
    linear(x, w, out=out)
    _assert_near(_Case(1, 256, 33), out, x.float() @ w.float().T)


@pytest.mark.parametrize("num_in", [64, 896, 2048, 3072, 4096, 8192, 14336, 18944, 28672])
@pytest.mark.parametrize("is_gated", [False, True])
def test_defaults_keep_a_programs_weights_in_registers(num_in: int, is_gated: bool) -> None:
    config = default_config(Shape(4096, num_in, is_gated), 2)
    loads_a_thread = config.rows * (1 + is_gated) * num_in * 2 / (16 * 32 * config.num_warps)
    assert loads_a_thread <= 32 and config.num_warps <= 16


def test_more_rows_than_it_is_made_for_are_refused(device: torch.device) -> None:
    x, w = _operands(_Case(9, 64, 8), torch.float32, device)
    with pytest.raises(AssertionError):
        linear(x, w)


def _operands(case: _Case, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(case.num_rows, case.num_in, device=device).to(dtype)
    w = (torch.randn(case.num_out, case.num_in, device=device) / case.num_in**0.5).to(dtype)
    return x, w


def _assert_near(case: _Case, actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = random_gemm_tolerance(actual.dtype, case.num_in, expected)
    torch.testing.assert_close(actual, expected.to(actual.dtype), **tolerance)
