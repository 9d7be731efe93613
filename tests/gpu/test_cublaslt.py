"""cuBLASLt's algorithms against torch, in captured graphs."""

from __future__ import annotations

import pytest
import torch
from support.rounding import excess, gemm_tolerance, unit_roundoff

from radixmesh.daemons.worker.cuda.gemm.autotuner import Autotuner, GraphBenchmarks
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue, TunedGemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt import CublasLt, CublasLtMatmul, GemmShape, check_small_gemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt_kernels import CublasLtKernels
from radixmesh.daemons.worker.cuda.gemm.tuning import matrix_group

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def lt() -> CublasLt:
    return CublasLt(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_small_gemm_is_that_of_torch(lt: CublasLt, dtype: torch.dtype) -> None:
    check_small_gemm(lt, dtype)


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("num_rows", [2, 16, 64, 256, 300])
@pytest.mark.parametrize(("num_out", "num_in"), [(5120, 3072), (3072, 8192)])
def test_every_algorithm_computes_in_a_graph_what_torch_does(
    lt: CublasLt, num_out: int, num_in: int, num_rows: int, is_added: bool
) -> None:
    x_TK, w_NK = _random(num_rows, num_in), _random(num_out, num_in) * num_in**-0.5
    before_TN = _random(num_rows, num_out)
    expected_TN = x_TK.float() @ w_NK.float().t() + (before_TN.float() if is_added else 0)
    tolerance_TN = _tolerance(x_TK, w_NK, expected_TN, before_TN if is_added else None)
    matmul = CublasLtMatmul(lt, GemmShape(num_rows, num_out, num_in, torch.bfloat16, is_added))
    algorithms = matmul.algorithms(32)
    assert algorithms
    for algorithm in algorithms:
        out_TN = before_TN.clone()
        assert matmul.accepts(x_TK, w_NK, out_TN)
        matmul.run(algorithm, x_TK, w_NK, out_TN)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out_TN.copy_(before_TN)
            matmul.run(algorithm, x_TK, w_NK, out_TN)
        for _ in range(2):
            graph.replay()
            error = excess(out_TN, expected_TN, tolerance_TN)
            assert error <= 1, (algorithm.order, matmul.describe(algorithm), error)


def test_an_algorithm_serves_other_numbers_of_rows_where_the_library_says_so(lt: CublasLt) -> None:
    found = CublasLtMatmul(lt, GemmShape(256, 5120, 3072, torch.bfloat16)).algorithms(8)
    num_adopted = 0
    for num_rows in (224, 160):
        matmul = CublasLtMatmul(lt, GemmShape(num_rows, 5120, 3072, torch.bfloat16))
        x_TK, w_NK = _random(num_rows, 3072), _random(5120, 3072) * 3072**-0.5
        out_TN, expected_TN = _random(num_rows, 5120), x_TK.float() @ w_NK.float().t()
        tolerance_TN = _tolerance(x_TK, w_NK, expected_TN)
        for algorithm in filter(None, map(matmul.adopt, found)):
            num_adopted += 1
            matmul.run(algorithm, x_TK, w_NK, out_TN)
            error = excess(out_TN, expected_TN, tolerance_TN)
            assert error <= 1, (algorithm.order, matmul.describe(algorithm), error)
    assert num_adopted


def test_tuned_gemms_are_torchs_in_a_graph(lt: CublasLt) -> None:
    sizes, (num_out, num_in) = (256, 96, 16), (3072, 8192)
    weights = [_random(num_out, num_in) * num_in**-0.5 for _ in range(4)]
    groups = [matrix_group(weights, epilogue) for epilogue in (GemmEpilogue.PLAIN, GemmEpilogue.ADDED)]
    table, report = Autotuner(GraphBenchmarks(lt.device)).tune(CublasLtKernels(lt), groups, sizes)
    gemm = TunedGemm(table)
    assert report.num_measured >= 2
    for num_rows in (*sizes, 40):
        x_TK, before_TN = _random(num_rows, num_in), _random(num_rows, num_out)
        expected_TN = x_TK.float() @ weights[0].float().t()
        added_TN = before_TN.clone()
        gemm.linear(x_TK, weights[0])
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out_TN = gemm.linear(x_TK, weights[0])
            added_TN.copy_(before_TN)
            gemm.add_linear(x_TK, weights[0], added_TN)
        graph.replay()
        for actual_TN, wanted_TN, residual_TN in (
            (out_TN, expected_TN, None),
            (added_TN, expected_TN + before_TN, before_TN),
        ):
            assert excess(actual_TN, wanted_TN, _tolerance(x_TK, weights[0], wanted_TN, residual_TN)) <= 1


def _tolerance(
    x_TK: torch.Tensor, w_NK: torch.Tensor, expected_TN: torch.Tensor, residual_TN: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, N]: sums are float32, in whatever parts a library adds them, and rounded once.

    Some of cuBLASLt's kernels round a GEMM's result before they add the residual to it.
    """
    tolerance_TN = gemm_tolerance(x_TK, w_NK, expected_TN.bfloat16(), residual_TN, is_random=True)
    if residual_TN is None:
        return tolerance_TN
    return tolerance_TN + unit_roundoff(torch.bfloat16) * (expected_TN - residual_TN).double().abs()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
