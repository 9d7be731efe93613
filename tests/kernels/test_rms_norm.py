"""RMSNorm kernels against torch."""

from __future__ import annotations

import pytest
import torch
from support.rounding import kernel_tolerance

from radixmesh.kernels.rms_norm import rms_norm, rms_norm_reference

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_SHAPES = [(1, 64), (3, 96), (2, 3072), (5, 1000)]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    w = torch.randn(shape[1], device=device).to(dtype)
    assert _is_close(rms_norm(x, w, 1e-5), rms_norm_reference(x, w, 1e-5))


def test_rows_may_be_strided_and_the_output_may_be_the_input(device: torch.device) -> None:
    wide = torch.randn(4, 256, device=device)
    w = torch.randn(128, device=device)
    expected, untouched = rms_norm_reference(wide[:, :128], w, 1e-6), wide[:, 128:].clone()
    rms_norm(wide[:, :128], w, 1e-6, out=wide[:, :128])
    assert _is_close(wide[:, :128], expected)
    assert torch.equal(wide[:, 128:], untouched)


def test_no_rows_are_no_error(device: torch.device) -> None:
    assert rms_norm(torch.empty(0, 64, device=device), torch.ones(64, device=device), 1e-6).shape == (0, 64)


def test_a_weight_of_another_size_is_refused(device: torch.device) -> None:
    with pytest.raises(AssertionError):
        rms_norm(torch.ones(1, 64, device=device), torch.ones(32, device=device), 1e-6)


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    # Sums of another order may round to a neighbour, twice (the norm, then the GEMM).
    tolerance = kernel_tolerance(actual.dtype, actual.shape[-1], float(expected.abs().max()))
    return torch.allclose(actual.float(), expected.float(), **tolerance)
