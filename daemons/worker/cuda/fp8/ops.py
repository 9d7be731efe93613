"""The seam between the maths of a decoder with FP8 weights and what computes it: fused kernels, or plain torch.

The matrix decides the form of the rows: a matrix in the model's dtype takes rows in that dtype.

Legend: T rows, D hidden size, N features out, K features in, F mlp size. Weights are [out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from radixmesh.daemons.worker.cuda.fp8.gemm import Fp8Gemm, TorchFp8Gemm
from radixmesh.daemons.worker.cuda.fp8.weights import Matrix
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.fp8.gemv import fp8_gate_up_silu, fp8_gemv
from radixmesh.kernels.fp8.quantize_rows import norm_quantize, norm_quantize_reference, quantize_rows
from radixmesh.kernels.fp8.quantized import QuantizedMatrix, QuantizedRows, quantize_rows_reference
from radixmesh.kernels.fp8.silu_quantize import silu_quantize, silu_quantize_reference
from radixmesh.kernels.moe.fp8_grouped_gemm import (
    default_fp8_config,
    fp8_routed_experts,
    fp8_routed_experts_reference,
    fp8_slot_experts,
    fp8_slot_experts_reference,
)
from radixmesh.kernels.moe.grouped_gemm import SlotRows
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts
from radixmesh.kernels.moe.route import Routes

Rows = torch.Tensor | QuantizedRows
"""[T, K] in the form that the GEMM takes."""


class Fp8Ops(ABC):
    """plain: operations in the model's dtype and everything that is not a GEMM. gemm: backend for FP8 rows."""

    def __init__(self, plain: Ops, gemm: Fp8Gemm) -> None:
        self._plain = plain
        self.gemm = gemm

    @property
    def max_fused_rows(self) -> int:
        """Largest number of rows for which `linear_fused` and `gate_up_silu` are used."""
        return self._plain.max_fused_rows

    def rows(self, x_TK: torch.Tensor, w: Matrix) -> Rows:
        """x for a GEMM with w."""
        return self._quantized(x_TK, w.is_grouped) if isinstance(w, QuantizedMatrix) else x_TK

    def normed(
        self, x_TD: torch.Tensor, added: DeferredNormGemm | None, norm_D: torch.Tensor, eps: float, w: Matrix
    ) -> Rows:
        """x normed, for a GEMM with w. First `added` is added to x in place."""
        if isinstance(w, QuantizedMatrix):
            return self._normed(x_TD, added, norm_D, eps, w.is_grouped)
        if added is not None:
            add_gemm(x_TD, added)
        return self._plain.rms_norm(x_TD, norm_D, eps)

    def gated(self, gate_up: DeferredNormGemm, eps: float, w: Matrix) -> Rows:
        """silu(gate) x up, for a GEMM with w."""
        if isinstance(w, QuantizedMatrix):
            return self._gated(gate_up, w.is_grouped)
        return self.silu_mul(gate_up, eps)

    def silu_mul(self, gate_up: DeferredNormGemm, eps: float) -> torch.Tensor:
        """silu(gate) x up in the model's dtype."""
        return self._plain.silu_mul(gate_up, eps)

    def linear(self, rows: Rows, w: Matrix, dtype: torch.dtype) -> torch.Tensor:
        """[T, N]."""
        if isinstance(w, QuantizedMatrix):
            assert isinstance(rows, QuantizedRows), type(rows)
            return self.gemm.linear(rows, w, dtype)
        assert isinstance(rows, torch.Tensor), type(rows)
        return self._plain.linear(rows, w)

    def linear_fused(
        self,
        x_TK: torch.Tensor,
        w: Matrix,
        b_N: torch.Tensor | None = None,
        *,
        add_to_TN: torch.Tensor | None = None,
        norm_K: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """As Ops.linear_fused; rows stay in their dtype."""
        if isinstance(w, QuantizedMatrix):
            return self._linear_fused(x_TK, w, b_N, add_to_TN, norm_K, eps)
        return self._plain.linear_fused(x_TK, w, b_N, add_to_TN=add_to_TN, norm_K=norm_K, eps=eps)

    def gate_up_silu(self, x_TD: torch.Tensor, w: Matrix, norm_D: torch.Tensor, eps: float) -> torch.Tensor:
        """As Ops.gate_up_silu; rows stay in their dtype."""
        if isinstance(w, QuantizedMatrix):
            return self._gate_up_silu(x_TD, w, norm_D, eps)
        return self._plain.gate_up_silu(x_TD, w, norm_D, eps)

    def experts(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        experts: QuantizedExperts,
        *,
        residual_TD: torch.Tensor | None = None,
        num_expected: int | None = None,
    ) -> torch.Tensor:
        """As Ops.experts; x and what the gate makes of it are quantised in groups of 128."""
        out_TD = self._experts(x_TD, routes, experts, residual_TD, num_expected)
        self._plain.gemm.changed()
        return out_TD

    def slot_experts(self, rows: SlotRows, experts: QuantizedExperts) -> torch.Tensor:
        """As Ops.slot_experts."""
        results_PXD = self._slot_experts(rows, experts)
        self._plain.gemm.changed()
        return results_PXD

    @abstractmethod
    def _experts(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        experts: QuantizedExperts,
        residual_TD: torch.Tensor | None,
        num_expected: int | None,
    ) -> torch.Tensor: ...

    @abstractmethod
    def _slot_experts(self, rows: SlotRows, experts: QuantizedExperts) -> torch.Tensor: ...

    @abstractmethod
    def _quantized(self, x_TK: torch.Tensor, is_grouped: bool) -> QuantizedRows: ...

    @abstractmethod
    def _normed(
        self, x_TD: torch.Tensor, added: DeferredNormGemm | None, norm_D: torch.Tensor, eps: float, is_grouped: bool
    ) -> QuantizedRows: ...

    @abstractmethod
    def _gated(self, gate_up: DeferredNormGemm, is_grouped: bool) -> QuantizedRows: ...

    def _linear_fused(
        self,
        x_TK: torch.Tensor,
        w: QuantizedMatrix,
        b_N: torch.Tensor | None,
        add_to_TN: torch.Tensor | None,
        norm_K: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        raise AssertionError("no fused GEMMs here")

    def _gate_up_silu(self, x_TD: torch.Tensor, w: QuantizedMatrix, norm_D: torch.Tensor, eps: float) -> torch.Tensor:
        raise AssertionError("no fused GEMMs here")


class TorchFp8Ops(Fp8Ops):
    """The references of the kernels."""

    def __init__(self, plain: Ops) -> None:
        super().__init__(plain, TorchFp8Gemm())

    def _experts(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        experts: QuantizedExperts,
        residual_TD: torch.Tensor | None,
        num_expected: int | None,
    ) -> torch.Tensor:
        out_TD = fp8_routed_experts_reference(x_TD, routes, experts, residual_TD)
        return out_TD if residual_TD is None else residual_TD.copy_(out_TD)

    def _slot_experts(self, rows: SlotRows, experts: QuantizedExperts) -> torch.Tensor:
        return fp8_slot_experts_reference(rows, experts)

    def _quantized(self, x_TK: torch.Tensor, is_grouped: bool) -> QuantizedRows:
        return quantize_rows_reference(x_TK, is_grouped=is_grouped)

    def _normed(
        self, x_TD: torch.Tensor, added: DeferredNormGemm | None, norm_D: torch.Tensor, eps: float, is_grouped: bool
    ) -> QuantizedRows:
        delta_TD, bias_D = (None, None) if added is None else (added.out_TN, added.bias_N)
        return norm_quantize_reference(x_TD, norm_D, eps, delta_TD=delta_TD, bias_D=bias_D, is_grouped=is_grouped)

    def _gated(self, gate_up: DeferredNormGemm, is_grouped: bool) -> QuantizedRows:
        return silu_quantize_reference(gate_up.out_TN, bias_2F=gate_up.bias_N, is_grouped=is_grouped)


class TritonFp8Ops(Fp8Ops):
    """The project's kernels. use_pdl, is_deterministic: as for TritonOps."""

    def __init__(self, plain: Ops, gemm: Fp8Gemm, *, use_pdl: bool = False, is_deterministic: bool = False) -> None:
        super().__init__(plain, gemm)
        self._use_pdl = use_pdl
        # One configuration for any number of rows, so that a row's sums are the same beside any others.
        self._experts_config = default_fp8_config(1, 1) if is_deterministic else None

    def _experts(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        experts: QuantizedExperts,
        residual_TD: torch.Tensor | None,
        num_expected: int | None,
    ) -> torch.Tensor:
        return fp8_routed_experts(
            x_TD,
            routes,
            experts,
            residual_TD=residual_TD,
            out=residual_TD,
            config=self._experts_config,
            num_expected=num_expected,
            use_pdl=self._use_pdl,
        )

    def _slot_experts(self, rows: SlotRows, experts: QuantizedExperts) -> torch.Tensor:
        return fp8_slot_experts(rows, experts, config=self._experts_config, use_pdl=self._use_pdl)

    def _quantized(self, x_TK: torch.Tensor, is_grouped: bool) -> QuantizedRows:
        return quantize_rows(x_TK, is_grouped=is_grouped, use_pdl=self._use_pdl)

    def _normed(
        self, x_TD: torch.Tensor, added: DeferredNormGemm | None, norm_D: torch.Tensor, eps: float, is_grouped: bool
    ) -> QuantizedRows:
        delta_TD, bias_D = (None, None) if added is None else (added.out_TN, added.bias_N)
        return norm_quantize(
            x_TD,
            norm_D,
            eps,
            delta_TD=delta_TD,
            bias_D=bias_D,
            is_grouped=is_grouped,
            use_pdl=self._use_pdl,
        )

    def _gated(self, gate_up: DeferredNormGemm, is_grouped: bool) -> QuantizedRows:
        return silu_quantize(gate_up.out_TN, bias_2F=gate_up.bias_N, is_grouped=is_grouped, use_pdl=self._use_pdl)

    def _linear_fused(
        self,
        x_TK: torch.Tensor,
        w: QuantizedMatrix,
        b_N: torch.Tensor | None,
        add_to_TN: torch.Tensor | None,
        norm_K: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        return fp8_gemv(x_TK, w, b_N, add_to_TN, norm_K, eps, out=add_to_TN, use_pdl=self._use_pdl)

    def _gate_up_silu(self, x_TD: torch.Tensor, w: QuantizedMatrix, norm_D: torch.Tensor, eps: float) -> torch.Tensor:
        return fp8_gate_up_silu(x_TD, w, norm_D, eps, use_pdl=self._use_pdl)


def add_gemm(x_TD: torch.Tensor, gemm: DeferredNormGemm) -> None:
    """Adds a GEMM of normed rows, with its bias, to x in place."""
    assert gemm.norm_input_TD is None
    x_TD += gemm.out_TN
    if gemm.bias_N is not None:
        x_TD += gemm.bias_N
