"""What computes GEMMs of many rows: the library's own choice of an algorithm, or one that was measured.

Legend: T rows, N features out, K features in. Weights are [out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.gemm.cublaslt import Algorithm, CublasLt, CublasLtMatmul, GemmShape
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import CublasLtError

_log = get_logger(__name__)


class GemmBackend(ABC):
    """In the dtype of the inputs, with sums in float32."""

    @abstractmethod
    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        """Adds the GEMM to the residual in place."""

    def changed(self, residual_TN: torch.Tensor) -> None:
        """Told when another one has added to a residual behind `add_linear`."""
        return None

    def gate_up_silu(self, x_TD: torch.Tensor, w_2FD: torch.Tensor, eps: float) -> torch.Tensor | None:
        """silu(gate) x up of both GEMMs times each row's 1 / sqrt(mean(x^2) + eps), [T, F]; None where no one kernel
        computes it better than a GEMM and what reads it."""
        return None


class TorchGemm(GemmBackend):
    """cuBLAS with the first algorithm that it names."""

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_TK, w_NK.t())

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        residual_TN.addmm_(x_TK, w_NK.t())


class ChosenMatmul(NamedTuple):
    matmul: CublasLtMatmul
    algorithm: Algorithm


class TunedGemm(TorchGemm):
    """The chosen algorithm where a GEMM of these shapes has one that runs; torch for the others."""

    def __init__(self, table: Mapping[GemmShape, ChosenMatmul]) -> None:
        self._table = dict(table)

    def __len__(self) -> int:
        return len(self._table)

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        shape = _shape(x_TK, w_NK, False)
        if shape in self._table:
            out_TN = x_TK.new_empty(x_TK.shape[0], w_NK.shape[0])
            if self._has_run(shape, x_TK, w_NK, out_TN):
                return out_TN
        return super().linear(x_TK, w_NK)

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        shape = _shape(x_TK, w_NK, True)
        if shape not in self._table or not self._has_run(shape, x_TK, w_NK, residual_TN):
            super().add_linear(x_TK, w_NK, residual_TN)

    def _has_run(self, shape: GemmShape, x_TK: torch.Tensor, w_NK: torch.Tensor, out_TN: torch.Tensor) -> bool:
        """What the library refuses to launch is not asked for again: an adopted algorithm has not run before."""
        matmul, algorithm = self._table[shape]
        if not matmul.accepts(x_TK, w_NK, out_TN):
            return False
        try:
            matmul.run(algorithm, x_TK, w_NK, out_TN)
        except CublasLtError as error:
            _log.warning("gemm_algorithm_refused", shape=str(shape), order=algorithm.order, reason=str(error))
            del self._table[shape]
            return False
        return True


def nearest_rows(size: int, measured: Iterable[int]) -> int | None:
    """Whose choice serves steps of `size` rows: the next larger that was measured, of up to twice as many."""
    return min((num_rows for num_rows in measured if size <= num_rows <= 2 * size), default=None)


def spread(
    lt: CublasLt, measured: Mapping[GemmShape, Algorithm | None], sizes: Iterable[int]
) -> dict[GemmShape, ChosenMatmul]:
    """A table for all `sizes` of rows: each takes what was best, None being torch, at `nearest_rows`, if the library
    says that it serves this size too."""
    table: dict[GemmShape, ChosenMatmul] = {}
    matrices = {(shape.num_out, shape.num_in, shape.dtype, shape.is_added) for shape in measured}
    for num_out, num_in, dtype, is_added in matrices:
        by_rows = {
            shape.num_rows: algorithm
            for shape, algorithm in measured.items()
            if (shape.num_out, shape.num_in, shape.dtype, shape.is_added) == (num_out, num_in, dtype, is_added)
        }
        for size in sizes:
            nearest = nearest_rows(size, by_rows)
            algorithm = by_rows[nearest] if nearest is not None else None
            if algorithm is None:
                continue
            matmul = CublasLtMatmul(lt, GemmShape(size, num_out, num_in, dtype, is_added))
            adopted = algorithm if size == nearest else matmul.adopt(algorithm)
            if adopted is not None:
                table[matmul.shape] = ChosenMatmul(matmul, adopted)
    return table


def _shape(x_TK: torch.Tensor, w_NK: torch.Tensor, is_added: bool) -> GemmShape:
    return GemmShape(x_TK.shape[0], w_NK.shape[0], w_NK.shape[1], x_TK.dtype, is_added)
