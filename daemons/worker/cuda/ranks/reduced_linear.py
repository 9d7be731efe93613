"""A projection that is cut along its features in: ranks' results are summed (row parallel; Megatron-LM, 2019).

Legend: T rows, N features out, K this rank's features in.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend
from radixmesh.daemons.worker.cuda.linear import Linear, Norm, Residual
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.kernels.deferred_norm import DeferredNormGemm


class ReducedLinear(Linear):
    """part: this rank's share, without a bias. b_N: added once, to the sum. gemm: told that it adds to residuals."""

    def __init__(self, part: Linear, b_N: torch.Tensor | None, group: DeviceGroup, gemm: GemmBackend) -> None:
        self._part, self._b_N, self._group, self._gemm = part, b_N, group, gemm

    @property
    def shape(self) -> tuple[int, int]:
        return self._part.shape

    def multiplied(self, x_TK: torch.Tensor) -> DeferredNormGemm:
        return DeferredNormGemm(self._group.all_reduce(self._part.multiplied(x_TK).out_TN), self._b_N)

    def multiplied_gated(self, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> DeferredNormGemm:
        return DeferredNormGemm(self._group.all_reduce(self._part.multiplied_gated(gate_up, eps).out_TN), self._b_N)

    def normed(self, residual: Residual, norm: Norm) -> DeferredNormGemm:
        raise AssertionError("rows of a norm are whole, this projection has a share of its features in")

    def add_to(self, residual: Residual, x_TK: torch.Tensor) -> None:
        self._add(residual, self._part.multiplied(x_TK))

    def add_gated_to(self, residual: Residual, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> None:
        self._add(residual, self._part.multiplied_gated(gate_up, eps))

    def _add(self, residual: Residual, part: DeferredNormGemm) -> None:
        rows_TN = residual.rows()
        self._group.add_reduced(part.out_TN, rows_TN)
        if self._b_N is not None:
            rows_TN += self._b_N
        self._gemm.changed()
