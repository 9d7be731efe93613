"""The SwiGLU gate against torch."""

from __future__ import annotations

import pytest
import torch
from support.rounding import kernel_tolerance

from radixmesh.kernels.silu_mul import silu_mul, silu_mul_reference

_LARGEST_GATE = 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 128), (3, 96), (2, 3000), (0, 64)])
def test_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(shape, device=device) * 4).to(dtype)
    expected = silu_mul_reference(x)
    torch.testing.assert_close(silu_mul(x), expected, **_tolerance(expected, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_features", "mlp_size"), [(3, 96, 48), (2, 3072, 8192), (4, 1000, 4500)])
def test_rows_that_were_not_normed_are_scaled_before_the_bias(
    num_rows: int, num_features: int, mlp_size: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    sizes = 2.0 ** torch.arange(-1, num_rows - 1, device=device)[:, None]
    norm_input = (torch.randn(num_rows, num_features, device=device) * sizes).to(dtype)
    x = (torch.randn(num_rows, 2 * mlp_size, device=device) * sizes * 2).to(dtype)
    bias = torch.randn(2 * mlp_size, device=device).to(dtype) if has_bias else None
    actual = silu_mul(x, norm_input_TD=norm_input, bias_2F=bias, eps=1e-5)
    expected = silu_mul_reference(x, norm_input_TD=norm_input, bias_2F=bias, eps=1e-5)
    tolerance = _tolerance(expected, num_features)
    torch.testing.assert_close(actual, expected, **tolerance)
    normed = x.float() / (norm_input.float().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    gate, up = (normed if bias is None else normed + bias.float()).chunk(2, dim=-1)
    torch.testing.assert_close(actual.float(), gate * gate.sigmoid() * up, **tolerance)


def test_a_row_is_scaled_by_its_own_factor_whoever_is_beside_it(device: torch.device) -> None:
    x, norm_input = torch.randn(4, 192, device=device), torch.randn(4, 80, device=device) * 7
    together = silu_mul(x, norm_input_TD=norm_input)
    assert torch.equal(together[2:3], silu_mul(x[2:3], norm_input_TD=norm_input[2:3]))


def _tolerance(expected: torch.Tensor, num_features: int) -> dict[str, float]:
    """Of gates up to `_LARGEST_GATE`: the exponential is relatively off by so many roundings."""
    largest = float(expected.float().abs().max()) if expected.numel() else 0.0
    return kernel_tolerance(expected.dtype, num_features + _LARGEST_GATE, largest)


def test_far_gates_neither_overflow_nor_become_nan(device: torch.device) -> None:
    x = torch.tensor([[-200.0, 200.0, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x), rtol=_LARGEST_GATE * torch.finfo().eps, atol=0)


def test_an_odd_width_is_refused(device: torch.device) -> None:
    with pytest.raises(AssertionError):
        silu_mul(torch.ones(1, 5, device=device))
