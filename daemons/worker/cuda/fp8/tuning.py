"""Autotuner of FP8 GEMMs: chooses the library or a tile configuration by measurement at startup."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.fp8.gemm import (
    Choice,
    Fp8Gemm,
    MatrixShape,
    ScaledMmGemm,
    TritonFp8Gemm,
    TunedFp8Gemm,
    tried_library,
)
from radixmesh.daemons.worker.cuda.gemm.timed_graph import TimedGraph, beyond_cache
from radixmesh.daemons.worker.cuda.model.device_model import TunableMatrices
from radixmesh.kernels.fp8.linear import TileConfig, default_tile, other_tiles
from radixmesh.kernels.fp8.quantize_rows import quantize_rows
from radixmesh.kernels.fp8.quantized import QuantizedMatrix

_log = get_logger(__name__)

# Other row counts use the choice for the next larger one.
_ROWS = (16, 64, 256, 512, 2048)
_ROUNDS = 3
# Smaller gains, between our kernels or over the library, are noise.
_LEAST_GAIN = 0.02


class Candidate(NamedTuple):
    """tile None: the library."""

    tile: TileConfig | None


class Fp8Benchmark(ABC):
    """Operands of the GEMMs of one shape at one number of rows, on which candidates are timed."""

    @abstractmethod
    def candidate(self, candidate: Candidate) -> Callable[[], float] | None:
        """Returns a function that times the candidate once, in microseconds; None if it does not support the GEMM."""


CreateFp8Benchmark = Callable[[int, Sequence[QuantizedMatrix]], Fp8Benchmark]
"""For a number of rows, with the matrices of one shape of all layers."""


def create_fp8_gemm(
    groups: Sequence[TunableMatrices],
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_rows: int,
    use_pdl: bool,
    is_deterministic: bool,
    is_tuned: bool,
) -> Fp8Gemm:
    """max_rows: of the largest step. is_tuned: chosen by measurement; otherwise the library wherever it works."""
    ours = TritonFp8Gemm(use_pdl=use_pdl, is_deterministic=is_deterministic)
    if is_deterministic:
        return ours
    library = tried_library(ours, device)
    if not is_tuned or device.type != "cuda":
        return library
    started = time.monotonic()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    sizes = measured_sizes(max_rows)
    try:
        table = choose(groups, sizes, partial(GraphFp8Benchmark, library, ours, dtype, stream))
    # Also what CUDA itself reports: if it cannot go on, the capture behind this says so.
    except RuntimeError as error:
        _log.warning("fp8_gemm_not_tuned", reason=f"{type(error).__name__}: {error}", field="tune_gemm")
        return library
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    _log.info(
        "fp8_gemm_tuned",
        chosen={f"{shape.num_out}x{shape.num_in}": _named(choices) for shape, choices in table.items()},
        seconds=round(time.monotonic() - started, 3),
    )
    return TunedFp8Gemm(library, ours, table)


def measured_sizes(max_rows: int) -> tuple[int, ...]:
    """Up to the first that is as large as the largest step."""
    last = next((size for size in _ROWS if size >= max_rows), _ROWS[-1])
    return tuple(size for size in _ROWS if size <= last)


def choose(
    groups: Sequence[TunableMatrices], sizes: Sequence[int], create_benchmark: CreateFp8Benchmark
) -> dict[MatrixShape, tuple[Choice, ...]]:
    """The fastest for each shape and size."""
    return {
        shape: tuple(_fastest(size, shape.num_out, create_benchmark(size, matrices)) for size in sizes)
        for shape, matrices in _by_shape(groups).items()
    }


class GraphFp8Benchmark(Fp8Benchmark):
    """Candidates as they run in a step: captured, each launch with the weights of another layer."""

    def __init__(
        self,
        library: ScaledMmGemm,
        ours: TritonFp8Gemm,
        dtype: torch.dtype,
        stream: torch.cuda.Stream,
        num_rows: int,
        matrices: Sequence[QuantizedMatrix],
    ) -> None:
        self._library = library
        self._ours = ours
        self._dtype = dtype
        self._stream = stream
        self._matrices = beyond_cache(matrices, matrices[0].data_NK.nbytes)
        first = matrices[0]
        # Zeros would cost less power, and power is what bounds the larger GEMMs.
        x_TK = torch.randn(num_rows, first.shape[1], dtype=dtype, device=first.data_NK.device)
        self._rows = quantize_rows(x_TK, is_grouped=first.is_grouped)
        torch.cuda.synchronize(first.data_NK.device)

    def candidate(self, candidate: Candidate) -> Callable[[], float] | None:
        if candidate.tile is None and not self._library.takes(self._rows, self._matrices[0], self._dtype):
            return None
        return TimedGraph([partial(self._launch, candidate, w) for w in self._matrices], self._stream).micros

    def _launch(self, candidate: Candidate, w: QuantizedMatrix) -> torch.Tensor:
        if candidate.tile is None:
            return self._library.linear(self._rows, w, self._dtype)
        return self._ours.in_tiles(self._rows, w, self._dtype, candidate.tile)


def _fastest(num_rows: int, num_out: int, benchmark: Fp8Benchmark) -> Choice:
    default = default_tile(num_rows, num_out)
    takes = {
        candidate: take
        for candidate in _candidates(num_rows, num_out)
        if (take := benchmark.candidate(candidate)) is not None
    }
    least = dict.fromkeys(takes, float("inf"))
    for _ in range(_ROUNDS):
        for candidate, take in takes.items():
            least[candidate] = min(least[candidate], take())
    # The library where it takes the GEMM, else our default: what is to take its place gains something.
    usual = next(iter(takes))
    best = min(least, key=lambda candidate: least[candidate])
    best = best if least[best] <= (1 - _LEAST_GAIN) * least[usual] else usual
    ours = [candidate for candidate in least if candidate.tile is not None]
    tile = min(ours, key=lambda candidate: least[candidate]).tile or default
    return Choice(num_rows, best.tile is None, tile)


def _candidates(num_rows: int, num_out: int) -> Iterator[Candidate]:
    yield Candidate(None)
    yield Candidate(default_tile(num_rows, num_out))
    for tile in other_tiles(num_rows, num_out):
        yield Candidate(tile)


def _by_shape(groups: Sequence[TunableMatrices]) -> Mapping[MatrixShape, list[QuantizedMatrix]]:
    found: dict[MatrixShape, list[QuantizedMatrix]] = {}
    for group in groups:
        for matrix in group.matrices:
            if isinstance(matrix, QuantizedMatrix):
                found.setdefault(MatrixShape.of(matrix), []).append(matrix)
    return found


def _named(choices: Sequence[Choice]) -> dict[str, str]:
    return {
        str(choice.max_rows): "library" if choice.is_library else f"{choice.tile.rows}x{choice.tile.columns}"
        for choice in choices
    }
