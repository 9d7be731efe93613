"""The seam between a model's layers and their weight matrices: a kind of quantisation is a kind of `Linear`.

A layer says what it means (norm these rows and multiply them, add this to the residual); the kind of the matrix decides
in which dtype the rows are multiplied and what is fused into the GEMM, the kernel before it or the one behind it.

Legend: T rows, D hidden size, N features out, K features in, F mlp size. Weights are [out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cuda.fp8.ops import Fp8Ops
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.fp8.quantized import QuantizedMatrix, QuantizedRows


class Norm(NamedTuple):
    """An RMSNorm in front of a matrix. weight_D None: it is folded into the matrix."""

    weight_D: torch.Tensor | None
    eps: float


class Residual:
    """The residual stream of a step's rows [T, D], and at most one GEMM result that is not added to it yet.

    An FP8 GEMM leaves its result to the kernel that norms the rows next. Everybody else reads `rows()`.
    """

    def __init__(self, x_TD: torch.Tensor) -> None:
        self._x_TD = x_TD
        self._pending: DeferredNormGemm | None = None

    def __len__(self) -> int:
        return len(self._x_TD)

    @property
    def dtype(self) -> torch.dtype:
        return self._x_TD.dtype

    def rows(self) -> torch.Tensor:
        """The rows with everything added; GEMMs may add to this tensor in place."""
        x_TD, pending = self.take()
        if pending is not None:
            x_TD += pending.out_TN
            if pending.bias_N is not None:
                x_TD += pending.bias_N
        return x_TD

    def take(self) -> tuple[torch.Tensor, DeferredNormGemm | None]:
        """The rows, and the result that the caller now has to add to them in place."""
        pending, self._pending = self._pending, None
        return self._x_TD, pending

    def leave(self, result: DeferredNormGemm) -> None:
        """A GEMM's result [T, D], of rows that were normed before, for whoever reads the rows next."""
        assert self._pending is None and result.norm_input_TD is None
        self._pending = result


def note_hidden(hidden: HiddenStates | None, layer: int, residual: Residual) -> None:
    """Keeps a copy of a layer's output, if a network that drafts asks for it: later layers change the residual."""
    if hidden is not None and hidden.wants(layer):
        hidden.note(layer, residual.rows().clone())


