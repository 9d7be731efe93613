"""Rows made FP8, and GEMMs of them, against torch."""

from __future__ import annotations

import pytest
import torch
from support.rounding import random_gemm_tolerance, sum_tolerance, unit_roundoff

from radixmesh.kernels.fp8.linear import TileConfig, default_tile, fp8_linear, fp8_linear_reference
from radixmesh.kernels.fp8.quantize_rows import norm_quantize, norm_quantize_reference, quantize_rows
from radixmesh.kernels.fp8.quantized import (
    FP8,
    GROUP,
    QuantizedMatrix,
    QuantizedRows,
    quantize_matrix,
    quantize_rows_reference,
)
from radixmesh.kernels.fp8.silu_quantize import silu_quantize, silu_quantize_reference

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half of the last of three bits of mantissa; the scale, its quotient and its GEMM are rounded before and behind.
_ROUNDING = unit_roundoff(FP8) * (1 + 4 * unit_roundoff(torch.float32)) + 4 * unit_roundoff(torch.float32)
_SMALLEST_STEP = 2**-9
# Gates of some normal numbers: exp of an argument that is off by u is off by so many u.
_LARGEST_GATE = 32
_TERMS_OF_MMA, _MMA_ROUNDING = 32, 2**-13
_SHAPES = [(1, 128), (3, 384), (2, 200), (5, 48), (2, 3072)]


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_rows_are_quantised_by_their_own_largest_number(shape, dtype, is_grouped, device) -> None:
    x = _random(shape, dtype, device)
    x[0] *= 1000
    got = quantize_rows(x, is_grouped=is_grouped)
    _assert_same(got, quantize_rows_reference(x, is_grouped=is_grouped))
    error = (got.dequantized() - x.float()).abs()
    assert bool((error <= x.float().abs() * _ROUNDING + got.scales_TG.amax() * _SMALLEST_STEP / 2).all())


def test_a_row_of_zeros_stays_one(device) -> None:
    for is_grouped in (False, True):
        got = quantize_rows(torch.zeros(2, 256, device=device), is_grouped=is_grouped)
        assert not got.data_TK.float().any() and bool((got.scales_TG == 1).all())


def test_rows_may_lie_apart(device) -> None:
    wide = _random((4, 300), torch.bfloat16, device)
    x = wide[:, 20:180]
    _assert_same(quantize_rows(x, is_grouped=True), quantize_rows_reference(x, is_grouped=True))


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_normed_rows_equal_the_reference(shape, dtype, is_grouped, device) -> None:
    x, w = _random(shape, dtype, device) * 3, _random(shape[1:], dtype, device)
    _assert_same(
        norm_quantize(x, w, 1e-5, is_grouped=is_grouped), norm_quantize_reference(x, w, 1e-5, is_grouped=is_grouped)
    )


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", _SHAPES[1:4], ids=str)
def test_a_gemm_is_added_to_the_rows_before_the_norm(shape, dtype, has_bias, is_grouped, device) -> None:
    rows, w, gemm = (_random(size, dtype, device) for size in (shape, shape[1:], shape))
    bias = _random(shape[1:], dtype, device) if has_bias else None
    got_rows, want_rows = rows.clone(), rows.clone()
    got = norm_quantize(got_rows, w, 1e-5, delta_TD=gemm, bias_D=bias, is_grouped=is_grouped)
    want = norm_quantize_reference(want_rows, w, 1e-5, delta_TD=gemm, bias_D=bias, is_grouped=is_grouped)
    assert torch.equal(got_rows, want_rows) and not torch.equal(got_rows, rows)
    _assert_same(got, want)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (3, 384), (2, 200), (2, 2200)], ids=str)
def test_gates_equal_the_reference(shape, dtype, has_bias, is_grouped, device) -> None:
    gate_up = _random((shape[0], 2 * shape[1]), dtype, device) * 2
    bias = _random((2 * shape[1],), dtype, device) if has_bias else None
    got = silu_quantize(gate_up, bias_2F=bias, is_grouped=is_grouped)
    _assert_same(got, silu_quantize_reference(gate_up, bias_2F=bias, is_grouped=is_grouped))


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("shape", [(5, 48), (300, 200), (128, 384)], ids=str)
def test_matrices_are_quantised_by_channel_or_block(shape, is_grouped, device) -> None:
    w = _random(shape, torch.bfloat16, device)
    w[0] *= 100
    got = quantize_matrix(w, is_grouped=is_grouped)
    error = (got.dequantized() - w.float()).abs()
    step = got.scales.repeat_interleave(got.group_rows, 0)[: shape[0]].amax(1, keepdim=True) * _SMALLEST_STEP / 2
    assert bool((error <= w.float().abs() * _ROUNDING + step).all())
    largest = got.data_NK.float().abs()
    assert float(largest.max()) == 448
    if not is_grouped:
        assert bool((largest.amax(1) == 448).all())


