"""GEMM backends: cuBLAS with its default algorithm, or cuBLASLt with a measured one.

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
    """GEMMs in the dtype of the inputs, with float32 accumulation."""

    @abstractmethod
    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        """Adds the GEMM to the residual in place."""

    def changed(self, residual_TN: torch.Tensor) -> None:
        """Invalidates state about a residual that was modified outside of `add_linear`."""
        return None

    def gate_up_silu(self, x_TD: torch.Tensor, w_2FD: torch.Tensor, eps: float) -> torch.Tensor | None:
        """Deferred-norm GEMM with SwiGLU: silu(gate) x up, both scaled by each row's inverse RMS, [T, F].

        None where no fused kernel is faster than a GEMM followed by `silu_mul`.
        """
        return None


class TorchGemm(GemmBackend):
    """cuBLAS with its default algorithm."""

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_TK, w_NK.t())

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        residual_TN.addmm_(x_TK, w_NK.t())


class ChosenMatmul(NamedTuple):
    matmul: CublasLtMatmul
    algorithm: Algorithm


class TunedGemm(TorchGemm):
    """The measured cuBLASLt algorithm for shapes in the table; torch for all others."""

    def __init__(self, table: Mapping[GemmShape, ChosenMatmul]) -> None:
        self.table = dict(table)

    def __len__(self) -> int:
        return len(self.table)

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        shape = _shape(x_TK, w_NK, False)
        if shape in self.table:
            out_TN = x_TK.new_empty(x_TK.shape[0], w_NK.shape[0])
            if self._has_run(shape, x_TK, w_NK, out_TN):
                return out_TN
        return super().linear(x_TK, w_NK)

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        shape = _shape(x_TK, w_NK, True)
        if shape not in self.table or not self._has_run(shape, x_TK, w_NK, residual_TN):
            super().add_linear(x_TK, w_NK, residual_TN)

    def _has_run(self, shape: GemmShape, x_TK: torch.Tensor, w_NK: torch.Tensor, out_TN: torch.Tensor) -> bool:
        """Runs the chosen algorithm; drops it from the table if the library refuses it.

        An algorithm adopted from another row count has not run before, so a refusal can show only here.
        """
        matmul, algorithm = self.table[shape]
        if not matmul.accepts(x_TK, w_NK, out_TN):
            return False
        try:
            matmul.run(algorithm, x_TK, w_NK, out_TN)
        except CublasLtError as error:
            _log.warning("gemm_algorithm_refused", shape=str(shape), order=algorithm.order, reason=str(error))
            del self.table[shape]
            return False
        return True


def nearest_rows(size: int, measured: Iterable[int]) -> int | None:
    """The measured row count whose choice serves `size` rows: the next larger one, up to 2 x size."""
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
