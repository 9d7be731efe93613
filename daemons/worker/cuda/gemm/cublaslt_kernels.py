"""cuBLASLt as a kind of GEMM kernel: its candidates are the algorithms that the library names for a problem.

Legend: T rows, N features out, K features in. Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from radixmesh.daemons.worker.cuda.gemm.autotuner import GemmKernels, Operands, TuningPolicy, spread
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue, GemmKernel, GemmProblem
from radixmesh.daemons.worker.cuda.gemm.cublaslt import Algorithm, CublasLt, CublasLtMatmul, GemmShape
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import CublasLtError

# Measured first.
_USUAL_ROWS = (256, 128, 64, 32, 16, 512)
_NUM_CANDIDATES = 8


class CublasLtGemm(GemmKernel):
    """An algorithm for one problem."""

    def __init__(self, matmul: CublasLtMatmul, algorithm: Algorithm) -> None:
        self._matmul, self._algorithm = matmul, algorithm

    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor) -> bool:
        return self._matmul.accepts(x_TK, w_NK, out)

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
        self._matmul.run(self._algorithm, x_TK, w_NK, out)


class CublasLtKernels(GemmKernels[torch.Tensor, Algorithm, GemmKernel]):
    """For GEMMs without a gate. The baseline is torch, which takes the library's first algorithm."""

    # Smaller gains vanish beside other kernels. A start has time for the usual sizes; later ones add the others.
    policy = TuningPolicy(least_gain=0.05, budget_s=1.25)

    def __init__(self, lt: CublasLt) -> None:
        self._lt = lt

    def measured_rows(self, sizes: Sequence[int]) -> Sequence[int]:
        """The usual ones, then those between them."""
        usual = [num_rows for num_rows in _USUAL_ROWS if num_rows in sizes]
        return usual + sorted(set(sizes) - set(usual), reverse=True)

    def candidates(self, problem: GemmProblem) -> Mapping[Algorithm, float]:
        return dict.fromkeys(self._matmul(problem).algorithms(_NUM_CANDIDATES), 0.0)

    def operands(self, problem: GemmProblem, weights: Sequence[torch.Tensor]) -> CublasLtOperands:
        return CublasLtOperands(self._matmul(problem), self._lt.device)

    def bind(
        self, measured: Mapping[GemmProblem, Algorithm | None], sizes: Sequence[int]
    ) -> dict[GemmProblem, GemmKernel]:
        """An algorithm serves other numbers of rows where the library says that it does."""
        kernels: dict[GemmProblem, GemmKernel] = {}
        for problem, algorithm in spread(measured, sizes).items():
            matmul = self._matmul(problem)
            adopted = algorithm if measured.get(problem) is algorithm else matmul.adopt(algorithm)
            if adopted is not None:
                kernels[problem] = CublasLtGemm(matmul, adopted)
        return kernels

    def _matmul(self, problem: GemmProblem) -> CublasLtMatmul:
        num_rows, num_out, num_in, dtype, epilogue = problem
        assert isinstance(dtype, torch.dtype) and epilogue is not GemmEpilogue.GATED, problem
        return CublasLtMatmul(self._lt, GemmShape(num_rows, num_out, num_in, dtype, epilogue is GemmEpilogue.ADDED))


class CublasLtOperands(Operands[torch.Tensor, Algorithm]):
    """Random ones: zeros would cost less power, and power is what bounds the larger GEMMs."""

    def __init__(self, matmul: CublasLtMatmul, device: torch.device) -> None:
        shape = matmul.shape
        self._matmul = matmul
        self._x_TK = torch.randn(shape.num_rows, shape.num_in, dtype=shape.dtype, device=device)
        self._out_TN = torch.zeros(shape.num_rows, shape.num_out, dtype=shape.dtype, device=device)

    def check(self, candidate: Algorithm, weights: Sequence[torch.Tensor]) -> None:
        if not all(self._matmul.accepts(self._x_TK, w_NK, self._out_TN) for w_NK in weights):
            raise CublasLtError("the weights do not lie as the library expects")

    def launch(self, candidate: Algorithm | None, weight: torch.Tensor) -> None:
        if candidate is not None:
            self._matmul.run(candidate, self._x_TK, weight, self._out_TN)
        elif self._matmul.shape.is_added:
            self._out_TN.addmm_(self._x_TK, weight.t())
        else:
            torch.mm(self._x_TK, weight.t(), out=self._out_TN)