_GEMM = [(1, 64, 40), (17, 128, 48), (33, 384, 300), (70, 200, 130)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", ["channel", "block", "rows of blocks"])
@pytest.mark.parametrize("shape", _GEMM, ids=str)
def test_gemms_equal_the_reference(shape, groups, dtype, device) -> None:
    x, w = _operands(shape, groups, device)
    got = fp8_linear(x, w, dtype)
    want = fp8_linear_reference(x, w, dtype)
    torch.testing.assert_close(got, want, **_gemm_tolerance(dtype, shape[1], want))


@pytest.mark.parametrize("groups", ["channel", "block", "rows of blocks"])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (32, 128), (64, 64), (128, 128)])
def test_gemms_are_the_same_in_tiles_of_any_size(rows, columns, groups, device) -> None:
    x, w = _operands((130, 256, 260), groups, device)
    got = fp8_linear(x, w, torch.float32, config=TileConfig(rows=rows, columns=columns, num_warps=4, num_stages=3))
    want = fp8_linear_reference(x, w, torch.float32)
    torch.testing.assert_close(got, want, **_gemm_tolerance(torch.float32, 256, want))


def test_rows_and_matrix_have_the_same_groups(device) -> None:
    x, w = _operands((2, 256, 16), "block", device)
    with pytest.raises(AssertionError):
        fp8_linear(quantize_rows(torch.ones(2, 256, device=device), is_grouped=False), w, torch.float32)
    assert x.is_grouped


@pytest.mark.parametrize("num_out", [3072, 5120, 16384, 57344])
def test_tiles_fit_shared_memory(num_out: int) -> None:
    for num_rows in (1, 16, 17, 64, 65, 256, 513, 2048, 8192):
        tile = default_tile(num_rows, num_out)
        assert (tile.rows + tile.columns) * GROUP * tile.num_stages <= 200 << 10, tile


def _gemm_tolerance(dtype: torch.dtype, num_terms: int, want: torch.Tensor) -> dict[str, float]:
    """Hopper's tensor cores add FP8 products with 13 bits behind the largest one's first (DeepSeek-V3's report, 3.3.2),
    once for each 32 terms."""
    found = random_gemm_tolerance(dtype, num_terms, want)
    if want.device.type == "cuda":
        found["atol"] += -(-num_terms // _TERMS_OF_MMA) * _MMA_ROUNDING * float(want.abs().max())
    return found


def _operands(shape, groups: str, device) -> tuple[QuantizedRows, QuantizedMatrix]:
    num_rows, num_in, num_out = shape
    x = _random((num_rows, num_in), torch.float32, device)
    w = quantize_matrix(_random((num_out, num_in), torch.float32, device), is_grouped=groups != "channel")
    if groups == "rows of blocks":
        w = QuantizedMatrix(w.data_NK, w.scales.repeat_interleave(GROUP, 0)[:num_out].contiguous(), 1, True)
    return quantize_rows_reference(x, is_grouped=w.is_grouped), w


def _random(shape, dtype: torch.dtype, device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _assert_same(got: QuantizedRows, want: QuantizedRows) -> None:
    """But for what lies between two FP8 numbers, where the last bits of what was rounded decide."""
    # The rounded numbers have a norm's factor (a sum of squares) or a gate's exp; all terms have one sign.
    error = 2 * sum_tolerance(got.data_TK.shape[1] + _LARGEST_GATE, 1.0)
    assert got.data_TK.dtype == FP8 and got.data_PK.is_contiguous() and got.is_grouped == want.is_grouped
    torch.testing.assert_close(got.scales_TG, want.scales_TG, rtol=error, atol=0)
    differ = got.data_TK.float() != want.data_TK.float()
    # FP8 numbers are at least a sixteenth of their size apart: so many of evenly spread ones have a border within
    # reach, and of so few some more by chance.
    num_expected = differ.numel() * 16 * 2 * error
    assert int(differ.sum()) <= num_expected + 4 * num_expected**0.5 + 1
    eps = float(torch.finfo(FP8).eps)
    torch.testing.assert_close(got.data_TK.float(), want.data_TK.float(), rtol=eps, atol=_SMALLEST_STEP)
