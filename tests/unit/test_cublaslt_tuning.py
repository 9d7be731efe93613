"""The choice of algorithms by measured times, with a fake library and times that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.fake_cublaslt import NOT_SUPPORTED, FakeCublasLt
from support.rounding import excess, gemm_tolerance, unit_roundoff

from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, TorchGemm, TunedGemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt import Algorithm, CublasLt, GemmShape
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import CublasLtError
from radixmesh.daemons.worker.cuda.gemm.cublaslt_tuning import Benchmark, CublasLtTuner, MatrixGroup, fastest

_CPU = torch.device("cpu")
_ROWS, _N, _K = 16, 256, 128
_ALIGNMENT = 16


class _Times(Benchmark):
    """By order of the algorithm, None being torch: microseconds; an order that is missing does not run."""

    def __init__(self, times: dict[int | None, float]) -> None:
        self._times = times

    def candidate(self, algorithm: Algorithm | None) -> Callable[[], float]:
        order = algorithm.order if algorithm else None
        if order not in self._times:
            raise CublasLtError("does not run")
        return lambda: self._times[order]


def _tuner(
    library: FakeCublasLt, times: Callable[[GemmShape], dict[int | None, float]], step_s: float = 0.0
) -> CublasLtTuner:
    """Of which each GEMM takes step_s of the two seconds that there are."""
    now = [0.0]

    def create(shape: GemmShape, weights: Sequence[torch.Tensor]) -> Benchmark:
        now[0] += step_s
        return _Times(times(shape))

    return CublasLtTuner(CublasLt(_CPU, library, alignment=_ALIGNMENT), create, lambda: now[0])


def _groups() -> list[MatrixGroup]:
    weights = [_random(_N, _K) for _ in range(2)]
    return [MatrixGroup(weights, is_added=False), MatrixGroup(weights, is_added=True)]


@pytest.mark.parametrize("gemm", [TorchGemm(), TunedGemm({})], ids=["torch", "nothing tuned"])
def test_gemms_are_torchs(gemm: GemmBackend) -> None:
    _check(gemm)


def test_a_tuned_gemm_is_torchs_and_runs_the_chosen_algorithm() -> None:
    library = FakeCublasLt()
    tuner = _tuner(library, lambda shape: {None: 10.0, 0: 9.9, 2: 7.0 if shape.is_added else 12.0, 3: 8.0})
    gemm = tuner.tune(_groups(), [_ROWS])
    _check(gemm)
    assert library.launched == [103, 102]
    assert (len(gemm), tuner.num_measured, tuner.num_chosen) == (2, 2, 2)
    assert tuner.saved_us == {_ROWS: 2 * 2.0 + 2 * 3.0}


def test_other_shapes_and_tensors_that_lie_elsewhere_are_torchs() -> None:
    library = FakeCublasLt()
    gemm = _tuner(library, lambda shape: {None: 10.0, 0: 5.0}).tune(_groups(), [_ROWS])
    _check(gemm, num_rows=_ROWS + 1)
    _check(gemm, offset=1)
    assert library.launched == []


def test_what_gains_next_to_nothing_is_left_to_torch() -> None:
    library = FakeCublasLt()
    gemm = _tuner(library, lambda shape: {None: 10.0, 0: 9.9, 2: 9.85, 3: 11.0}).tune(_groups(), [_ROWS])
    _check(gemm)
    assert library.launched == [] and len(gemm) == 0


def test_an_algorithm_that_does_not_run_is_passed_over() -> None:
    library = FakeCublasLt()
    gemm = _tuner(library, lambda shape: {None: 10.0, 3: 8.0}).tune(_groups(), [_ROWS])
    _check(gemm)
    assert library.launched == [103, 103]


def test_a_gemm_that_the_library_refuses_is_torchs() -> None:
    gemm = _tuner(FakeCublasLt(num_algorithms=0), lambda shape: {None: 10.0}).tune(_groups(), [_ROWS])
    _check(gemm)
    assert len(gemm) == 0


def test_sizes_between_take_what_the_next_larger_one_does_when_time_is_up() -> None:
    # Two GEMMs a size: after those of 256, 128 and 64 rows time is up.
    tuner = _tuner(FakeCublasLt(), lambda shape: {None: 10.0, 0: 5.0 if shape.num_rows > 64 else 20.0}, step_s=0.34)
    gemm = tuner.tune(_groups(), [2, 64, 65, 96, 128, 160, 256])
    assert (tuner.num_measured, tuner.num_left_out) == (6, 8)
    assert {shape.num_rows for shape in gemm.table} == {65, 96, 128, 160, 256}


def test_an_algorithm_that_does_not_serve_a_size_is_not_used_there() -> None:
    # The fake library's third algorithm serves no size but the one that it was named for.
    tuner = _tuner(FakeCublasLt(), lambda shape: {None: 10.0, 2: 5.0}, step_s=1.0)
    gemm = tuner.tune(_groups(), [96, 128])
    assert {(shape.num_rows, shape.is_added) for shape in gemm.table} == {(128, False), (128, True)}


def test_an_algorithm_that_stops_running_is_left_for_torchs() -> None:
    """One that was measured at another size has never run before."""
    library = FakeCublasLt()
    gemm = _tuner(library, lambda shape: {None: 10.0, 0: 5.0}).tune(_groups(), [_ROWS])
    assert len(gemm) == 2
    library.cublasLtMatmul = lambda *_: NOT_SUPPORTED
    _check(gemm)
    assert len(gemm) == 0


def test_the_fastest_is_found_among_noisy_times() -> None:
    # Brief looks deceive: the second look at each is what it takes.
    looks = {None: [5.0, 10.0], 0: [6.0, 9.0], 1: [4.0, 8.0], 2: [50.0, 1.0]}
    takes = {name: iter(times + times[-1:] * 9).__next__ for name, times in looks.items()}
    best, saved = fastest(takes)
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
