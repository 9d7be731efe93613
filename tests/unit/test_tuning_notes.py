"""Choices of GEMMs that a start takes over from earlier ones, with a kernel in torch and times that a test sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from radixmesh.daemons.worker.cuda.gemm.autotuner import (
    Autotuner,
    Benchmark,
    Benchmarks,
    GemmKernels,
    MatrixGroup,
    Operands,
    Timing,
    TuningPolicy,
    TuningReport,
)
from radixmesh.daemons.worker.cuda.gemm.backend import GemmProblem
from radixmesh.daemons.worker.cuda.gemm.tuning_notes import TuningNotes

NAMES = ("a", "b", "c")


class _Operands(Operands[torch.Tensor, str]):
    def __init__(self, wrong: set[str]) -> None:
        self._wrong = wrong

    def check(self, candidate: str, weights: Sequence[torch.Tensor]) -> None:
        if candidate in self._wrong:
            raise RuntimeError("wrong")

    def launch(self, candidate: str | None, weight: torch.Tensor) -> None:
        return


class _Kernels(GemmKernels[torch.Tensor, str, str]):
    """candidates: that there are. wrong: those that compute something else."""

    def __init__(self, names: Sequence[str] = NAMES, wrong: set[str] | None = None) -> None:
        self._names, self._wrong = names, wrong or set()
        self.prepared: list[GemmProblem] = []

    policy = TuningPolicy(budget_s=2.0)

    def measured_rows(self, sizes: Sequence[int]) -> Sequence[int]:
        return sizes

    def candidates(self, problem: GemmProblem) -> dict[str, float]:
        return dict.fromkeys(self._names, 0.0)

    def prepare(self, problems) -> None:  # type: ignore[no-untyped-def]
        self.prepared += problems

    def operands(self, problem: GemmProblem, weights: Sequence[torch.Tensor]) -> _Operands:
        return _Operands(self._wrong)

    def bind(self, measured, sizes):  # type: ignore[no-untyped-def]
        return {problem: name for problem, name in measured.items() if name is not None}


class _Benchmarks(Benchmarks):
    """b is the fastest at 8 rows, the baseline at 16. seconds: that each problem takes. num: of problems so far."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.num, self.now_s, self._seconds = 0, 0.0, seconds

    def create(self, problem, operands, weights):  # type: ignore[no-untyped-def]
        self.num += 1
        self.now_s += self._seconds
        times = {
            None: 5.0,
            "a": 9.0,
            "b": 1.0 if problem.num_rows == 8 else 9.0,
            "c": 4.0 if problem.num_rows == 8 else 9,
        }

        class One(Benchmark[str]):
            def candidate(self, candidate: str | None) -> Timing:
                return lambda: times[candidate]

        return One()


def _tune(
    path: Path, kernels: _Kernels, benchmarks: _Benchmarks, sizes: Sequence[int] = (8, 16), *, size: int = 4
) -> tuple[dict[int, str], TuningReport]:
    notes = TuningNotes(path)
    tuner = Autotuner(benchmarks, lambda: benchmarks.now_s, notes=notes.kind("test"))
    weight = torch.zeros(size, size)
    table, report = tuner.tune(kernels, [MatrixGroup([weight], weight.nbytes, size, size, weight.dtype)], sizes)
    notes.keep()
    return {problem.num_rows: name for problem, name in table.items()}, report


def test_a_later_start_measures_nothing_and_chooses_the_same(tmp_path: Path) -> None:
    first, report = _tune(tmp_path / "notes", _Kernels(), _Benchmarks())
    assert first == {8: "b"} and report.num_measured == 2 and not report.num_noted
    kernels, benchmarks = _Kernels(), _Benchmarks()
    again, report = _tune(tmp_path / "notes", kernels, benchmarks)
    assert again == first and report.num_noted == 2
    assert not benchmarks.num and not kernels.prepared, "nothing was measured, or compiled for it"


@pytest.mark.parametrize("kernels", [_Kernels(wrong={"b"}), _Kernels(names=("a", "c"))], ids=["wrong", "gone"])
def test_a_choice_that_is_not_right_any_more_is_measured_anew(kernels: _Kernels, tmp_path: Path) -> None:
    _tune(tmp_path / "notes", _Kernels(), _Benchmarks())
    benchmarks = _Benchmarks()
    table, report = _tune(tmp_path / "notes", kernels, benchmarks, (8,))
    assert benchmarks.num == 1 and not report.num_noted
    if "b" not in kernels.candidates(None):  # type: ignore[arg-type]
        assert table == {8: "c"}
        assert _tune(tmp_path / "notes", _Kernels(), _Benchmarks())[0] == {8: "c"}, "it is noted instead"


def test_each_start_goes_on_with_what_there_was_no_time_for(tmp_path: Path) -> None:
    sizes = (1, 2, 3, 4, 5, 6, 7)
    left = [_tune(tmp_path / "notes", _Kernels(), _Benchmarks(0.6), sizes)[1].num_left_out for _ in range(5)]
    assert left == [3, 2, 1, 0, 0], "2 s at first, then half a second"


def test_another_model_on_the_device_is_measured_in_full(tmp_path: Path) -> None:
    _tune(tmp_path / "notes", _Kernels(), _Benchmarks())
    left = [
        _tune(tmp_path / "notes", _Kernels(), _Benchmarks(0.6), (1, 2, 3, 4), size=8)[1].num_left_out for _ in range(2)
    ]
    assert left == [0, 0], "2 s for it too, though there are notes of the first model"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"test": 3}', '{"test": {"x": 3}}', '{"test": {"x": "' + 300 * "y" + '"}}']
)
def test_a_file_that_is_not_whole_counts_for_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(text)
    table, report = _tune(tmp_path / "notes", _Kernels(), _Benchmarks())
    assert table == {8: "b"} and report.num_measured == 2
    assert _tune(tmp_path / "notes", _Kernels(), _Benchmarks())[1].num_noted == 2


def test_a_folder_that_cannot_be_written_costs_the_notes_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert _tune(tmp_path / "file" / "notes", _Kernels(), _Benchmarks())[0] == {8: "b"}
