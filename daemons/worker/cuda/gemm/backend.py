"""GEMM backends: torch's own choice, the autotuner's, or fixed tiles of rows.

Legend: T rows, N features out, K features in, F mlp size. Weights are [out, in].
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from radixmesh.daemons.runtime.telemetry.logs import get_logger

_log = get_logger(__name__)

# Rows of a GEMM in deterministic mode: one size, so that the library always takes the same kernel.
_TILE_ROWS = 64


class GemmEpilogue(enum.IntEnum):
    """Store the result, add it to the residual, or compute silu(gate) x up with each row's inverse RMS."""

    PLAIN = 0
    ADDED = 1
    GATED = 2


class GemmProblem(NamedTuple):
    """A matrix and a number of rows. num_out: rows of the weight, gate and up together; form: the weight's dtype, or
    the form of its FP8 scales. A plain tuple of the same fields finds it in a dictionary."""

    num_rows: int
    num_out: int
    num_in: int
    form: Hashable
    epilogue: GemmEpilogue = GemmEpilogue.PLAIN


class GemmRefusedError(RuntimeError):
    """A kernel that was chosen does not run after all."""


class GemmKernel(ABC):
    """A kernel with its configuration for one problem, ready to be launched on the current stream and captured."""

    @abstractmethod
    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor) -> bool:
        """True if tensors of the problem's shapes lie as the kernel expects."""

    @abstractmethod
    def run(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        out: torch.Tensor,
        *,
        eps: float = 0.0,
        square_sums: torch.Tensor | None = None,
        square_sums_out: torch.Tensor | None = None,
    ) -> None:
        """x @ w^T with the problem's epilogue to `out`, which is the residual where the result is added to it.

        eps and square_sums are of a gated GEMM: partial sums of x**2, float32 [any, T], or None where it is to compute
        them. square_sums_out, of one that adds: made by `new_square_sums`. Raises GemmRefusedError where the library
        refuses what it was not tried on; the output is untouched then.
        """

    def new_square_sums(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor | None:
        """A buffer for partial sums of squares of the rows that the GEMM writes; None: it writes none."""
        return None


class GemmBackend(ABC):
    """GEMMs in the dtype of the inputs, with float32 accumulation."""

    @abstractmethod
    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        """Adds the GEMM to the residual in place."""

    def changed(self) -> None:
        """Says that a residual was modified outside of `add_linear`."""
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


class TiledGemm(GemmBackend):
    """torch's in tiles of a fixed number of rows: a row's bits do not depend on how many others there are."""

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        num_rows = x_TK.shape[0]
        padding = -num_rows % _TILE_ROWS
        x_TK = functional.pad(x_TK, (0, 0, 0, padding))
        out_TN = x_TK.new_empty(num_rows + padding, w_NK.shape[0])
        for first in range(0, num_rows, _TILE_ROWS):
            torch.mm(x_TK[first : first + _TILE_ROWS], w_NK.t(), out=out_TN[first : first + _TILE_ROWS])
        return out_TN[:num_rows]

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        residual_TN += self.linear(x_TK, w_NK)


class TunedGemm(GemmBackend):
    """A GEMM of several rows: the table's kernel for the matrix and the number of rows, or torch. Steps of so few rows
    that GEMVs take them (`Ops.max_fused_rows`) do not come here: `PlainLinear` asks that first.

    A GEMM that adds to the residual also writes partial sums of squares of its rows where its kernel can and a gated
    GEMM behind it needs them for the deferred norm.
    """

    def __init__(self, table: Mapping[GemmProblem, GemmKernel]) -> None:
        self._table: dict[tuple[object, ...], GemmKernel] = {(*problem,): kernel for problem, kernel in table.items()}
        self._gated_sizes = {(each.num_rows, each.num_in) for each in table if each.epilogue is GemmEpilogue.GATED}
        # Address of the residual and its partial sums of squares.
        self._square_sums: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._table)

    @property
    def problems(self) -> Collection[tuple[object, ...]]:
        """Those that have a kernel, as fields of GemmProblem."""
        return self._table.keys()

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        num_rows, num_out = x_TK.shape[0], w_NK.shape[0]
        problem = (num_rows, num_out, w_NK.shape[1], x_TK.dtype, GemmEpilogue.PLAIN)
        kernel = self._table.get(problem)
        if kernel is not None:
            out_TN = x_TK.new_empty(num_rows, num_out)
            if kernel.accepts(x_TK, w_NK, out_TN):
                try:
                    kernel.run(x_TK, w_NK, out_TN)
                    return out_TN
                except GemmRefusedError as error:
                    self._drop(problem, error)
        return torch.mm(x_TK, w_NK.t())

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        self._square_sums = None
        problem = (x_TK.shape[0], w_NK.shape[0], w_NK.shape[1], x_TK.dtype, GemmEpilogue.ADDED)
        kernel = self._table.get(problem)
        if kernel is not None and kernel.accepts(x_TK, w_NK, residual_TN):
            is_needed = (x_TK.shape[0], w_NK.shape[0]) in self._gated_sizes
            square_sums = kernel.new_square_sums(x_TK, w_NK) if is_needed else None
            try:
                kernel.run(x_TK, w_NK, residual_TN, square_sums_out=square_sums)
                if square_sums is not None:
                    self._square_sums = residual_TN.data_ptr(), square_sums
                return
            except GemmRefusedError as error:
                self._drop(problem, error)
        residual_TN.addmm_(x_TK, w_NK.t())

    def changed(self) -> None:
        self._square_sums = None

    def gate_up_silu(self, x_TD: torch.Tensor, w_2FD: torch.Tensor, eps: float) -> torch.Tensor | None:
        num_rows, num_out = x_TD.shape[0], w_2FD.shape[0]
        kernel = self._table.get((num_rows, num_out, w_2FD.shape[1], x_TD.dtype, GemmEpilogue.GATED))
        if kernel is None:
            return None
        out_TF = x_TD.new_empty(num_rows, num_out // 2)
        if not kernel.accepts(x_TD, w_2FD, out_TF):
            return None
        kernel.run(x_TD, w_2FD, out_TF, eps=eps, square_sums=self._square_sums_of(x_TD))
        return out_TF

    def _square_sums_of(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        if self._square_sums is None:
            return None
        address, square_sums = self._square_sums
        return square_sums if address == x_TD.data_ptr() and square_sums.shape[1] == x_TD.shape[0] else None

    def _drop(self, problem: tuple[object, ...], error: GemmRefusedError) -> None:
        """A choice taken over from another number of rows has not run before: a refusal can show only here."""
        _log.warning("gemm_algorithm_refused", problem=str(problem), reason=str(error))
        del self._table[problem]
