"""The choice of GEMMs that stream their weights, with a kernel in torch and times that a test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
from support.rounding import excess, gated_tolerance, gemm_tolerance, sum_tolerance, unit_roundoff

from radixmesh.daemons.worker.cuda.gemm import autotuner, sm90_kernels
from radixmesh.daemons.worker.cuda.gemm.autotuner import (
    Autotuner,
    Benchmark,
    Benchmarks,
    GraphBenchmark,
    Operands,
    Timing,
    TuningPolicy,
    TuningReport,
    fastest,
)
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue, GemmKernel, GemmProblem, TorchGemm, TunedGemm
from radixmesh.daemons.worker.cuda.gemm.sm90_kernels import Sm90Gemm, Sm90Kernels, check_kernel
from radixmesh.daemons.worker.cuda.gemm.tuning import compiled_sm90, matrix_group
from radixmesh.daemons.worker.cuda.ops import TritonOps
from radixmesh.kernels.gemm_sm90.candidates import cache_bytes, candidates
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver, Kernel, Launch, ParameterType, PreparedLaunch
from radixmesh.kernels.gemm_sm90.gemm import GemmSm90, gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.variants import FEW_ROWS, GemmConfig, Variant, variant_of
from radixmesh.kernels.inverse_rms import inverse_rms_reference

_N, _K, _EPS = 256, 128, 1e-5


class _TorchKernel(GemmSm90):
    """Computes as the kernel would, wrongly by `error`."""

    def __init__(self, error: float = 0.0, can: bool = True) -> None:
        self.launched: list[tuple[str, GemmConfig]] = []
        self.prepared: list[list[Variant]] = []
        self.square_sums: list[torch.Tensor | None] = []
        self.broken: set[Variant] = set()
        self._error = error
        self._can = can

    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor, is_gated: bool = False) -> bool:
        return self._can

    def prepare(self, variants: Iterable[Variant]) -> None:
        self.prepared.append(list(variants))

    def load(self, variant: Variant) -> None:
        if variant in self.broken:
            raise OSError("does not load")

    def linear(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        config: GemmConfig,
        *,
        residual_TN: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        square_sums_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is not None
        self.launched.append(("linear" if residual_TN is None else "added", config))
        out.copy_(linear_reference(x_TK, w_NK, residual_TN) * (1 + self._error))
        if square_sums_out is not None:
            square_sums_out.copy_(out.float().square().sum(dim=1) / len(square_sums_out))
        return out

    def new_square_sums(self, x_TK: torch.Tensor, w_NK: torch.Tensor, config: GemmConfig) -> torch.Tensor:
        return torch.empty(3, x_TK.shape[0])

    def gate_up_silu(
        self,
        x_TK: torch.Tensor,
        w_2FK: torch.Tensor,
        config: GemmConfig,
        *,
        eps: float | None = None,
        out: torch.Tensor | None = None,
        square_sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is not None
        self.launched.append(("gated", config))
        self.square_sums.append(square_sums)
        if square_sums is not None:
            sums_T, rtol = x_TK.float().square().sum(dim=1), 2 * sum_tolerance(x_TK.shape[1], 1.0)
            torch.testing.assert_close(square_sums.sum(dim=0), sums_T, rtol=rtol, atol=0)
        return out.copy_(gate_up_silu_reference(x_TK, w_2FK, eps) * (1 + self._error))


class _Times(Benchmark[GemmConfig]):
    """Microseconds of others, and of all configurations of one tile; those of other tiles do not run."""

    def __init__(self, others: float, tile: int, micros: float) -> None:
        self._others, self._tile, self._micros = others, tile, micros

    def candidate(self, candidate: GemmConfig | None) -> Timing:
        if candidate is not None and candidate.tile != self._tile:
            raise RuntimeError("does not run")
        return lambda: self._others if candidate is None else self._micros + candidate.split_k


class _SetTimes(Benchmarks):
    """10 us of others. on_create is called before each problem."""

    def __init__(self, micros: Callable[[GemmProblem], float], on_create: Callable[[], None] = lambda: None) -> None:
        self._micros, self._on_create = micros, on_create

    def create(
        self, problem: GemmProblem, operands: Operands[torch.Tensor, GemmConfig], weights: Sequence[torch.Tensor]
    ) -> Benchmark[GemmConfig]:
        self._on_create()
        return _Times(10.0, 64, self._micros(problem))


class _Driver(CudaDriver):
    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.num_launched = 0

    def load(self, cubin: bytes, name: str, shared_bytes: int) -> Kernel:
        self.loaded.append(cubin)
        return Kernel(len(self.loaded))

    def prepare(self, kernel: Kernel, launch: Launch, parameter_types: Sequence[ParameterType]) -> PreparedLaunch:
        return PreparedLaunch(kernel, None, tuple(parameter_types))

    def launch(self, prepared: PreparedLaunch, *arguments: object) -> None:
        self.num_launched += 1


def _tuned(kernel: GemmSm90, micros: Callable[[GemmProblem], float], sizes: Sequence[int]) -> TunedGemm:
    table, _ = _tune(kernel, Autotuner(_SetTimes(micros), lambda: 0.0), sizes)
    return TunedGemm(table)


def _tune(
    kernel: GemmSm90, tuner: Autotuner, sizes: Sequence[int], epilogues: Iterable[GemmEpilogue] = GemmEpilogue
) -> tuple[dict[GemmProblem, GemmKernel], TuningReport]:
    weights = [_random(_N, _K) for _ in range(2)]
    groups = [matrix_group(weights, epilogue) for epilogue in epilogues]
    return tuner.tune(Sm90Kernels(kernel, TorchGemm()), groups, sizes)


def _problem(num_rows: int, w_NK: torch.Tensor, epilogue: GemmEpilogue) -> GemmProblem:
    return matrix_group([w_NK], epilogue).problem(num_rows)


def _candidates(is_gated: bool) -> list[GemmConfig]:
    return candidates(16, _N // (1 + is_gated), _K, is_gated=is_gated)


def _silu_mul(
    result_T2F: torch.Tensor, out: torch.Tensor | None = None, *, norm_input_TD: torch.Tensor, eps: float
) -> torch.Tensor:
    factor_T1 = (norm_input_TD.float().square().mean(dim=1, keepdim=True) + eps).rsqrt()
    gate_TF, up_TF = (result_T2F.float() * factor_T1).chunk(2, dim=1)
    gated_TF = (torch.nn.functional.silu(gate_TF) * up_TF).to(result_T2F.dtype)
    return gated_TF if out is None else out.copy_(gated_TF)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _run_all(gemm: TunedGemm, num_rows: int) -> None:
    """Results are right whoever computes them."""
    x_TK, w_NK, before_TN = _random(num_rows, _K), _random(_N, _K), _random(num_rows, _N)
    _check_gemm(gemm, x_TK, w_NK)
    added_TN, result_TN = before_TN.clone(), linear_reference(x_TK, w_NK)
    gemm.add_linear(x_TK, w_NK, added_TN)
    expected_TN = linear_reference(x_TK, w_NK, before_TN)
    # Others may round the GEMM before they add it.
    tolerance_TN = gemm_tolerance(x_TK, w_NK, expected_TN, before_TN)
    tolerance_TN += unit_roundoff(result_TN.dtype) * result_TN.double().abs()
    assert excess(added_TN, expected_TN, tolerance_TN) <= 1
    gated_TF = TritonOps(gemm=gemm).gate_up_silu_deferred_norm(x_TK, w_NK, _EPS)
    expected_TF = gate_up_silu_reference(x_TK, w_NK, _EPS)
    tolerance_TF = gated_tolerance(x_TK, w_NK, expected_TF, inverse_rms_reference(x_TK, _EPS))
    assert excess(gated_TF, expected_TF, tolerance_TF) <= 1


def _check_gemm(gemm: TunedGemm, x_TK: torch.Tensor, w_NK: torch.Tensor) -> None:
    expected_TN = linear_reference(x_TK, w_NK)
    assert excess(gemm.linear(x_TK, w_NK), expected_TN, gemm_tolerance(x_TK, w_NK, expected_TN)) <= 1


def test_the_fastest_configuration_serves_its_rows_and_those_up_to_half_as_many() -> None:
    kernel = _TorchKernel()
    gemm = _tuned(kernel, lambda problem: 2.0, [4, 12, 16])
    assert len(gemm) == 6
    _run_all(gemm, 16)
    _run_all(gemm, 12)
    best = {
        is_gated: min(
            (config for config in _candidates(is_gated) if config.tile == 64),
            key=lambda config: (
                config.split_k,
                cache_bytes(config, 16, _N // (1 + is_gated), _K, is_gated=is_gated),
            ),
        )
        for is_gated in (False, True)
    }
    expected = [("linear", best[False]), ("added", best[False]), ("gated", best[True])]
    assert kernel.launched == 2 * expected
    x_TK, w_NK = _random(4, _K), _random(_N, _K)
    _check_gemm(gemm, x_TK, w_NK)
    assert gemm.gate_up_silu(x_TK, w_NK, _EPS) is None and len(kernel.launched) == 6


def test_what_is_not_faster_is_left_to_others() -> None:
    kernel = _TorchKernel()
    gemm = _tuned(kernel, lambda problem: 2.0 if problem.epilogue is GemmEpilogue.ADDED else 12.0, [16])
    x_TK, w_NK, added_TN = _random(16, _K), _random(_N, _K), _random(16, _N)
    gemm.linear(x_TK, w_NK)
    gemm.add_linear(x_TK, w_NK, added_TN)
    assert gemm.gate_up_silu(x_TK, w_NK, _EPS) is None
    assert [name for name, _ in kernel.launched] == ["added"] and len(gemm) == 1


def test_tensors_that_the_kernel_does_not_take_are_others() -> None:
    kernel = _TorchKernel(can=False)
    gemm = _tuned(kernel, lambda problem: 2.0, [16])
    assert len(gemm) == 3
    x_TK, w_NK, before_TN = _random(16, _K), _random(_N, _K), _random(16, _N)
    _check_gemm(gemm, x_TK, w_NK)
    added_TN = before_TN.clone()
    gemm.add_linear(x_TK, w_NK, added_TN)
    assert gemm.gate_up_silu(x_TK, w_NK, _EPS) is None and kernel.launched == []


def test_what_is_a_little_slower_alone_is_chosen_all_the_same() -> None:
    # A configuration takes so much and as many microseconds as it has splits.
    assert len(_tuned(_TorchKernel(), lambda problem: 11.95 - 1, [16])) == 3
    assert len(_tuned(_TorchKernel(), lambda problem: 12.05 - 1, [16])) == 0


def test_a_gain_that_suffices_is_the_callers_to_say() -> None:
    takes: dict[int | None, Callable[[], float]] = {None: lambda: 100.0, 0: lambda: 101.0, 1: lambda: 97.0}
    assert fastest(takes, TuningPolicy(least_gain=0.05)) == (None, 0.0)
    assert fastest(takes, TuningPolicy(least_gain=0.02)) == (1, 3.0)
    del takes[1]
    assert fastest(takes, TuningPolicy(least_gain=0.02)) == (None, 0.0)
    assert fastest(takes, TuningPolicy(allowed_us=2.0)) == (0, -1.0)
    assert fastest(takes, TuningPolicy(allowed_us=0.5)) == (None, 0.0)
    assert fastest({None: lambda: 1.0}, TuningPolicy(allowed_us=2.0)) == (None, 0.0)


def test_kernels_are_made_ready_at_once_before_any_is_measured() -> None:
    """Those that are measured, then those of sizes between."""
    kernel, seconds, measured_at = _TorchKernel(), iter([0.0, 100.0, 101.0, 102.0, 150.0, 157.0]), []
    benchmarks = _SetTimes(lambda problem: 2.0, lambda: measured_at.append(len(kernel.prepared)))
    # The time of compiling is not part of the budget.
    table, report = _tune(kernel, Autotuner(benchmarks, lambda: next(seconds)), [4, 12, 16], [GemmEpilogue.PLAIN])
    before, behind = kernel.prepared
    assert before == [variant_of(config, 16, False, torch.bfloat16) for config in _candidates(False)]
    assert measured_at == [1]
    assert [variant.rows for variant in behind] == [16, 16] and [problem.num_rows for problem in table] == [12, 16]
    assert (report.num_measured, report.num_left_out, report.prepare_seconds) == (1, 0, 107.0)


def test_kernels_are_compiled_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and loaded when they are launched; what does not compile says so then."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    together, compiled = threading.Barrier(2, timeout=30), []

    def compile_(text: str) -> bytes:
        compiled.append(text)
        if len(compiled) <= 4:
            together.wait()
        if "kTileN = 128" in text:
            raise RuntimeError("does not compile")
        return text.encode()

    driver = _Driver()
    kernel = GemmSm90(driver, compile_)
    x_TK, w_NK = _random(16, _K), _random(_N, _K)
    good, bad = (GemmConfig(tile=tile, split_k=1, stages=3) for tile in (64, 128))
    for config in (good, bad):
        variants = [variant_of(config, 16, is_gated, torch.bfloat16) for is_gated in (False, True)]
        kernel.prepare([*variants, *variants])
        assert sorted(compiled[-2:]) == sorted(variant.source() for variant in variants) and driver.loaded == []
    for _ in range(2):
        kernel.linear(x_TK, w_NK, good)
    assert driver.loaded == [variant_of(good, 16, False, torch.bfloat16).source().encode()] and driver.num_launched == 2
    kernel.prepare(variant_of(good, 16, is_gated, torch.bfloat16) for is_gated in (False, True))
    assert len(compiled) == 4
    with pytest.raises(RuntimeError, match="does not compile"):
        kernel.linear(x_TK, w_NK, bad)
    assert len(compiled) == 5


def test_what_does_not_load_is_left_to_others() -> None:
    kernel = _TorchKernel()
    kernel.broken = {variant_of(config, 16, False, torch.bfloat16) for config in _candidates(False)}
    gemm = _tuned(kernel, lambda problem: 2.0, [12, 16])
    assert {epilogue for *_, epilogue in gemm.problems} == {GemmEpilogue.GATED}
    x_TK, w_NK = _random(12, _K), _random(_N, _K)
    _check_gemm(gemm, x_TK, w_NK)
    assert kernel.launched == []


@pytest.mark.parametrize(
    ("sizes", "measured"),
    [
        ([2, 4, 8, 16, 24, 48], [16, 48, 8]),
        ([8, 16, 32, 64, 100], [64, 100, 32, 16, 8]),
        ([8, 64, 256, 512], [64, 256, 8]),
        ([512], []),
        ([3], [3]),
    ],
)
def test_the_largest_size_is_measured_though_it_is_no_usual_one(sizes: list[int], measured: list[int]) -> None:
    kernels = Sm90Kernels(_TorchKernel(), TorchGemm())
    rows = list(kernels.measured_rows(sizes))
    gemm = _tuned(_TorchKernel(), lambda problem: 2.0, sizes)
    assert sorted(rows) == sorted(measured) and rows[:2] == measured[:2]
    assert len(gemm) == 3 * len([size for size in sizes if size <= 256])


def test_few_rows_have_the_kernel_of_the_rows_that_they_are_padded_to() -> None:
    """2 and 3 rows too, which what was measured at 8 is more than twice of."""
    sizes = [2, 3, 4, 8, 16]
    gemm = _tuned(_TorchKernel(), lambda problem: 2.0, sizes)
    assert {problem[0] for problem in gemm.problems} == set(sizes)


def test_one_row_with_its_drafts_is_measured_for_itself() -> None:
    """4 drafts: its 5 rows, and fewer, have other tilings than 8."""
    sizes = [2, 4, 5, 8, 10, 16, 20]
    kernel, w_NK = _TorchKernel(), _random(64, 2048)
    kernels = Sm90Kernels(kernel, TorchGemm())
    assert list(kernels.measured_rows(sizes)) == [16, 20, 8, 5]
    five, eight = FEW_ROWS, replace(FEW_ROWS, tile=64)
    problem = _problem(8, w_NK, GemmEpilogue.PLAIN)
    chosen = {}
    for of, bound in kernels.bind({problem: eight, problem._replace(num_rows=5): five}, sizes).items():
        bound.run(_random(of.num_rows, 2048), w_NK, _random(of.num_rows, 64))
        chosen[of.num_rows] = kernel.launched[-1][1]
    assert chosen == {2: five, 4: five, 5: five, 8: eight}


@pytest.mark.parametrize("epilogue", GemmEpilogue)
def test_a_candidate_that_errs_is_not_timed(monkeypatch: pytest.MonkeyPatch, epilogue: GemmEpilogue) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(sm90_kernels, "silu_mul", _silu_mul)
    launched: list[Callable[[], object]] = []

    def timed(launches: Sequence[Callable[[], object]], stream: object) -> SimpleNamespace:
        launched.extend(launches)
        return SimpleNamespace(micros=lambda: 1.0)

    monkeypatch.setattr(autotuner, "TimedGraph", timed)
    weights = [_random(_N, _K)]
    problem, config = _problem(16, weights[0], epilogue), GemmConfig(tile=64, split_k=1, stages=3)

    def benchmark(kernel: GemmSm90) -> Benchmark[GemmConfig]:
        operands = Sm90Kernels(kernel, TorchGemm()).operands(problem, weights)
        return GraphBenchmark(None, operands, weights)  # type: ignore[arg-type]

    kernel = _TorchKernel()
    timings = benchmark(kernel)
    assert timings.candidate(config)() == 1.0 and timings.candidate(None)() == 1.0
    for launch in launched:
        launch()
    # A gated GEMM is checked with squares that were left, and without.
    assert len(kernel.launched) == (3 if epilogue is GemmEpilogue.GATED else 2) and len(launched) == 2
    with pytest.raises(RuntimeError, match="differs"):
        benchmark(_TorchKernel(error=0.05)).candidate(config)


def test_who_adds_to_a_residual_leaves_its_squares_to_the_gated_gemm_that_reads_it() -> None:
    """Of that residual, while nobody else has changed it."""
    kernel = _TorchKernel()
    weights = [_random(_K, _N)]
    config = GemmConfig(tile=64, split_k=1, stages=3)
    gated = _problem(16, _random(_N, _K), GemmEpilogue.GATED)
    problems = [_problem(16, weights[0], GemmEpilogue.ADDED), gated]
    table = {problem: Sm90Gemm(kernel, config, problem.epilogue) for problem in problems}
    gemm = TunedGemm(table)
    x_TN, residual_TK, w_NK = _random(16, _N), _random(16, _K), _random(_N, _K)
    gemm.gate_up_silu(residual_TK, w_NK, _EPS)
    gemm.add_linear(x_TN, weights[0], residual_TK)
    gemm.gate_up_silu(residual_TK.clone(), w_NK, _EPS)
    gemm.gate_up_silu(residual_TK, w_NK, _EPS)
    ops, bias_K = TritonOps(gemm=gemm), _random(_K)
    ops.add_linear(x_TN, weights[0], bias_K, residual_TK)
    ops.gate_up_silu_deferred_norm(residual_TK, w_NK, _EPS)
    gemm.add_linear(x_TN, weights[0], residual_TK)
    # By others.
    gemm.add_linear(_random(16, 2 * _N), _random(_K, 2 * _N), residual_TK)
    gemm.gate_up_silu(residual_TK, w_NK, _EPS)
    assert [square_sums is not None for square_sums in kernel.square_sums] == [False, False, True, False, False]
    # If no gated GEMM of that many rows prefetches its weights, none are left.
    del table[gated]
    gemm = TunedGemm(table)
    gemm.add_linear(x_TN, weights[0], residual_TK)
    assert gemm.gate_up_silu(residual_TK, w_NK, _EPS) is None


def test_a_budget_that_is_spent_leaves_the_rest_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm90Kernels, "policy", TuningPolicy(budget_s=2.0))
    now = iter(range(100))
    table, report = _tune(_TorchKernel(), Autotuner(_SetTimes(lambda problem: 2.0), lambda: float(next(now))), [16])
    assert (len(table), report.num_measured, report.num_left_out) == (1, 1, 2)


def test_a_kernel_that_errs_is_found() -> None:
    check_kernel(_TorchKernel(), torch.bfloat16, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="differs from torch's"):
        check_kernel(_TorchKernel(error=0.05), torch.bfloat16, torch.device("cpu"))


def test_candidates_are_compiled_ahead_once_and_not_again_when_they_are_measured() -> None:
    sources: list[str] = []

    def compile_source(source: str) -> bytes:
        sources.append(source)
        return b"code"

    groups = [matrix_group([torch.zeros(512, 256, dtype=torch.bfloat16)], GemmEpilogue.PLAIN)]
    kernel = compiled_sm90(groups, (8, 64), lambda: GemmSm90(None, compile_source))  # type: ignore[arg-type]
    num_compiled = len(sources)
    assert num_compiled > 4
    kernels = Sm90Kernels(kernel, TorchGemm())
    kernels.prepare([group.problem(rows) for rows in kernels.measured_rows((8, 64)) for group in groups])
    assert len(sources) == num_compiled


@pytest.mark.parametrize(("num_rows", "num_in", "is_there"), [(8, 2048, True), (9, 2048, False), (5, 1920, False)])
def test_the_kernel_for_few_rows_competes_where_it_fits(num_rows: int, num_in: int, is_there: bool) -> None:
    kernels = Sm90Kernels(_TorchKernel(), TorchGemm())
    problem = _problem(num_rows, _random(64, 2048), GemmEpilogue.PLAIN)._replace(num_in=num_in)
    assert (FEW_ROWS in kernels.candidates(problem)) == is_there


def test_the_kernel_for_few_rows_has_half_a_tile_of_gate() -> None:
    variant = variant_of(FEW_ROWS, 5, True, torch.bfloat16)
    assert variant.num_ctas(5, 14336) == 896 and variant.activation_rows == 8 and "kIsGated = true" in variant.source()
