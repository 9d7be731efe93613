"""GEMV kernels with FP8 weights against torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.rounding import random_gemm_tolerance

from radixmesh.kernels.fp8.gemv import (
    default_config,
    fp8_gate_up_silu,
    fp8_gate_up_silu_reference,
    fp8_gemv,
    fp8_gemv_reference,
)
from radixmesh.kernels.fp8.quantized import GROUP, QuantizedMatrix, quantize_matrix
from radixmesh.kernels.gemv import GemvConfig, Shape

_DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]
_GROUPS = ["channel", "block", "rows of blocks"]


@dataclass(frozen=True)
class _Case:
    num_rows: int
    num_in: int
    num_out: int
    config: GemvConfig | None = None


_CASES = [
    _Case(1, 200, 10),
    _Case(2, 3072, 5, GemvConfig(rows=4, num_warps=2)),
    _Case(1, 2048, 134, GemvConfig(rows=8, num_warps=4)),
    _Case(3, 48, 7, GemvConfig(rows=1, num_warps=1)),
]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("groups", _GROUPS)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_a_gemm_equals_the_reference(case: _Case, groups: str, dtype: torch.dtype, device) -> None:
    x, w = _operands(case, groups, dtype, device)
    _assert_near(case, fp8_gemv(x, w, config=case.config), fp8_gemv_reference(x, w))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("groups", _GROUPS)
@pytest.mark.parametrize("case", _CASES[:3], ids=str)
def test_bias_residual_and_norm_are_fused(case: _Case, groups: str, dtype: torch.dtype, device) -> None:
    x, w = _operands(case, groups, dtype, device)
    x *= 5
    norm = torch.randn(case.num_in, device=device).to(dtype)
    bias = torch.randn(case.num_out, device=device).to(dtype)
    residual = torch.randn(case.num_rows, case.num_out, device=device).to(dtype)
    for weight in (None, norm):
        expected = fp8_gemv_reference(x, w, bias, residual, weight, 1e-5)
        _assert_near(case, fp8_gemv(x, w, bias, residual, weight, 1e-5, config=case.config), expected)
    fp8_gemv(x, w, bias, residual, norm, 1e-5, out=residual, config=case.config)
    _assert_near(case, residual, expected)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("groups", _GROUPS)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_gate_and_up_equal_the_reference(case: _Case, groups: str, dtype: torch.dtype, device) -> None:
    x, w = _operands(_Case(case.num_rows, case.num_in, 2 * case.num_out), groups, dtype, device)
    norm = torch.randn(case.num_in, device=device).to(dtype)
    for weight, eps in ((None, None), (None, 1e-6), (norm, 1e-6)):
        actual = fp8_gate_up_silu(x, w, weight, eps, config=case.config)
        _assert_near(case, actual, fp8_gate_up_silu_reference(x, w, weight, eps))


@pytest.mark.parametrize("num_in", [64, 896, 2048, 2560, 3072, 4096, 8192, 9728, 14336, 18944, 28672])
@pytest.mark.parametrize("is_gated", [False, True])
def test_defaults_keep_a_programs_weights_in_registers(num_in: int, is_gated: bool) -> None:
    config = default_config(Shape(4096, num_in, is_gated))
    loads_a_thread = config.rows * (1 + is_gated) * -(-num_in // (512 * config.num_warps))
    assert loads_a_thread <= 16, config


def test_a_norms_weight_without_its_eps_is_refused(device) -> None:
    x, w = _operands(_Case(1, 64, 8), "channel", torch.float32, device)
    with pytest.raises(AssertionError):
        fp8_gemv(x, w, norm_weight_K=x[0])


def test_more_rows_than_it_is_made_for_are_refused(device) -> None:
    x, w = _operands(_Case(9, 64, 8), "channel", torch.float32, device)
    with pytest.raises(AssertionError):
        fp8_gemv(x, w)


def _operands(case: _Case, groups: str, dtype: torch.dtype, device) -> tuple[torch.Tensor, QuantizedMatrix]:
    x = torch.randn(case.num_rows, case.num_in, device=device).to(dtype)
    weight = torch.randn(case.num_out, case.num_in, device=device) / case.num_in**0.5
    weight[:, : case.num_in // 2] *= 7
    w = quantize_matrix(weight, is_grouped=groups != "channel")
    if groups == "rows of blocks":
        scales = w.scales.repeat_interleave(GROUP, 0)[: case.num_out] * torch.rand(case.num_out, 1, device=device)
        w = QuantizedMatrix(w.data_NK, scales.contiguous(), 1, True)
    return x, w


def _assert_near(case: _Case, actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = random_gemm_tolerance(actual.dtype, case.num_in, expected)
    torch.testing.assert_close(actual, expected.to(actual.dtype), **tolerance)
