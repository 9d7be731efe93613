"""The GEMMs of decode steps on one GPU: torch against every algorithm that cuBLASLt names for each of them.

    PYTHONPATH=src python bench/gpu/cublaslt.py --output bench/results/h200-products.json

Shapes are those of Llama-3.2-3B, data are random normal numbers. Every launch reads the weights of another layer, so
that no cache helps; launches are captured in CUDA graphs and timed by events. All algorithms are timed briefly, then
the best few, torch and the library's first in turns, of which the fastest replay counts. `o` and `down` are added onto
what is there. Prints JSON: microseconds a launch; errors are the largest difference from float32, in units of the
largest value.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from radixmesh.daemons.worker.cuda.gemm.autotuner import TimedGraph, elapsed_micros
from radixmesh.daemons.worker.cuda.gemm.cublaslt import Algorithm, CublasLt, CublasLtMatmul, GemmShape, check_small_gemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import CublasLtError

_HIDDEN, _QKV, _MLP, _VOCAB = 3072, 5120, 8192, 128256
# Those that matter most first, should the time run out.
_ROWS = (256, 64, 128, 32, 16, 512, 8, 4, 2, 2048, 8192)
_ROTATED_ROWS = 512
_FINALISTS, _ROUNDS = 4, 6


@dataclass(frozen=True, slots=True)
class _Matrix:
    name: str
    num_out: int
    num_in: int
    is_added: bool = False
    max_rows: int = 1 << 30


_MATRICES = (
    _Matrix("qkv", _QKV, _HIDDEN),
    _Matrix("o", _HIDDEN, _HIDDEN, is_added=True),
    _Matrix("gate_up", 2 * _MLP, _HIDDEN),
    _Matrix("down", _HIDDEN, _MLP, is_added=True),
    # Of prompts only the last tokens get there.
    _Matrix("lm_head", _VOCAB, _HIDDEN, max_rows=512),
)


class _Cell:
    """One matrix at one number of rows: its operands, and graphs of what may compute it."""

    def __init__(
        self, lt: CublasLt, stream: torch.cuda.Stream, matrix: _Matrix, weights: list[torch.Tensor], num_rows: int
    ) -> None:
        self._stream = stream
        self._matrix = matrix
        self._weights = weights if num_rows <= _ROTATED_ROWS else weights[:4]
        self._x_TK = _random(num_rows, matrix.num_in)
        self._before_TN = _random(num_rows, matrix.num_out) if matrix.is_added else None
        self._out_TN = _random(num_rows, matrix.num_out)
        self._matmul = CublasLtMatmul(
            lt, GemmShape(num_rows, matrix.num_out, matrix.num_in, torch.bfloat16, matrix.is_added)
        )
        assert self._matmul.accepts(self._x_TK, weights[0], self._out_TN)
        torch.cuda.synchronize()

    def measure(self, num_algorithms: int) -> dict[str, object]:
        algorithms = self._matmul.algorithms(num_algorithms)
        screened = self._screen(algorithms)
        if not screened:
            return {"name": self._matrix.name, "rows": len(self._x_TK), "error": "no algorithm ran"}
        chosen = sorted(screened, key=lambda order: screened[order][0])[:_FINALISTS]
        graphs = {str(order): screened[order][1] for order in chosen}
        if 0 in screened:
            graphs["0"] = screened[0][1]
        graphs["torch"] = self._graph(self._torch)
        if self._matrix.is_added:
            graphs["torch_alone"] = self._graph(self._torch_alone)
        times = {name: min(times) for name, times in _in_turns(graphs).items()}
        by_order = {algorithm.order: algorithm for algorithm in algorithms}
        best = min((order for order in screened if str(order) in times), key=lambda order: times[str(order)])
        expected = self._expected()
        return {
            "name": self._matrix.name,
            "rows": len(self._x_TK),
            "torch_us": round(times["torch"], 2),
            "best_us": round(times[str(best)], 2),
            "gain": round(times["torch"] / times[str(best)], 3),
            **{f"{name}_us": round(us, 2) for name, us in times.items() if name == "torch_alone"},
            **self._rates(times[str(best)]),
            "best_order": best,
            "best": {
                "workspace": by_order[best].workspace_bytes,
                "waves": round(by_order[best].waves, 2),
                **self._matmul.describe(by_order[best]),
            },
            "max_error": self._error(self._launch(by_order[best]), expected),
            "torch_error": self._error(self._torch, expected),
            "named": len(algorithms),
            "measured": len(screened),
            "finalists_us": {name: round(us, 2) for name, us in times.items() if name.isdigit()},
        }

    def _screen(self, algorithms: list[Algorithm]) -> dict[int, tuple[float, TimedGraph]]:
        """By order, what is not hopeless: microseconds and the graph."""
        screened: dict[int, tuple[float, TimedGraph]] = {}
        least_alone = float("inf")
        for algorithm in algorithms:
            launch = self._launch(algorithm)
            try:
                alone = min(elapsed_micros(lambda run=launch: run(0), self._stream) for _ in range(2))
                least_alone = min(least_alone, alone)
                if alone > 3 * least_alone + 10 and algorithm.order:
                    continue
                graph = self._graph(launch)
            except CublasLtError as error:
                print(f"{self._matrix.name} {len(self._x_TK)} {algorithm.order}: {error}", file=sys.stderr)
                continue
            screened[algorithm.order] = min(graph.micros() for _ in range(2)), graph
        return screened

    def _graph(self, launch: Callable[[int], object]) -> TimedGraph:
        return TimedGraph([lambda at=at: launch(at) for at in range(len(self._weights))], self._stream)

    def _launch(self, algorithm: Algorithm) -> Callable[[int], object]:
        return lambda layer: self._matmul.run(algorithm, self._x_TK, self._weights[layer], self._out_TN)

    def _torch(self, layer: int) -> None:
        if self._matrix.is_added:
            self._out_TN.addmm_(self._x_TK, self._weights[layer].t())
        else:
            self._torch_alone(layer)

    def _torch_alone(self, layer: int) -> None:
        torch.mm(self._x_TK, self._weights[layer].t(), out=self._out_TN)

    def _expected(self) -> torch.Tensor:
        expected_TN = functional.linear(self._x_TK.float(), self._weights[0].float())
        return expected_TN if self._before_TN is None else expected_TN.add_(self._before_TN)

    def _error(self, launch: Callable[[int], object], expected_TN: torch.Tensor) -> float:
        self._out_TN.fill_(float("nan"))
        if self._before_TN is not None:
            self._out_TN.copy_(self._before_TN)
        launch(0)
        return round(float((self._out_TN.float() - expected_TN).abs().max() / expected_TN.abs().max()), 5)

    def _rates(self, micros: float) -> dict[str, float]:
        num_weights = self._matrix.num_out * self._matrix.num_in
        return {
            "best_tflop_s": round(2 * num_weights * len(self._x_TK) / micros / 1e6, 1),
            "best_tb_s": round(2 * num_weights / micros / 1e6, 3),
        }


def main() -> None:
    args = _arguments()
    started = time.monotonic()
    lt = CublasLt(torch.device("cuda", torch.cuda.current_device()))
    for dtype in (torch.bfloat16, torch.float16):
        check_small_gemm(lt, dtype)
    stream = torch.cuda.Stream()
    weights = {matrix.name: _weights(matrix, args.layers) for matrix in _MATRICES}
    cells: list[dict[str, object]] = []
    skipped = []
    for num_rows in args.rows:
        for matrix in _MATRICES:
            if num_rows > matrix.max_rows:
                continue
            if time.monotonic() - started > args.budget_s:
                skipped.append(f"{matrix.name} {num_rows}")
                continue
            cells.append(_Cell(lt, stream, matrix, weights[matrix.name], num_rows).measure(args.algorithms))
            print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cublaslt": lt.version},
        "command": " ".join(sys.argv),
        "steps": [_step(cells, num_rows, args.layers) for num_rows in sorted(args.rows)],
        "cells": cells,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(report, indent=1)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="weights that are read in turn")
    parser.add_argument("--rows", type=int, nargs="+", default=list(_ROWS))
    parser.add_argument("--algorithms", type=int, default=64, help="asked of the library")
    parser.add_argument("--budget-s", type=float, default=55, help="cells not begun by then are left out")
    parser.add_argument("--output", help="where the report is written")
    return parser.parse_args()


def _step(cells: list[dict[str, object]], num_rows: int, num_layers: int) -> dict[str, object]:
    """Milliseconds of all layers' GEMMs, and of the output projection where it was measured."""
    step: dict[str, object] = {"rows": num_rows, "cells": sum(cell["rows"] == num_rows for cell in cells)}
    for key in ("torch_us", "best_us"):
        micros = sum(
            float(str(cell[key])) * (1 if cell["name"] == "lm_head" else num_layers)
            for cell in cells
            if cell["rows"] == num_rows and key in cell
        )
        step[key.replace("_us", "_ms")] = round(micros / 1e3, 3)
    return step


def _in_turns(graphs: dict[str, TimedGraph]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            times[name].append(graph.micros())
    return times


def _weights(matrix: _Matrix, num_layers: int) -> list[torch.Tensor]:
    # One lm_head is larger than any cache.
    count = 2 if matrix.name == "lm_head" else num_layers
    return [_random(matrix.num_out, matrix.num_in).mul_(matrix.num_in**-0.5) for _ in range(count)]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