class Linear(ABC):
    """A weight matrix [N, K] with its bias on the device, and the kernels that multiply rows with it.

    Results are in the dtype of the rows, on the current stream. Any number of rows; captured in graphs as well.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @abstractmethod
    def multiplied(self, x_TK: torch.Tensor) -> DeferredNormGemm:
        """x @ w^T; the bias may be left to the reader."""

    @abstractmethod
    def multiplied_gated(self, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> DeferredNormGemm:
        """As `multiplied` with the result of `gated`; eps is that of its norm."""

    @abstractmethod
    def normed(self, residual: Residual, norm: Norm) -> DeferredNormGemm:
        """RMSNorm(residual) @ w^T; norm and bias may be left to the reader."""

    def gated(self, residual: Residual, norm: Norm) -> torch.Tensor | DeferredNormGemm:
        """As `normed` where the matrix holds the rows of gate, then those of up. silu(gate) x up, [T, F], where one
        kernel computes both; otherwise gate and up, [T, 2F], for `add_gated_to` of the matrix behind it."""
        return self.normed(residual, norm)

    @abstractmethod
    def add_to(self, residual: Residual, x_TK: torch.Tensor) -> None:
        """residual += x @ w^T + bias, now or when the residual is read next."""

    @abstractmethod
    def add_gated_to(self, residual: Residual, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> None:
        """As `add_to` with the result of `gated`; eps is that of its norm."""


class PlainLinear(Linear):
    """A matrix in the dtype of the rows."""

    def __init__(self, ops: Ops, w_NK: torch.Tensor, b_N: torch.Tensor | None = None) -> None:
        self._ops, self._w_NK, self._b_N = ops, w_NK, b_N

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self._w_NK.shape
        return num_out, num_in

    def multiplied(self, x_TK: torch.Tensor) -> DeferredNormGemm:
        if len(x_TK) <= self._ops.max_fused_rows:
            return DeferredNormGemm(self._ops.linear_fused(x_TK, self._w_NK, self._b_N))
        return DeferredNormGemm(self._ops.linear(x_TK, self._w_NK), self._b_N)

    def multiplied_gated(self, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> DeferredNormGemm:
        return self.multiplied(gate_up if isinstance(gate_up, torch.Tensor) else self._ops.silu_mul(gate_up, eps))

    def normed(self, residual: Residual, norm: Norm) -> DeferredNormGemm:
        ops, x_TD = self._ops, residual.rows()
        if len(x_TD) <= ops.max_fused_rows:
            return DeferredNormGemm(ops.linear_fused(x_TD, self._w_NK, self._b_N, norm_K=norm.weight_D, eps=norm.eps))
        if norm.weight_D is None:
            return DeferredNormGemm(ops.linear(x_TD, self._w_NK), self._b_N, norm_input_TD=x_TD)
        return DeferredNormGemm(ops.linear(ops.rms_norm(x_TD, norm.weight_D, norm.eps), self._w_NK), self._b_N)

    def gated(self, residual: Residual, norm: Norm) -> torch.Tensor | DeferredNormGemm:
        if self._b_N is None and len(residual) <= self._ops.max_fused_rows:
            return self._ops.gate_up_silu(residual.rows(), self._w_NK, norm.weight_D, norm.eps)
        if self._b_N is None and norm.weight_D is None:
            return self._ops.gate_up_silu_deferred_norm(residual.rows(), self._w_NK, norm.eps)
        return self.normed(residual, norm)

    def add_to(self, residual: Residual, x_TK: torch.Tensor) -> None:
        ops, rows_TN = self._ops, residual.rows()
        if len(x_TK) <= ops.max_fused_rows:
            ops.linear_fused(x_TK, self._w_NK, self._b_N, add_to_TN=rows_TN)
        else:
            ops.add_linear(x_TK, self._w_NK, self._b_N, rows_TN)

    def add_gated_to(self, residual: Residual, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> None:
        self.add_to(residual, gate_up if isinstance(gate_up, torch.Tensor) else self._ops.silu_mul(gate_up, eps))


class Fp8Linear(Linear):
    """A matrix in FP8 with scales by block or by channel. Up to max_fused_rows rows stay in their dtype; more are
    quantised by the kernel that norms them or computes the gate."""

    def __init__(self, ops: Fp8Ops, w: QuantizedMatrix, b_N: torch.Tensor | None = None) -> None:
        self._ops, self._w, self._b_N = ops, w, b_N

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self._w.shape
        return num_out, num_in

    def multiplied(self, x_TK: torch.Tensor) -> DeferredNormGemm:
        ops, w = self._ops, self._w
        if len(x_TK) <= ops.max_fused_rows:
            return DeferredNormGemm(ops.linear_fused(x_TK, w, self._b_N))
        return DeferredNormGemm(ops.linear(ops.rows(x_TK, w), w, x_TK.dtype), self._b_N)

    def multiplied_gated(self, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> DeferredNormGemm:
        ops, w = self._ops, self._w
        if isinstance(gate_up, torch.Tensor):
            return self.multiplied(gate_up)
        out = gate_up.out_TN
        if len(out) <= ops.max_fused_rows:
            return self.multiplied(ops.silu_mul(gate_up, eps))
        return DeferredNormGemm(ops.linear(ops.gated(gate_up, eps, w), w, out.dtype), self._b_N)

    def normed(self, residual: Residual, norm: Norm) -> DeferredNormGemm:
        assert norm.weight_D is not None, "the numbers of an FP8 matrix are the checkpoint's: no norm is folded into it"
        ops, w = self._ops, self._w
        if len(residual) <= ops.max_fused_rows:
            return DeferredNormGemm(ops.linear_fused(residual.rows(), w, self._b_N, norm_K=norm.weight_D, eps=norm.eps))
        x_TD, pending = residual.take()
        rows = ops.normed(x_TD, pending, norm.weight_D, norm.eps, w)
        return DeferredNormGemm(ops.linear(rows, w, x_TD.dtype), self._b_N)

    def gated(self, residual: Residual, norm: Norm) -> torch.Tensor | DeferredNormGemm:
        if self._b_N is None and norm.weight_D is not None and len(residual) <= self._ops.max_fused_rows:
            return self._ops.gate_up_silu(residual.rows(), self._w, norm.weight_D, norm.eps)
        return self.normed(residual, norm)

    def add_to(self, residual: Residual, x_TK: torch.Tensor) -> None:
        if len(x_TK) <= self._ops.max_fused_rows:
            self._ops.linear_fused(x_TK, self._w, self._b_N, add_to_TN=residual.rows())
        else:
            self._add(residual, self._ops.rows(x_TK, self._w))

    def add_gated_to(self, residual: Residual, gate_up: torch.Tensor | DeferredNormGemm, eps: float) -> None:
        if isinstance(gate_up, torch.Tensor):
            self.add_to(residual, gate_up)
        elif len(residual) <= self._ops.max_fused_rows:
            self.add_to(residual, self._ops.silu_mul(gate_up, eps))
        else:
            self._add(residual, self._ops.gated(gate_up, eps, self._w))

    def _add(self, residual: Residual, rows: torch.Tensor | QuantizedRows) -> None:
        residual.rows()
        residual.leave(DeferredNormGemm(self._ops.linear(rows, self._w, residual.dtype), self._b_N))
