"""FP8 GEMMs as a kind of GEMM kernel: the library is the baseline, the project's kernel competes in several tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from radixmesh.daemons.worker.cuda.fp8.gemm import (
    Fp8Gemm,
    ScaledMmGemm,
    TritonFp8Gemm,
    TunedFp8Gemm,
    tried_library,
)
from radixmesh.daemons.worker.cuda.gemm.autotuner import GemmKernels, MatrixGroup, Operands, TuningPolicy
from radixmesh.daemons.worker.cuda.gemm.backend import GemmProblem
from radixmesh.daemons.worker.cuda.gemm.tuning import tune_kind
from radixmesh.daemons.worker.cuda.gemm.tuning_notes import TuningNotes
from radixmesh.daemons.worker.cuda.model.device_model import TunableMatrices
from radixmesh.kernels.fp8.linear import TileConfig, default_tile, other_tiles
from radixmesh.kernels.fp8.quantize_rows import quantize_rows
from radixmesh.kernels.fp8.quantized import QuantizedMatrix

# Other row counts use the choice for the next larger one.
_ROWS = (16, 64, 256, 512, 2048)


def create_fp8_gemm(
    groups: Sequence[TunableMatrices],
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_rows: int,
    use_pdl: bool,
    is_deterministic: bool,
    is_tuned: bool,
    notes: TuningNotes | None = None,
) -> Fp8Gemm:
    """max_rows: of the largest step. is_tuned: chosen by measurement; otherwise the library wherever it works. notes:
    of earlier starts, to which this one's are added."""
    ours = TritonFp8Gemm(use_pdl=use_pdl, is_deterministic=is_deterministic)
    if is_deterministic:
        return ours
    library = tried_library(ours, device)
    if not is_tuned or device.type != "cuda":
        return library
    sizes = measured_sizes(max_rows)
    kernels = Fp8Kernels(library, ours, dtype)
    table = tune_kind(
        lambda: kernels,
        fp8_groups(groups),
        sizes,
        device,
        event="fp8_gemm_tuned",
        failed="fp8_gemm_not_tuned",
        notes=None if notes is None else notes.kind("fp8"),
    )
    if notes is not None:
        notes.keep()
    return TunedFp8Gemm(library, ours, table, sizes)


def measured_sizes(max_rows: int) -> tuple[int, ...]:
    """Up to the first that is as large as the largest step."""
    last = next((size for size in _ROWS if size >= max_rows), _ROWS[-1])
    return tuple(size for size in _ROWS if size <= last)


def fp8_groups(groups: Sequence[TunableMatrices]) -> list[MatrixGroup[QuantizedMatrix]]:
    """FP8 matrices of one shape and form of scales, whatever they are for: nothing is fused into their GEMMs."""
    found: dict[tuple[object, ...], list[QuantizedMatrix]] = {}
    for group in groups:
        for matrix in group.matrices:
            if isinstance(matrix, QuantizedMatrix):
                found.setdefault((*matrix.shape, matrix.group_rows, matrix.is_grouped), []).append(matrix)
    return [matrix_group(matrices) for matrices in found.values()]


def matrix_group(matrices: Sequence[QuantizedMatrix]) -> MatrixGroup[QuantizedMatrix]:
    """Matrices of one shape and form of scales."""
    first = matrices[0]
    num_out, num_in = first.shape
    return MatrixGroup(matrices, first.data_NK.nbytes, num_out, num_in, (first.group_rows, first.is_grouped))


class Fp8Kernels(GemmKernels[QuantizedMatrix, TileConfig, TileConfig]):
    """The project's kernel by its tiles. The baseline is the library where it takes the GEMM, else the default tile."""

    # Smaller gains are noise.
    policy = TuningPolicy(least_gain=0.02)

    def __init__(self, library: ScaledMmGemm, ours: TritonFp8Gemm, dtype: torch.dtype) -> None:
        self._library, self._ours, self._dtype = library, ours, dtype

    def measured_rows(self, sizes: Sequence[int]) -> Sequence[int]:
        return sizes

    def candidates(self, problem: GemmProblem) -> Mapping[TileConfig, float]:
        size = problem.num_rows, problem.num_out
        return dict.fromkeys([default_tile(*size), *other_tiles(*size)], 0.0)

    def operands(self, problem: GemmProblem, weights: Sequence[QuantizedMatrix]) -> Fp8Operands:
        return Fp8Operands(self._library, self._ours, self._dtype, problem.num_rows, weights[0])

    def bind(
        self, measured: Mapping[GemmProblem, TileConfig | None], sizes: Sequence[int]
    ) -> dict[GemmProblem, TileConfig]:
        return {problem: tile for problem, tile in measured.items() if tile is not None}


class Fp8Operands(Operands[QuantizedMatrix, TileConfig]):
    """Random ones: zeros would cost less power, and power is what bounds the larger GEMMs."""

    def __init__(
        self,
        library: ScaledMmGemm,
        ours: TritonFp8Gemm,
        dtype: torch.dtype,
        num_rows: int,
        first: QuantizedMatrix,
    ) -> None:
        self._library, self._ours, self._dtype = library, ours, dtype
        x_TK = torch.randn(num_rows, first.shape[1], dtype=dtype, device=first.data_NK.device)
        self._rows = quantize_rows(x_TK, is_grouped=first.is_grouped)

    def launch(self, candidate: TileConfig | None, weight: QuantizedMatrix) -> None:
        if candidate is None:
            self._library.linear(self._rows, weight, self._dtype)
        else:
            self._ours.in_tiles(self._rows, weight, self._dtype, candidate)
