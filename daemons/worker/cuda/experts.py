"""The seam between a layer and the weights of its routed experts: a form of the weights is a kind of `Experts`.

Legend: T rows, D hidden size, E experts, F mlp size of an expert; P slots with room for X rows each. Weights are [out,
in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from radixmesh.daemons.worker.cuda.expert_parallel.row_share import WHOLE, RowShare
from radixmesh.daemons.worker.cuda.fp8.ops import Fp8Ops
from radixmesh.daemons.worker.cuda.ops import BesideMlp, Ops
from radixmesh.kernels.moe.grouped_gemm import SWIGLU, ExpertVariant, SlotRows
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts
from radixmesh.kernels.moe.route import Routes
from radixmesh.kernels.moe.row_experts import RowNorm, SharedWeights, fits_row_experts


class Experts(ABC):
    """All experts of a layer on the device. Work goes to the current stream and may be captured."""

    weighs_results: bool = True
    """Weights of picks multiply what experts give, not what they read."""

    share: RowShare = WHOLE
    """Rows of a step that this rank brings to them: all of them, unless others of its batch bring the rest."""

    @abstractmethod
    def add_to(
        self,
        residual_TD: torch.Tensor,
        x_TD: torch.Tensor,
        routes: Routes,
        num_expected: int | None = None,
        *,
        beside: BesideMlp | None = None,
    ) -> None:
        """Adds the weighted sum of what each row's experts make of x, and what an MLP beside them does, to the residual
        in place. num_expected: about how many picks are of these experts; None: all."""

    def sums(self, x_TD: torch.Tensor, routes: Routes, num_expected: int) -> torch.Tensor:
        """[T, D], contiguous: that sum alone, of rows of which about num_expected picks are of these experts."""
        raise AssertionError(f"{type(self).__name__} are not divided among ranks")

    def of_slots(self, rows: SlotRows) -> torch.Tensor:
        """[P, X, D], contiguous: what the expert of each slot makes of its rows; anything where no row is."""
        raise AssertionError(f"{type(self).__name__} are not divided among ranks")

    def bytes_of(self, slot: int) -> list[torch.Tensor]:
        """The weights of one expert as they lie in memory, uint8 views: an expert is replaced by writing to them."""
        raise AssertionError(f"{type(self).__name__} are not moved")


class PlainExperts(Experts):
    """Weights in the dtype of the rows; gate's rows are the first F of an expert's gate_up."""

    def __init__(
        self, ops: Ops, w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor, variant: ExpertVariant = SWIGLU
    ) -> None:
        self._ops, self._w_gate_up_E2FD, self._w_down_EDF = ops, w_gate_up_E2FD, w_down_EDF
        self._variant = variant
        self.weighs_results = not variant.scales_input

    def add_to(
        self,
        residual_TD: torch.Tensor,
        x_TD: torch.Tensor,
        routes: Routes,
        num_expected: int | None = None,
        *,
        beside: BesideMlp | None = None,
    ) -> None:
        weights = self._w_gate_up_E2FD, self._w_down_EDF
        self._ops.experts(
            x_TD,
            routes,
            *weights,
            self._variant,
            residual_TD=residual_TD,
            num_expected=num_expected,
            beside=beside,
        )

    def sums(self, x_TD: torch.Tensor, routes: Routes, num_expected: int) -> torch.Tensor:
        weights = self._w_gate_up_E2FD, self._w_down_EDF
        return self._ops.experts(x_TD, routes, *weights, self._variant, num_expected=num_expected)

    def of_slots(self, rows: SlotRows) -> torch.Tensor:
        return self._ops.slot_experts(rows, self._w_gate_up_E2FD, self._w_down_EDF, self._variant)

    def bytes_of(self, slot: int) -> list[torch.Tensor]:
        weights = [self._w_gate_up_E2FD[slot], self._w_down_EDF[slot]]
        biases = (self._variant.b_gate_up_E2F, self._variant.b_down_ED)
        return [_bytes(w) for w in (*weights, *(bias[slot] for bias in biases if bias is not None))]


class RowExperts:
    """Experts of a layer, and an MLP beside them, for steps of up to ops.max_fused_rows rows: behind the norm, and in
    two launches."""

    def __init__(
        self, ops: Ops, w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor, shared: SharedWeights | None
    ) -> None:
        self._ops, self._w_gate_up_E2FD, self._w_down_EDF, self._shared = ops, w_gate_up_E2FD, w_down_EDF, shared

    @classmethod
    def create(
        cls,
        ops: Ops,
        w_gate_up_E2FD: torch.Tensor,
        w_down_EDF: torch.Tensor,
        variant: ExpertVariant = SWIGLU,
        shared: SharedWeights | None = None,
    ) -> RowExperts | None:
        """None where no kernel computes such experts."""
        if not variant.is_swiglu:
            return None
        return cls(ops, w_gate_up_E2FD, w_down_EDF, shared) if fits_row_experts(w_down_EDF, shared) else None

    def add_to(self, residual_TD: torch.Tensor, norm: RowNorm, routes: Routes) -> None:
        """Adds what is made of RMSNorm(residual) to the residual in place."""
        self._ops.add_row_experts(residual_TD, norm, routes, self._w_gate_up_E2FD, self._w_down_EDF, self._shared)


class Fp8Experts(Experts):
    """Weights in FP8 with a scale a block of 128 x 128; rows are quantised as they come."""

    def __init__(self, ops: Fp8Ops, weights: QuantizedExperts) -> None:
        self._ops, self._weights = ops, weights

    def add_to(
        self,
        residual_TD: torch.Tensor,
        x_TD: torch.Tensor,
        routes: Routes,
        num_expected: int | None = None,
        *,
        beside: BesideMlp | None = None,
    ) -> None:
        assert beside is None, "an MLP beside FP8 experts is one of the projections"
        self._ops.experts(x_TD, routes, self._weights, residual_TD=residual_TD, num_expected=num_expected)

    def sums(self, x_TD: torch.Tensor, routes: Routes, num_expected: int) -> torch.Tensor:
        return self._ops.experts(x_TD, routes, self._weights, num_expected=num_expected)

    def of_slots(self, rows: SlotRows) -> torch.Tensor:
        return self._ops.slot_experts(rows, self._weights)

    def bytes_of(self, slot: int) -> list[torch.Tensor]:
        weights = self._weights
        data = (weights.w_gate_up_E2FD, weights.gate_up_scales_E2HG, weights.w_down_EDF, weights.down_scales_EGH)
        return [_bytes(w[slot]) for w in data]


def _bytes(weights: torch.Tensor) -> torch.Tensor:
    return weights.view(-1).view(torch.uint8)
