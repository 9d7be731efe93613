"""GEMMs that the fused operations leave to the backend."""

from __future__ import annotations

import pytest
import torch
from support.rounding import kernel_tolerance

from radixmesh.daemons.worker.cuda.gemm.backend import TorchGemm
from radixmesh.daemons.worker.cuda.ops import TritonOps


class _Recorded(TorchGemm):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        self.calls.append("linear")
        return super().linear(x_TK, w_NK)

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        self.calls.append("add_linear")
        super().add_linear(x_TK, w_NK, residual_TN)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gemms_are_those_given_but_in_deterministic_mode(is_deterministic: bool, has_bias: bool) -> None:
    gemm = _Recorded()
    ops = TritonOps(gemm=gemm, is_deterministic=is_deterministic)
    x_TK, w_NK, residual_TN = torch.randn(70, 32), torch.randn(48, 32), torch.randn(70, 48)
    b_N = torch.randn(48) if has_bias else None
    expected_TN = x_TK @ w_NK.t()
    torch.testing.assert_close(ops.linear(x_TK, w_NK), expected_TN)
    wanted_TN = residual_TN + expected_TN + (0 if b_N is None else b_N)
    ops.add_linear(x_TK, w_NK, b_N, residual_TN)
    torch.testing.assert_close(
        residual_TN, wanted_TN, **kernel_tolerance(torch.float32, 32 + 2, float(wanted_TN.abs().max()))
    )
    assert gemm.calls == ([] if is_deterministic else ["linear", "add_linear"])
