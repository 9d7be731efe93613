"""PDL GEMMs against torch, on compute capability 9.0; `bench/gpu/gemm_sm90.py` does more."""

from __future__ import annotations

import pytest
import torch
from support.rounding import excess, gated_tolerance, gemm_tolerance

from radixmesh.daemons.worker.cuda.gemm.autotuner import Autotuner, GraphBenchmarks
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue, TorchGemm, TunedGemm
from radixmesh.daemons.worker.cuda.gemm.sm90_kernels import Sm90Kernels, check_kernel
from radixmesh.daemons.worker.cuda.gemm.tuning import matrix_group
from radixmesh.daemons.worker.cuda.ops import TritonOps
from radixmesh.kernels.gemm_sm90.candidates import candidates, few_rows_candidates
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import GemmSm90, gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc
from radixmesh.kernels.inverse_rms import inverse_rms_reference

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernel() -> GemmSm90:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for compute capability 9.0")
    return GemmSm90(CudaDriver(), Nvrtc().cubin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_gemms_are_those_of_torch(kernel: GemmSm90, dtype: torch.dtype) -> None:
    check_kernel(kernel, dtype, torch.device("cuda"))


@pytest.mark.parametrize("num_rows", [2, 24, 64, 100, 256])
@pytest.mark.parametrize(("num_out", "num_in"), [(5120, 3072), (3072, 8192), (2560, 9728)])
def test_every_candidate_computes_what_torch_does(kernel: GemmSm90, num_out: int, num_in: int, num_rows: int) -> None:
    x_TK, w_NK = _random(num_rows, num_in), _random(num_out, num_in) * num_in**-0.5
    before_TN = _random(num_rows, num_out)
    expected_TN = linear_reference(x_TK, w_NK, before_TN)
    tolerance_TN = gemm_tolerance(x_TK, w_NK, expected_TN, before_TN, is_random=True)
    for config in candidates(num_rows, num_out, num_in):
        out_TN = before_TN.clone()
        kernel.linear(x_TK, w_NK, config, residual_TN=out_TN, out=out_TN)
        assert excess(out_TN, expected_TN, tolerance_TN) <= 1, config
    expected_TF = gate_up_silu_reference(x_TK, w_NK, 1e-5)
    tolerance_TF = gated_tolerance(x_TK, w_NK, expected_TF, inverse_rms_reference(x_TK, 1e-5), is_random=True)
    for config in candidates(num_rows, num_out // 2, num_in, is_gated=True):
        out_TF = torch.full_like(expected_TF, float("nan"))
        kernel.gate_up_silu(x_TK, w_NK, config, eps=1e-5, out=out_TF)
        assert excess(out_TF, expected_TF, tolerance_TF) <= 1, config


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("num_out", "num_in"), [(6144, 4096), (4096, 14336), (288, 1024)])
def test_few_rows_have_rings_of_their_own(kernel: GemmSm90, num_out: int, num_in: int, num_rows: int) -> None:
    x_TK, w_NK = _random(num_rows, num_in), _random(num_out, num_in) * num_in**-0.5
    before_TN = _random(num_rows, num_out)
    expected_TN = linear_reference(x_TK, w_NK, before_TN)
    tolerance_TN = gemm_tolerance(x_TK, w_NK, expected_TN, before_TN, is_random=True)
    configs = few_rows_candidates(num_rows, num_out, num_in)
    assert configs
    for config in configs:
        out_TN = before_TN.clone()
        kernel.linear(x_TK, w_NK, config, residual_TN=out_TN, out=out_TN)
        assert excess(out_TN, expected_TN, tolerance_TN) <= 1, config
    expected_TF = gate_up_silu_reference(x_TK, w_NK, 1e-5)
    tolerance_TF = gated_tolerance(x_TK, w_NK, expected_TF, inverse_rms_reference(x_TK, 1e-5), is_random=True)
    for config in few_rows_candidates(num_rows, num_out // 2, num_in, is_gated=True):
        out_TF = torch.full_like(expected_TF, float("nan"))
        kernel.gate_up_silu(x_TK, w_NK, config, eps=1e-5, out=out_TF)
        assert excess(out_TF, expected_TF, tolerance_TF) <= 1, config


def test_candidates_are_timed_in_graphs(kernel: GemmSm90) -> None:
    weights = [_random(3072, 3072) for _ in range(4)]
    kernels = Sm90Kernels(kernel, TorchGemm())
    for epilogue in GemmEpilogue:
        problem = matrix_group(weights, epilogue).problem(64)
        benchmark = GraphBenchmarks(torch.device("cuda")).create(problem, kernels.operands(problem, weights), weights)
        for candidate in (None, next(iter(kernels.candidates(problem)))):
            assert 1.0 < benchmark.candidate(candidate)() < 1000.0


def test_tuned_gemms_are_torchs(kernel: GemmSm90) -> None:
    weights = [_random(3072, 3072) * 3072**-0.5 for _ in range(4)]
    groups = [matrix_group(weights, epilogue) for epilogue in GemmEpilogue]
    table, report = Autotuner(GraphBenchmarks(torch.device("cuda"))).tune(
        Sm90Kernels(kernel, TorchGemm()), groups, (48, 64)
    )
    gemm = TunedGemm(table)
    assert report.num_measured >= 3 and len(gemm) >= 2
    for num_rows in (48, 64):
        x_TK, w_NK, residual_TN = _random(num_rows, 3072), weights[0], _random(num_rows, 3072)
        expected_TN = linear_reference(x_TK, w_NK)
        tolerance_TN = gemm_tolerance(x_TK, w_NK, expected_TN, is_random=True)
        assert excess(gemm.linear(x_TK, w_NK), expected_TN, tolerance_TN) <= 1
        # The gated GEMM reads the squares that the one ahead of it has left.
        gemm.add_linear(x_TK, w_NK, residual_TN)
        gated_TF = TritonOps(gemm=gemm).gate_up_silu_deferred_norm(residual_TN, w_NK, 1e-5)
        expected_TF = gate_up_silu_reference(residual_TN, w_NK, 1e-5)
        scale_T1 = inverse_rms_reference(residual_TN, 1e-5)
        tolerance_TF = gated_tolerance(residual_TN, w_NK, expected_TF, scale_T1, is_random=True)
        # A gate that is not fused rounds gate and up once more.
        assert excess(gated_TF, expected_TF, 2 * tolerance_TF) <= 1


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
