"""The choice of algorithms by measured times, with a fake library and times that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.fake_cublaslt import NOT_SUPPORTED, FakeCublasLt
from support.rounding import excess, gemm_tolerance, unit_roundoff

from radixmesh.daemons.worker.cuda.gemm.autotuner import (
    Autotuner,
    Benchmark,
    Benchmarks,
    MatrixGroup,
    Operands,
    Timing,
    TuningPolicy,
    TuningReport,
    fastest,
)
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, GemmEpilogue, GemmProblem, TorchGemm, TunedGemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt import Algorithm, CublasLt
from radixmesh.daemons.worker.cuda.gemm.cublaslt_kernels import CublasLtKernels
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import CublasLtError
from radixmesh.daemons.worker.cuda.gemm.tuning import matrix_group

_CPU = torch.device("cpu")
_ROWS, _N, _K = 16, 256, 128
_ALIGNMENT = 16


class _Times(Benchmark[Algorithm]):
    """By order of the algorithm, None being torch: microseconds; an order that is missing does not run."""

    def __init__(self, times: dict[int | None, float]) -> None:
        self._times = times

    def candidate(self, candidate: Algorithm | None) -> Timing:
        order = candidate.order if candidate else None
        if order not in self._times:
            raise CublasLtError("does not run")
        return lambda: self._times[order]


class _SetTimes(Benchmarks):
    """Each problem takes step_s of the two seconds that there are."""

    def __init__(self, times: Callable[[GemmProblem], dict[int | None, float]], step_s: float) -> None:
        self._times, self._step_s, self.now_s = times, step_s, 0.0

    def create(
        self, problem: GemmProblem, operands: Operands[torch.Tensor, Algorithm], weights: Sequence[torch.Tensor]
    ) -> Benchmark[Algorithm]:
        self.now_s += self._step_s
        return _Times(self._times(problem))


def _tune(
    library: FakeCublasLt,
    times: Callable[[GemmProblem], dict[int | None, float]],
    sizes: Sequence[int] = (_ROWS,),
    step_s: float = 0.0,
) -> tuple[TunedGemm, TuningReport]:
    benchmarks = _SetTimes(times, step_s)
    kernels = CublasLtKernels(CublasLt(_CPU, library, alignment=_ALIGNMENT))
    table, report = Autotuner(benchmarks, lambda: benchmarks.now_s).tune(kernels, _groups(), sizes)
    return TunedGemm(table), report


def _groups() -> list[MatrixGroup[torch.Tensor]]:
    weights = [_random(_N, _K) for _ in range(2)]
    return [matrix_group(weights, epilogue) for epilogue in (GemmEpilogue.PLAIN, GemmEpilogue.ADDED)]


@pytest.mark.parametrize("gemm", [TorchGemm(), TunedGemm({})], ids=["torch", "nothing tuned"])
def test_gemms_are_torchs(gemm: GemmBackend) -> None:
    _check(gemm)


def test_a_tuned_gemm_is_torchs_and_runs_the_chosen_algorithm() -> None:
    library = FakeCublasLt()
    added_us = {GemmEpilogue.PLAIN: 12.0, GemmEpilogue.ADDED: 7.0}
    gemm, report = _tune(library, lambda problem: {None: 10.0, 0: 9.9, 2: added_us[problem.epilogue], 3: 8.0})
    _check(gemm)
    assert library.launched == [103, 102]
    assert (len(gemm), report.num_measured, len(report.chosen)) == (2, 2, 2)
    assert report.saved_us == {_ROWS: 2 * 2.0 + 2 * 3.0}


def test_other_shapes_and_tensors_that_lie_elsewhere_are_torchs() -> None:
    library = FakeCublasLt()
    gemm, _ = _tune(library, lambda problem: {None: 10.0, 0: 5.0})
    _check(gemm, num_rows=_ROWS + 1)
    _check(gemm, offset=1)
    assert library.launched == []


def test_what_gains_next_to_nothing_is_left_to_torch() -> None:
    library = FakeCublasLt()
    gemm, _ = _tune(library, lambda problem: {None: 10.0, 0: 9.9, 2: 9.85, 3: 11.0})
    _check(gemm)
    assert library.launched == [] and len(gemm) == 0


def test_an_algorithm_that_does_not_run_is_passed_over() -> None:
    library = FakeCublasLt()
    gemm, _ = _tune(library, lambda problem: {None: 10.0, 3: 8.0})
    _check(gemm)
    assert library.launched == [103, 103]


def test_a_gemm_that_the_library_refuses_is_torchs() -> None:
    gemm, _ = _tune(FakeCublasLt(num_algorithms=0), lambda problem: {None: 10.0})
    _check(gemm)
    assert len(gemm) == 0


def test_sizes_between_take_what_the_next_larger_one_does_when_time_is_up() -> None:
    # Two GEMMs a size: after those of 256, 128 and 64 rows time is up.
    times = lambda problem: {None: 10.0, 0: 5.0 if problem.num_rows > 64 else 20.0}  # noqa: E731
    gemm, report = _tune(FakeCublasLt(), times, [2, 64, 65, 96, 128, 160, 256], step_s=0.21)
    assert (report.num_measured, report.num_left_out) == (6, 8)
    assert {num_rows for num_rows, *_ in gemm.problems} == {65, 96, 128, 160, 256}


def test_an_algorithm_that_does_not_serve_a_size_is_not_used_there() -> None:
    # The fake library's third algorithm serves no size but the one that it was named for.
    gemm, _ = _tune(FakeCublasLt(), lambda problem: {None: 10.0, 2: 5.0}, [96, 128], step_s=1.0)
    assert {(num_rows, epilogue) for num_rows, *_, epilogue in gemm.problems} == {
        (128, GemmEpilogue.PLAIN),
        (128, GemmEpilogue.ADDED),
    }


def test_an_algorithm_that_stops_running_is_left_for_torchs() -> None:
    """One that was measured at another size has never run before."""
    library = FakeCublasLt()
    gemm, _ = _tune(library, lambda problem: {None: 10.0, 0: 5.0})
    assert len(gemm) == 2
    library.cublasLtMatmul = lambda *_: NOT_SUPPORTED
    _check(gemm)
    assert len(gemm) == 0


def test_the_fastest_is_found_among_noisy_times() -> None:
    # Brief looks deceive: the second look at each is what it takes.
    looks = {None: [5.0, 10.0], 0: [6.0, 9.0], 1: [4.0, 8.0], 2: [50.0, 1.0]}
    takes = {name: iter(times + times[-1:] * 9).__next__ for name, times in looks.items()}
    best, saved = fastest(takes, TuningPolicy(least_gain=0.05))
    # An algorithm that looked hopeless at first is not looked at again.
    assert (best, saved) == (1, 2.0)


def _check(gemm: GemmBackend, num_rows: int = _ROWS, offset: int = 0) -> None:
    """Both of its GEMMs against torch's in float32."""
    x_TK, w_NK, residual_TN = _random(num_rows, _K, offset), _random(_N, _K, offset), _random(num_rows, _N, offset)
    result_TN = x_TK.float() @ w_NK.float().t()
    expected_TN = residual_TN.float() + result_TN
    gemm_tolerance_TN = gemm_tolerance(x_TK, w_NK, result_TN.to(x_TK.dtype))
    assert excess(gemm.linear(x_TK, w_NK), result_TN, gemm_tolerance_TN) <= 1
    # The GEMM may be rounded before it is added.
    tolerance_TN = gemm_tolerance(x_TK, w_NK, expected_TN.to(x_TK.dtype), residual_TN)
    tolerance_TN += unit_roundoff(x_TK.dtype) * result_TN.double().abs()
    gemm.add_linear(x_TK, w_NK, residual_TN)
    assert excess(residual_TN, expected_TN, tolerance_TN) <= 1


def _random(num_rows: int, num_columns: int, offset: int = 0) -> torch.Tensor:
    """Beginning `offset` elements behind what the host's allocator gives, which is aligned to 64 bytes."""
    return torch.randn(num_rows * num_columns + offset).to(torch.bfloat16)[offset:].view(num_rows, num_columns)
