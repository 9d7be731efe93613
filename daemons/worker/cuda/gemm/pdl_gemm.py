"""GEMM backend with weight prefetch under PDL (programmatic dependent launch), for shapes where it measured faster.

Legend: T rows, N features out, K features in, F mlp size. Weights are [out, in].
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, nearest_rows
from radixmesh.kernels.gemm_sm90.variants import GemmConfig


class GemmEpilogue(enum.Enum):
    """Epilogue: store the result, add it to the residual, or compute silu(gate) x up."""

    PLAIN = "plain"
    ADDED = "added"
    GATED = "gated"


@dataclass(frozen=True, slots=True)
class PdlShape:
    """num_out: rows of the weight; gate and up count together."""

    num_rows: int
    num_out: int
    num_in: int
    dtype: torch.dtype
    use: GemmEpilogue

    @classmethod
    def of(cls, num_rows: int, w_NK: torch.Tensor, use: GemmEpilogue) -> PdlShape:
        return cls(num_rows, w_NK.shape[0], w_NK.shape[1], w_NK.dtype, use)


class PdlKernel(ABC):
    """Kernel with weight prefetch under PDL: `kernels/gemm_sm90/gemm.py` on a GPU. Tensors fit `accepts`."""

    @abstractmethod
    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor, *, is_gated: bool) -> bool:
        """True if it can compute `out` of the others."""

    @abstractmethod
    def prepare(self, needed: Iterable[tuple[PdlShape, GemmConfig]]) -> None:
        """Compiles what GEMMs of these need. What fails here says so when it is loaded or launched."""

    @abstractmethod
    def load(self, shape: PdlShape, config: GemmConfig) -> None:
        """Makes it ready to be launched. Raises RuntimeError or OSError."""

    @abstractmethod
    def linear(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        config: GemmConfig,
        *,
        residual_TN: torch.Tensor | None,
        out: torch.Tensor,
        square_sums_out: torch.Tensor | None = None,
    ) -> None:
        """x @ w^T to `out`, [T, N], added to the residual if there is one, which may be `out`. square_sums_out: as
        `new_square_sums` makes it. Raises RuntimeError where the kernel cannot be compiled or launched."""

    @abstractmethod
    def new_square_sums(self, x_TK: torch.Tensor, w_NK: torch.Tensor, config: GemmConfig) -> torch.Tensor:
        """Buffer for partial sums of squares: float32 [any, T]; its column sums are sum(y**2) of the result's rows."""

    @abstractmethod
    def gate_up_silu(
        self,
        x_TK: torch.Tensor,
        w_2FK: torch.Tensor,
        config: GemmConfig,
        *,
        eps: float,
        out: torch.Tensor,
        square_sums: torch.Tensor | None = None,
    ) -> None:
        """silu(x @ gate^T) x (x @ up^T) to `out`, [T, F], both scaled by each row's inverse RMS; w holds the
        rows of gate, then those of up. square_sums: partial sums of x**2, written by the kernel that produced x.
        Raises as `linear`."""


class PdlGemm(GemmBackend):
    """The PDL kernel for shapes in the table, `others` for the rest.

    A GEMM that adds to the residual also writes partial sums of squares of its rows, which the gated GEMM behind it
    needs for the deferred norm.
    """

    def __init__(self, kernel: PdlKernel, table: Mapping[PdlShape, GemmConfig], others: GemmBackend) -> None:
        self._kernel = kernel
        self._table = dict(table)
        self._others = others
        self._gated_sizes = {(shape.num_rows, shape.num_in) for shape in self._table if shape.use is GemmEpilogue.GATED}
        # Address of the residual and its partial sums of squares.
        self._square_sums: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._table)

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        config = self._config(x_TK, w_NK, GemmEpilogue.PLAIN)
        if config is not None:
            out_TN = x_TK.new_empty(x_TK.shape[0], w_NK.shape[0])
            if self._kernel.accepts(x_TK, w_NK, out_TN, is_gated=False):
                self._kernel.linear(x_TK, w_NK, config, residual_TN=None, out=out_TN)
                return out_TN
        return self._others.linear(x_TK, w_NK)

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        config = self._config(x_TK, w_NK, GemmEpilogue.ADDED)
        self._square_sums = None
        if config is None or not self._kernel.accepts(x_TK, w_NK, residual_TN, is_gated=False):
            self._others.add_linear(x_TK, w_NK, residual_TN)
            return
        square_sums = None
        if tuple(residual_TN.shape) in self._gated_sizes:
            square_sums = self._kernel.new_square_sums(x_TK, w_NK, config)
            self._square_sums = residual_TN.data_ptr(), square_sums
        self._kernel.linear(x_TK, w_NK, config, residual_TN=residual_TN, out=residual_TN, square_sums_out=square_sums)

    def changed(self, residual_TN: torch.Tensor) -> None:
        self._square_sums = None
        self._others.changed(residual_TN)

    def gate_up_silu(self, x_TD: torch.Tensor, w_2FD: torch.Tensor, eps: float) -> torch.Tensor | None:
        config = self._config(x_TD, w_2FD, GemmEpilogue.GATED)
        if config is not None:
            out_TF = x_TD.new_empty(x_TD.shape[0], w_2FD.shape[0] // 2)
            if self._kernel.accepts(x_TD, w_2FD, out_TF, is_gated=True):
                square_sums = self._square_sums_of(x_TD)
                self._kernel.gate_up_silu(x_TD, w_2FD, config, eps=eps, out=out_TF, square_sums=square_sums)
                return out_TF
        return self._others.gate_up_silu(x_TD, w_2FD, eps)

    def _square_sums_of(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        if self._square_sums is None:
            return None
        address, square_sums = self._square_sums
        return square_sums if address == x_TD.data_ptr() and square_sums.shape[1] == x_TD.shape[0] else None

    def _config(self, x_TK: torch.Tensor, w_NK: torch.Tensor, use: GemmEpilogue) -> GemmConfig | None:
        return self._table.get(PdlShape.of(x_TK.shape[0], w_NK, use))


def spread_configs(measured: Mapping[PdlShape, GemmConfig | None], sizes: Iterable[int]) -> dict[PdlShape, GemmConfig]:
    """A table for all `sizes` of rows: each takes what was best, None being others, at `nearest_rows`."""
    table: dict[PdlShape, GemmConfig] = {}
    sizes = list(sizes)
    matrices = {(shape.num_out, shape.num_in, shape.dtype, shape.use) for shape in measured}
    for matrix in matrices:
        by_rows = {
            shape.num_rows: config
            for shape, config in measured.items()
            if (shape.num_out, shape.num_in, shape.dtype, shape.use) == matrix
        }
        for size in sizes:
            nearest = nearest_rows(size, by_rows)
            config = by_rows[nearest] if nearest is not None else None
            if config is not None:
                table[PdlShape(size, *matrix)] = config
    return table
