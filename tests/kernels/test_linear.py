"""Contract of `Linear`: what a layer asks of a matrix is computed whatever the kind of the matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from radixmesh.daemons.worker.cuda.fp8.gemm import TritonFp8Gemm
from radixmesh.daemons.worker.cuda.fp8.ops import TorchFp8Ops, TritonFp8Ops
from radixmesh.daemons.worker.cuda.linear import Fp8Linear, Linear, Norm, PlainLinear, Residual
from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps, TritonOps
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.fp8.quantized import quantize_matrix

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

_D, _F, _EPS = 128, 128, 1e-5
Create = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def _fp8(ops: TorchFp8Ops | TritonFp8Ops, *, is_grouped: bool) -> Create:
    return lambda w_NK, b_N: Fp8Linear(ops, quantize_matrix(w_NK, is_grouped=is_grouped), b_N)


def _plain(ops: Ops) -> Create:
    return lambda w_NK, b_N: PlainLinear(ops, w_NK, b_N)


_KINDS: dict[str, Create] = {
    "plain torch": _plain(TorchOps()),
    "plain triton": _plain(TritonOps()),
    "plain deterministic": _plain(TritonOps(is_deterministic=True)),
    "fp8 torch": _fp8(TorchFp8Ops(TorchOps()), is_grouped=True),
    "fp8 triton blocks": _fp8(TritonFp8Ops(TritonOps(), TritonFp8Gemm()), is_grouped=True),
    "fp8 triton channels": _fp8(TritonFp8Ops(TritonOps(), TritonFp8Gemm()), is_grouped=False),
}
_each_kind = pytest.mark.parametrize("kind", _KINDS)
_each_size = pytest.mark.parametrize(("num_rows", "has_bias"), [(1, False), (1, True), (5, False), (5, True)])


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _bias(has_bias: bool, size: int) -> torch.Tensor | None:
    return _random(size) if has_bias else None


def _finished(result: DeferredNormGemm) -> torch.Tensor:
    """Input of the kernel that reads a result."""
    out_TN = result.out_TN
    if result.norm_input_TD is not None:
        out_TN = out_TN * (result.norm_input_TD.square().mean(dim=1, keepdim=True) + _EPS).rsqrt()
    return out_TN if result.bias_N is None else out_TN + result.bias_N


def _check(got: torch.Tensor, want: torch.Tensor, kind: str) -> None:
    # FP8 has 3 bits behind the leading one, in the matrix and, of more than one row, in the rows: 4% a GEMM.
    bound = 0.1 if "fp8" in kind else 1e-4
    assert got.shape == want.shape and float((got - want).norm() / want.norm()) < bound


@_each_kind
@_each_size
def test_rows_are_multiplied(kind: str, num_rows: int, has_bias: bool) -> None:
    x_TK, w_NK, b_N = _random(num_rows, _D), _random(_F, _D), _bias(has_bias, _F)
    linear = _KINDS[kind](w_NK, b_N)
    assert linear.shape == (_F, _D)
    _check(_finished(linear.multiplied(x_TK)), functional.linear(x_TK, w_NK, b_N), kind)


@_each_kind
@_each_size
def test_rows_are_normed_first(kind: str, num_rows: int, has_bias: bool) -> None:
    x_TD, w_ND, norm_D, b_N = _random(num_rows, _D), _random(_F, _D), _random(_D), _bias(has_bias, _F)
    want = functional.linear(functional.rms_norm(x_TD, (_D,), norm_D, _EPS), w_ND, b_N)
    got = _KINDS[kind](w_ND, b_N).normed(Residual(x_TD.clone()), Norm(norm_D, _EPS))
    _check(_finished(got), want, kind)


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if "plain" in kind])
@_each_size
def test_a_norm_may_be_folded_into_the_matrix(kind: str, num_rows: int, has_bias: bool) -> None:
    x_TD, w_ND, norm_D, b_N = _random(num_rows, _D), _random(_F, _D), _random(_D), _bias(has_bias, _F)
    want = functional.linear(functional.rms_norm(x_TD, (_D,), norm_D, _EPS), w_ND, b_N)
    got = _KINDS[kind](w_ND * norm_D, b_N).normed(Residual(x_TD.clone()), Norm(None, _EPS))
    _check(_finished(got), want, kind)


@_each_kind
@_each_size
def test_results_are_added_to_the_residual_one_behind_the_other(kind: str, num_rows: int, has_bias: bool) -> None:
    """As two layers do: the second reads what the first left to it."""
    x_TD, y_TK, w_DK, b_D = _random(num_rows, _D), _random(num_rows, _F), _random(_D, _F), _bias(has_bias, _D)
    want = x_TD + 2 * functional.linear(y_TK, w_DK, b_D)
    linear, residual = _KINDS[kind](w_DK, b_D), Residual(x_TD.clone())
    linear.add_to(residual, y_TK)
    linear.add_to(residual, y_TK)
    _check(residual.rows(), want, kind)
    _check(residual.rows(), want, kind)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("plain torch", "plain torch"),
        ("plain triton", "plain triton"),
        ("fp8 torch", "fp8 torch"),
        ("fp8 triton blocks", "fp8 triton blocks"),
        ("plain triton", "fp8 triton channels"),
        ("fp8 triton blocks", "plain triton"),
    ],
)
@_each_size
def test_a_gated_mlp_adds_to_the_residual_whatever_kinds_its_matrices_are(
    first: str, second: str, num_rows: int, has_bias: bool
) -> None:
    x_TD, w_2FD, w_DF, norm_D = _random(num_rows, _D), _random(2 * _F, _D) / 16, _random(_D, _F), _random(_D)
    before_TD, b_2F, b_D = _random(num_rows, _D) / 8, _bias(has_bias, 2 * _F), _bias(has_bias, _D)
    start_TD = x_TD + before_TD
    gate_TF, up_TF = functional.linear(functional.rms_norm(start_TD, (_D,), norm_D, _EPS), w_2FD, b_2F).chunk(2, dim=1)
    want = start_TD + functional.linear(functional.silu(gate_TF) * up_TF, w_DF, b_D)
    residual = Residual(x_TD.clone())
    residual.leave(DeferredNormGemm(before_TD))
    gate_up, down = _KINDS[first](w_2FD, b_2F), _KINDS[second](w_DF, b_D)
    down.add_gated_to(residual, gate_up.gated(residual, Norm(norm_D, _EPS)), _EPS)
    _check(residual.rows(), want, first + second)
