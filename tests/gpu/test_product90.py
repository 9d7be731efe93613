"""Products that stream their weights against torch, on compute capability 9.0; `bench/gpu/products90.py` does more."""

from __future__ import annotations

import pytest
import torch
from support.rounding import excess, gated_tolerance, product_tolerance

from radixmesh.daemons.worker.cuda.gemm.products import TorchProducts
from radixmesh.daemons.worker.cuda.gemm.streamed_kernel import GpuKernel, check_kernel
from radixmesh.daemons.worker.cuda.gemm.streamed_products import ProductUse, StreamedShape
from radixmesh.daemons.worker.cuda.gemm.streamed_stand import GraphStand
from radixmesh.kernels.gemm_sm90.candidates import candidates
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import Product90, gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc
from radixmesh.kernels.row_scale import row_scale_reference

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernel() -> GpuKernel:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for compute capability 9.0")
    return GpuKernel(Product90(CudaDriver(), Nvrtc().cubin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_products_are_those_of_torch(kernel: GpuKernel, dtype: torch.dtype) -> None:
    check_kernel(kernel, dtype, torch.device("cuda"))


@pytest.mark.parametrize("num_rows", [2, 24, 64, 100, 256])
@pytest.mark.parametrize(("num_out", "num_in"), [(5120, 3072), (3072, 8192), (2560, 9728)])
def test_every_candidate_computes_what_torch_does(kernel: GpuKernel, num_out: int, num_in: int, num_rows: int) -> None:
    x_TK, w_NK = _random(num_rows, num_in), _random(num_out, num_in) * num_in**-0.5
    before_TN = _random(num_rows, num_out)
    expected_TN = linear_reference(x_TK, w_NK, before_TN)
    tolerance_TN = product_tolerance(x_TK, w_NK, expected_TN, before_TN, is_random=True)
    for config in candidates(num_rows, num_out, num_in):
        out_TN = before_TN.clone()
        kernel.linear(x_TK, w_NK, config, residual_TN=out_TN, out=out_TN)
        assert excess(out_TN, expected_TN, tolerance_TN) <= 1, config
    expected_TF = gate_up_silu_reference(x_TK, w_NK, 1e-5)
    tolerance_TF = gated_tolerance(x_TK, w_NK, expected_TF, row_scale_reference(x_TK, 1e-5), is_random=True)
    for config in candidates(num_rows, num_out // 2, num_in, is_gated=True):
        out_TF = torch.full_like(expected_TF, float("nan"))
        kernel.gate_up_silu(x_TK, w_NK, config, eps=1e-5, out=out_TF)
        assert excess(out_TF, expected_TF, tolerance_TF) <= 1, config


def test_candidates_are_timed_in_graphs(kernel: GpuKernel) -> None:
    weights = [_random(3072, 3072) for _ in range(4)]
    for use in ProductUse:
        shape = StreamedShape.of(64, weights[0], use)
        stand = GraphStand(kernel, TorchProducts(), torch.cuda.Stream(), shape, weights)
        config = candidates(64, 3072 // (1 + (use is ProductUse.GATED)), 3072)[0]
        assert 1.0 < stand.candidate(config)() < 1000.0


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
