"""The choice of algorithms by measured times, with a fake library and times that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.fake_cublaslt import NOT_SUPPORTED, FakeCublasLt
from support.rounding import excess, product_tolerance, unit_roundoff

from radixmesh.daemons.worker.cuda.gemm.cublaslt import Algorithm, CublasLt, ProductShape
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import CublasLtError
from radixmesh.daemons.worker.cuda.gemm.product_tuning import MatrixGroup, ProductTuner, Stand, fastest
from radixmesh.daemons.worker.cuda.gemm.products import Products, TorchProducts, TunedProducts

_CPU = torch.device("cpu")
_ROWS, _N, _K = 16, 256, 128
_ALIGNMENT = 16


class _Times(Stand):
    """By order of the algorithm, None being torch: microseconds; an order that is missing does not run."""

    def __init__(self, times: dict[int | None, float]) -> None:
        self._times = times

    def candidate(self, algorithm: Algorithm | None) -> Callable[[], float]:
        order = algorithm.order if algorithm else None
        if order not in self._times:
            raise CublasLtError("does not run")
        return lambda: self._times[order]


def _tuner(
    library: FakeCublasLt, times: Callable[[ProductShape], dict[int | None, float]], step_s: float = 0.0
) -> ProductTuner:
    """Of which each product takes step_s of the two seconds that there are."""
    now = [0.0]

    def create(shape: ProductShape, weights: Sequence[torch.Tensor]) -> Stand:
        now[0] += step_s
        return _Times(times(shape))

    return ProductTuner(CublasLt(_CPU, library, alignment=_ALIGNMENT), create, lambda: now[0])


def _groups() -> list[MatrixGroup]:
    weights = [_random(_N, _K) for _ in range(2)]
    return [MatrixGroup(weights, is_added=False), MatrixGroup(weights, is_added=True)]


@pytest.mark.parametrize("products", [TorchProducts(), TunedProducts({})], ids=["torch", "nothing tuned"])
def test_products_are_torchs(products: Products) -> None:
    _check(products)


def test_a_tuned_product_is_torchs_and_runs_the_chosen_algorithm() -> None:
    library = FakeCublasLt()
    tuner = _tuner(library, lambda shape: {None: 10.0, 0: 9.9, 2: 7.0 if shape.is_added else 12.0, 3: 8.0})
    products = tuner.tune(_groups(), [_ROWS])
    _check(products)
    assert library.launched == [103, 102]
    assert (len(products), tuner.num_measured, tuner.num_chosen) == (2, 2, 2)
    assert tuner.saved_us == {_ROWS: 2 * 2.0 + 2 * 3.0}


def test_other_shapes_and_tensors_that_lie_elsewhere_are_torchs() -> None:
    library = FakeCublasLt()
    products = _tuner(library, lambda shape: {None: 10.0, 0: 5.0}).tune(_groups(), [_ROWS])
    _check(products, num_rows=_ROWS + 1)
    _check(products, offset=1)
    assert library.launched == []


def test_what_gains_next_to_nothing_is_left_to_torch() -> None:
    library = FakeCublasLt()
    products = _tuner(library, lambda shape: {None: 10.0, 0: 9.9, 2: 9.85, 3: 11.0}).tune(_groups(), [_ROWS])
    _check(products)
    assert library.launched == [] and len(products) == 0


def test_an_algorithm_that_does_not_run_is_passed_over() -> None:
    library = FakeCublasLt()
    products = _tuner(library, lambda shape: {None: 10.0, 3: 8.0}).tune(_groups(), [_ROWS])
    _check(products)
    assert library.launched == [103, 103]


def test_a_product_that_the_library_refuses_is_torchs() -> None:
    products = _tuner(FakeCublasLt(num_algorithms=0), lambda shape: {None: 10.0}).tune(_groups(), [_ROWS])
    _check(products)
    assert len(products) == 0


def test_sizes_between_take_what_the_next_larger_one_does_when_time_is_up() -> None:
    # Two products a size: after those of 256, 128 and 64 rows time is up.
    tuner = _tuner(FakeCublasLt(), lambda shape: {None: 10.0, 0: 5.0 if shape.num_rows > 64 else 20.0}, step_s=0.34)
    products = tuner.tune(_groups(), [2, 64, 65, 96, 128, 160, 256])
    assert (tuner.num_measured, tuner.num_left_out) == (6, 8)
    assert {shape.num_rows for shape in products._table} == {65, 96, 128, 160, 256}


def test_an_algorithm_that_does_not_serve_a_size_is_not_used_there() -> None:
    # The fake library's third algorithm serves no size but the one that it was named for.
    tuner = _tuner(FakeCublasLt(), lambda shape: {None: 10.0, 2: 5.0}, step_s=1.0)
    products = tuner.tune(_groups(), [96, 128])
    assert {(shape.num_rows, shape.is_added) for shape in products._table} == {(128, False), (128, True)}


def test_an_algorithm_that_stops_running_is_left_for_torchs() -> None:
    """One that was measured at another size has never run before."""
    library = FakeCublasLt()
    products = _tuner(library, lambda shape: {None: 10.0, 0: 5.0}).tune(_groups(), [_ROWS])
    assert len(products) == 2
    library.cublasLtMatmul = lambda *_: NOT_SUPPORTED
    _check(products)
    assert len(products) == 0


def test_the_fastest_is_found_among_noisy_times() -> None:
    # Brief looks deceive: the second look at each is what it takes.
    looks = {None: [5.0, 10.0], 0: [6.0, 9.0], 1: [4.0, 8.0], 2: [50.0, 1.0]}
    takes = {name: iter(times + times[-1:] * 9).__next__ for name, times in looks.items()}
    best, saved = fastest(takes)
    # What looked hopeless at first is not looked at again.
    assert (best, saved) == (1, 2.0)


def _check(products: Products, num_rows: int = _ROWS, offset: int = 0) -> None:
    """Both of its products against torch's in float32."""
    x_TK, w_NK, residual_TN = _random(num_rows, _K, offset), _random(_N, _K, offset), _random(num_rows, _N, offset)
    product_TN = x_TK.float() @ w_NK.float().t()
    expected_TN = residual_TN.float() + product_TN
    product_tolerance_TN = product_tolerance(x_TK, w_NK, product_TN.to(x_TK.dtype))
    assert excess(products.linear(x_TK, w_NK), product_TN, product_tolerance_TN) <= 1
    # The product may be rounded before it is added.
    tolerance_TN = product_tolerance(x_TK, w_NK, expected_TN.to(x_TK.dtype), residual_TN)
    tolerance_TN += unit_roundoff(x_TK.dtype) * product_TN.double().abs()
    products.add_linear(x_TK, w_NK, residual_TN)
    assert excess(residual_TN, expected_TN, tolerance_TN) <= 1


def _random(num_rows: int, num_columns: int, offset: int = 0) -> torch.Tensor:
    """Beginning `offset` elements behind what the host's allocator gives, which is aligned to 64 bytes."""
    return torch.randn(num_rows * num_columns + offset).to(torch.bfloat16)[offset:].view(num_rows, num_columns)
