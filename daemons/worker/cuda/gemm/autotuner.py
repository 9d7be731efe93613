"""The autotuner: chooses by measurement, once at startup, which kernel computes which GEMM of a step.

Every kind of GEMM kernel is a `GemmKernels`: it names candidates for a problem and launches them. Kinds are tuned one
after the other, each against what was chosen before it, whose place in the table its own choices take.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue, GemmProblem, GemmRefusedError
from radixmesh.daemons.worker.cuda.gemm.tuning_notes import BASELINE, KindNotes, unknown

_log = get_logger(__name__)

# More than the L2 cache holds: weights come from memory, as in a step.
_CACHE_BYTES = 256 << 20
_FINALISTS, _ROUNDS = 3, 3
# For what the starts before had no time for, at most: each start has some more of it measured.
_AGAIN_S = 0.5

Weight = TypeVar("Weight")
Candidate = TypeVar("Candidate", bound=Hashable)
Kernel = TypeVar("Kernel")
Timing = Callable[[], float]
"""Times a candidate once: microseconds of one launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPolicy:
    """least_gain: over the baseline's time, below which the baseline stays; a candidate may be slower by allowed_us.

    budget_s: for measuring; what is left when it is spent takes the choice for the next larger number of rows.
    """

    least_gain: float = 0.0
    allowed_us: float = 0.0
    budget_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class MatrixGroup(Generic[Weight]):
    """Weights [N, K] of one shape and use from all layers, of so many bytes each. form: as in GemmProblem."""

    weights: Sequence[Weight]
    nbytes: int
    num_out: int
    num_in: int
    form: Hashable
    epilogue: GemmEpilogue = GemmEpilogue.PLAIN

    def problem(self, num_rows: int) -> GemmProblem:
        return GemmProblem(num_rows, self.num_out, self.num_in, self.form, self.epilogue)

    def beyond_cache(self) -> Sequence[Weight]:
        """The first of them that no cache holds together: what a step's GEMMs find."""
        return self.weights[: max(1, -(-_CACHE_BYTES // self.nbytes))]


@dataclass(slots=True)
class TuningReport:
    """num_left_out: problems for which there was no time. num_noted: those that an earlier start has measured. chosen:
    candidates that took the baseline's place.

    saved_us: of a step, by its rows; penalties are counted in. prepare_seconds: for compiling and loading.
    """

    num_measured: int = 0
    num_left_out: int = 0
    num_noted: int = 0
    saved_us: dict[int, float] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    prepare_seconds: float = 0.0


class Operands(ABC, Generic[Weight, Candidate]):
    """Operands of one problem on the device. Candidate None is the baseline."""

    def check(self, candidate: Candidate, weights: Sequence[Weight]) -> None:
        """Raises RuntimeError if the candidate does not run or its result is wrong."""
        return None

    @abstractmethod
    def launch(self, candidate: Candidate | None, weight: Weight) -> None:
        """On the current stream; allocates nothing that has to stay."""


class GemmKernels(ABC, Generic[Weight, Candidate, Kernel]):
    """One kind of GEMM kernel."""

    policy: TuningPolicy = TuningPolicy()

    @abstractmethod
    def measured_rows(self, sizes: Sequence[int]) -> Sequence[int]:
        """The numbers of rows to measure for steps of `sizes` rows, most important first."""

    @abstractmethod
    def candidates(self, problem: GemmProblem) -> Mapping[Candidate, float]:
        """Worth measuring, the likely fastest first; microseconds to be added to each one's time."""

    def prepare(self, problems: Collection[GemmProblem]) -> None:
        """Compiles what candidates of these problems need, before any is measured."""
        return None

    @abstractmethod
    def operands(self, problem: GemmProblem, weights: Sequence[Weight]) -> Operands[Weight, Candidate]: ...

    @abstractmethod
    def bind(self, measured: Mapping[GemmProblem, Candidate | None], sizes: Sequence[int]) -> dict[GemmProblem, Kernel]:
        """Entries of the table for steps of `sizes` rows. A kernel that cannot be launched is left out here rather than
        found by the first step."""


class Benchmark(ABC, Generic[Candidate]):
    """Benchmark of one problem."""

    @abstractmethod
    def candidate(self, candidate: Candidate | None) -> Timing:
        """None is the baseline. Raises RuntimeError or OSError if the candidate does not run."""


class Benchmarks(ABC):
    """Makes benchmarks: `GraphBenchmarks`, or times that a test sets."""

    @abstractmethod
    def create(
        self, problem: GemmProblem, operands: Operands[Weight, Candidate], weights: Sequence[Weight]
    ) -> Benchmark[Candidate]:
        """weights: of different layers, for launches in turn."""


class Autotuner:
    """Measures problems by their share of a step until the budget is spent. clock: seconds. notes: of earlier starts,
    whose choices are taken; None: all is measured."""

    def __init__(
        self, benchmarks: Benchmarks, clock: Callable[[], float] = time.monotonic, notes: KindNotes | None = None
    ) -> None:
        self._benchmarks = benchmarks
        self._clock = clock
        self._notes = notes

    def tune(
        self,
        kernels: GemmKernels[Weight, Candidate, Kernel],
        groups: Sequence[MatrixGroup[Weight]],
        sizes: Sequence[int],
    ) -> tuple[dict[GemmProblem, Kernel], TuningReport]:
        """Kernels for steps of `sizes` rows; groups: the largest share of a step first."""
        report = TuningReport()
        planned: dict[GemmProblem, MatrixGroup[Weight]] = {}
        for num_rows in kernels.measured_rows(sizes):
            for group in groups:
                planned.setdefault(group.problem(num_rows), group)
        notes, measured = self._notes, dict[GemmProblem, Candidate | None]()
        self._timed(report, partial(kernels.prepare, unknown(notes, list(planned))))
        budget_s = kernels.policy.budget_s
        # Notes are of all models that this device has served: one that it has not is measured in full.
        is_known = notes is not None and any(notes.get(problem) is not None for problem in planned)
        deadline = self._clock() + (min(budget_s, _AGAIN_S) if is_known else budget_s)
        for problem, group in planned.items():
            if notes is not None and self._take_noted(notes, kernels, problem, group, measured):
                report.num_noted += 1
                continue
            if self._clock() >= deadline:
                report.num_left_out += 1
                continue
            try:
                measured[problem] = self._best(kernels, problem, group, report)
            except GemmRefusedError as error:
                _log.warning("gemm_shape_not_tuned", problem=str(problem), reason=str(error))
                measured[problem] = None
            if notes is not None:
                notes.put(problem, measured[problem])
        return self._timed(report, partial(kernels.bind, measured, sizes)), report

    def _take_noted(
        self,
        notes: KindNotes,
        kernels: GemmKernels[Weight, Candidate, Kernel],
        problem: GemmProblem,
        group: MatrixGroup[Weight],
        measured: dict[GemmProblem, Candidate | None],
    ) -> bool:
        """Adds the choice of an earlier start. False: there is none, or its candidate is not there or not right."""
        name = notes.get(problem)
        if name is None:
            return False
        if name == BASELINE:
            measured[problem] = None
            return True
        try:
            candidate = next(each for each in kernels.candidates(problem) if str(each) == name)
            weights = group.beyond_cache()
            kernels.operands(problem, weights).check(candidate, weights)
        except (StopIteration, RuntimeError, OSError):
            return False
        measured[problem] = candidate
        return True

    def _timed(self, report: TuningReport, work: Callable[[], Kernel]) -> Kernel:
        started = self._clock()
        result = work()
        report.prepare_seconds += self._clock() - started
        return result

    def _best(
        self,
        kernels: GemmKernels[Weight, Candidate, Kernel],
        problem: GemmProblem,
        group: MatrixGroup[Weight],
        report: TuningReport,
    ) -> Candidate | None:
        """The fastest candidate, or None for the baseline."""
        weights = group.beyond_cache()
        benchmark = self._benchmarks.create(problem, kernels.operands(problem, weights), weights)
        timings: dict[Candidate | None, Timing] = {None: benchmark.candidate(None)}
        for candidate, penalty_us in kernels.candidates(problem).items():
            try:
                timings[candidate] = _penalised(benchmark.candidate(candidate), penalty_us)
            except (RuntimeError, OSError) as error:
                refused(problem, candidate, error)
        report.num_measured += 1
        best, saved_us = fastest(timings, kernels.policy)
        if best is not None:
            total_us = report.saved_us.get(problem.num_rows, 0.0) + saved_us * len(group.weights)
            report.saved_us[problem.num_rows] = round(total_us, 1)
            name = f"{problem.num_rows}x{problem.num_out}x{problem.num_in} {problem.epilogue.name.lower()}"
            report.chosen[name] = str(best)
        return best


class GraphBenchmarks(Benchmarks):
    """On a stream of their own, beside which nothing runs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def create(
        self, problem: GemmProblem, operands: Operands[Weight, Candidate], weights: Sequence[Weight]
    ) -> Benchmark[Candidate]:
        return GraphBenchmark(self._stream, operands, weights)


class GraphBenchmark(Benchmark[Candidate], Generic[Weight, Candidate]):
    """Times candidates in a CUDA graph, each launch with the weights of another layer, as in a decode step."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        operands: Operands[Weight, Candidate],
        weights: Sequence[Weight],
    ) -> None:
        self._stream, self._operands = stream, operands
        self._weights = weights
        # Operands were made on another stream.
        torch.cuda.synchronize()

    def candidate(self, candidate: Candidate | None) -> Timing:
        if candidate is not None:
            with torch.cuda.stream(self._stream):
                self._operands.check(candidate, self._weights)
        return TimedGraph(
            [partial(self._operands.launch, candidate, weight) for weight in self._weights], self._stream
        ).micros


class TimedGraph:
    """Launches captured in a graph of their own, on a stream that is not the default one and on which all run here.

    The first launch runs once before, so that what it loads and allocates is there; they allocate nothing else.
    """

    def __init__(self, launches: Sequence[Callable[[], object]], stream: torch.cuda.Stream) -> None:
        self._count = len(launches)
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launches[0]()
            stream.synchronize()
            # Not torch.cuda.graph(): it empties caches each time, which takes longer than what is measured.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
            finally:
                self._graph.capture_end()

    def micros(self) -> float:
        """Of one launch: a replay's device time by the number of launches. Waits for it."""
        return elapsed_micros(self._graph.replay, self._stream) / self._count


def elapsed_micros(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Device time of `work` on the stream, and of nothing before it. Waits for it."""
    with torch.cuda.stream(stream):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def fastest(timings: Mapping[Candidate | None, Timing], policy: TuningPolicy) -> tuple[Candidate | None, float]:
    """The fastest candidate and the microseconds saved over the baseline, which is None.

    (None, 0.0) if the policy's gain is not reached. All are timed once, then the best few and the baseline in turns,
    taking each one's minimum: the device's clock changes.
    """
    once = {candidate: timing() for candidate, timing in timings.items()}
    finalists = dict.fromkeys([None, *sorted(once, key=lambda candidate: once[candidate])[:_FINALISTS]], float("inf"))
    for _ in range(_ROUNDS):
        for candidate in finalists:
            finalists[candidate] = min(finalists[candidate], timings[candidate]())
    baseline_us = finalists.pop(None)
    best = min(finalists, key=lambda candidate: finalists[candidate], default=None)
    if best is None or finalists[best] > (1 - policy.least_gain) * baseline_us + policy.allowed_us:
        return None, 0.0
    return best, baseline_us - finalists[best]


def spread(measured: Mapping[GemmProblem, Candidate | None], sizes: Iterable[int]) -> dict[GemmProblem, Candidate]:
    """Choices for all `sizes` of rows: each takes what was best, None being the baseline, at `nearest_rows`."""
    sizes = list(sizes)
    by_matrix: dict[GemmProblem, dict[int, Candidate | None]] = {}
    for problem, candidate in measured.items():
        by_matrix.setdefault(problem._replace(num_rows=0), {})[problem.num_rows] = candidate
    table: dict[GemmProblem, Candidate] = {}
    for matrix, by_rows in by_matrix.items():
        for size in sizes:
            nearest = nearest_rows(size, by_rows)
            candidate = by_rows[nearest] if nearest is not None else None
            if candidate is not None:
                table[matrix._replace(num_rows=size)] = candidate
    return table


def nearest_rows(size: int, measured: Iterable[int]) -> int | None:
    """The measured row count whose choice serves `size` rows: the next larger one, up to 2 x size."""
    return min((num_rows for num_rows in measured if size <= num_rows <= 2 * size), default=None)


def refused(problem: GemmProblem, candidate: object, error: Exception) -> None:
    _log.warning("gemm_candidate_refused", problem=str(problem), candidate=str(candidate), reason=str(error))


def _penalised(timing: Timing, penalty_us: float) -> Timing:
    return (lambda: timing() + penalty_us) if penalty_us else timing
