"""The SwiGLU gate against torch."""

from __future__ import annotations

import pytest
import torch

from radixmesh.kernels.silu_mul import silu_mul, silu_mul_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 128), (3, 96), (2, 3000), (0, 64)])
def test_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(shape, device=device) * 4).to(dtype)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x), rtol=max(2 * unit, 1e-5), atol=1e-6)


def test_far_gates_neither_overflow_nor_become_nan(device: torch.device) -> None:
    x = torch.tensor([[-200.0, 200.0, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x), rtol=1e-5, atol=1e-30)


def test_an_odd_width_is_refused(device: torch.device) -> None:
    with pytest.raises(AssertionError):
        silu_mul(torch.ones(1, 5, device=device))
