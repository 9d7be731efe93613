"""Autotuner of cuBLASLt algorithms for the GEMMs of captured decode steps; runs once at startup."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, TorchGemm, TunedGemm, spread
from radixmesh.daemons.worker.cuda.gemm.cublaslt import Algorithm, CublasLt, CublasLtMatmul, GemmShape, check_small_gemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import CublasLtError
from radixmesh.daemons.worker.cuda.gemm.timed_graph import TimedGraph, beyond_cache
from radixmesh.daemons.worker.cuda.model.device_model import GemmUse, TunableMatrices

_log = get_logger(__name__)

# Measured first; other row counts use the choice for the next larger one when the budget runs out.
_USUAL_ROWS = (256, 128, 64, 32, 16, 512)
_NUM_CANDIDATES = 8
_FINALISTS, _ROUNDS = 3, 3
# Least relative gain over torch: smaller gains vanish beside other kernels.
_LEAST_GAIN = 0.05
_BUDGET_S = 2.0


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """Weights [N, K] of one shape from all layers. is_added: the GEMM adds to the residual."""

    weights: Sequence[torch.Tensor]
    is_added: bool

    def shape(self, num_rows: int) -> GemmShape:
        num_out, num_in = self.weights[0].shape
        return GemmShape(num_rows, num_out, num_in, self.weights[0].dtype, self.is_added)


class Benchmark(ABC):
    """Benchmark of one GEMM shape."""

    @abstractmethod
    def candidate(self, algorithm: Algorithm | None) -> Callable[[], float]:
        """Returns a function that times the candidate once, in microseconds; None is the baseline, torch.

        Raises CublasLtError if it does not run.
        """


CreateBenchmark = Callable[[GemmShape, Sequence[torch.Tensor]], Benchmark]
"""For a shape, with the weights of all layers."""


def tuned_gemm(
    matrices: Sequence[TunableMatrices], dtype: torch.dtype, sizes: Sequence[int], device: torch.device
) -> GemmBackend:
    """Tuned backend for steps of `sizes` rows; plain torch, with a log line, if cuBLASLt cannot be used."""
    started = time.monotonic()
    try:
        lt = CublasLt(device)
        check_small_gemm(lt, dtype)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        tuner = CublasLtTuner(lt, partial(GraphBenchmark, lt, stream), time.monotonic)
        gemm = tuner.tune(matrix_groups(matrices), sizes)
    # Also what CUDA itself reports: if it cannot go on, the capture behind this says so.
    except (RuntimeError, OSError, AttributeError, ctypes.ArgumentError) as error:
        _log.warning("gemm_not_tuned", reason=f"{type(error).__name__}: {error}", field="tune_gemm")
        return TorchGemm()
    finally:
        # Otherwise this memory counts as used when the KV pool is sized.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    _log.info(
        "gemm_tuned",
        library=lt.version,
        measured=tuner.num_measured,
        chosen=tuner.num_chosen,
        left_out=tuner.num_left_out,
        in_table=len(gemm),
        saved_us=tuner.saved_us,
        seconds=round(time.monotonic() - started, 3),
    )
    return gemm


class CublasLtTuner:
    """Measures shapes by their share of a step until the budget is spent. clock: seconds."""

    def __init__(
        self, lt: CublasLt, create_benchmark: CreateBenchmark, clock: Callable[[], float], budget_s: float = _BUDGET_S
    ) -> None:
        self._lt = lt
        self._create_benchmark = create_benchmark
        self._clock = clock
        self._budget_s = budget_s
        self.num_measured = self.num_chosen = self.num_left_out = 0
        # Of a step, by its rows.
        self.saved_us: dict[int, float] = {}

    def tune(self, groups: Sequence[MatrixGroup], sizes: Sequence[int]) -> TunedGemm:
        deadline = self._clock() + self._budget_s
        measured: dict[GemmShape, Algorithm | None] = {}
        for num_rows in _by_weight(sizes):
            for group in groups:
                shape = group.shape(num_rows)
                if shape in measured:
                    continue
                if self._clock() >= deadline:
                    self.num_left_out += 1
                    continue
                try:
                    measured[shape] = self._best(shape, group)
                except CublasLtError as error:
                    _log.warning("gemm_shape_not_tuned", shape=str(shape), reason=str(error))
                    measured[shape] = None
        return TunedGemm(spread(self._lt, measured, sizes))

    def _best(self, shape: GemmShape, group: MatrixGroup) -> Algorithm | None:
        """Fastest algorithm, or None for torch."""
        benchmark = self._create_benchmark(shape, group.weights)
        takes: dict[int | None, Callable[[], float]] = {None: benchmark.candidate(None)}
        candidates: dict[int | None, Algorithm | None] = {None: None}
        for algorithm in CublasLtMatmul(self._lt, shape).algorithms(_NUM_CANDIDATES):
            try:
                takes[algorithm.order] = benchmark.candidate(algorithm)
            except CublasLtError as error:
                _log.warning("gemm_algorithm_refused", shape=str(shape), order=algorithm.order, reason=str(error))
                continue
            candidates[algorithm.order] = algorithm
        self.num_measured += 1
        best, saved_us = fastest(takes)
        if best is not None:
            self.num_chosen += 1
            total_us = self.saved_us.get(shape.num_rows, 0.0) + saved_us * len(group.weights)
            self.saved_us[shape.num_rows] = round(total_us, 1)
        return candidates[best]


class GraphBenchmark(Benchmark):
    """Times candidates in a CUDA graph, each launch with the weights of another layer, as in a decode step."""

    def __init__(
        self, lt: CublasLt, stream: torch.cuda.Stream, shape: GemmShape, weights: Sequence[torch.Tensor]
    ) -> None:
        self._stream = stream
        self._matmul = CublasLtMatmul(lt, shape)
        self._weights = beyond_cache(weights, weights[0].nbytes)
        # Zeros would cost less power, and power is what bounds the larger GEMMs.
        self._x_TK = torch.randn(shape.num_rows, shape.num_in, dtype=shape.dtype, device=lt.device)
        self._out_TN = torch.zeros(shape.num_rows, shape.num_out, dtype=shape.dtype, device=lt.device)
        torch.cuda.synchronize(lt.device)

    def candidate(self, algorithm: Algorithm | None) -> Callable[[], float]:
        if algorithm is not None and not all(self._matmul.accepts(self._x_TK, w, self._out_TN) for w in self._weights):
            raise CublasLtError("the weights do not lie as the library expects")
        return TimedGraph([partial(self._launch, algorithm, w_NK) for w_NK in self._weights], self._stream).micros

    def _launch(self, algorithm: Algorithm | None, w_NK: torch.Tensor) -> None:
        if algorithm is not None:
            self._matmul.run(algorithm, self._x_TK, w_NK, self._out_TN)
        elif self._matmul.shape.is_added:
            self._out_TN.addmm_(self._x_TK, w_NK.t())
        else:
            torch.mm(self._x_TK, w_NK.t(), out=self._out_TN)


def fastest(
    takes: Mapping[int | None, Callable[[], float]], least_gain: float = _LEAST_GAIN, allowed_us: float = 0.0
) -> tuple[int | None, float]:
    """Name of the fastest candidate and the microseconds saved over the baseline, whose name is None.

    (None, 0.0) if the gain is below `least_gain` of the baseline's time; with `allowed_us`, a candidate may be slower
    by that much. All are timed once, then the best few and the baseline in turns, taking each one's minimum: the
    device's clock changes.
    """
    once = {name: take() for name, take in takes.items()}
    finalists = {None, *sorted(once, key=lambda name: once[name])[:_FINALISTS]}
    least = dict.fromkeys(finalists, float("inf"))
    for _ in range(_ROUNDS):
        for name in finalists:
            least[name] = min(least[name], takes[name]())
    best = min(finalists - {None}, key=lambda name: least[name], default=None)
    if least[best] > (1 - least_gain) * least[None] + allowed_us:
        return None, 0.0
    return best, least[None] - least[best]


def matrix_groups(matrices: Sequence[TunableMatrices]) -> list[MatrixGroup]:
    """In the order of `matrices`; those that are all in the model's dtype."""
    groups = []
    for group in matrices:
        weights = [w_NK for w_NK in group.matrices if isinstance(w_NK, torch.Tensor)]
        if len(weights) == len(group.matrices):
            groups.append(MatrixGroup(weights, is_added=group.use is GemmUse.ADDED))
    return groups


def _by_weight(sizes: Sequence[int]) -> list[int]:
    """The usual sizes first, then those between them."""
    usual = [num_rows for num_rows in _USUAL_ROWS if num_rows in sizes]
    return usual + sorted(set(sizes) - set(usual), reverse=True)
