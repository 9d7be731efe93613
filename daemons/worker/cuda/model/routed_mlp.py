"""Routed experts in the place of a layer's MLP, from the residual to the residual.

Legend: T rows, D hidden size, E experts. Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DispatchedExperts
from radixmesh.daemons.worker.cuda.experts import Experts, RowExperts
from radixmesh.daemons.worker.cuda.linear import Linear, Residual
from radixmesh.daemons.worker.cuda.model.mlp import Mlp
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.models.activations import SILU
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, ExpertsConfig, RouterKind
from radixmesh.daemons.worker.models.experts import ExpertWeights
from radixmesh.kernels.moe.grouped_gemm import ExpertVariant
from radixmesh.kernels.moe.route import RouterRule, Routes
from radixmesh.kernels.moe.row_experts import RowNorm, SharedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An MLP that every row goes through beside its experts. w_gate_1D: its result is multiplied by the sigmoid of this
    projection of the row; None: it is not. weights: of both projections, where they may be computed beside the experts
    and added by them."""

    gate_up: Linear
    down: Linear
    w_gate_1D: torch.Tensor | None
    weights: SharedWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMlp(Mlp):
    """A row's experts are picked, grouped and computed on the device: captured in graphs as any other part.

    w_router_ED: in float32 beside rows of another dtype the logits are float32. b_router_E: added for the choice alone.
    b_logits_E: added to the logits. row_experts: experts, with the shared one, for steps of very few rows; None: such
    steps are computed as others are. group: ranks that have a part of the width of each expert, and of the shared one;
    None: all of it is here.
    """

    norm_D: torch.Tensor
    eps: float
    w_router_ED: torch.Tensor
    rule: RouterRule
    experts: Experts
    shared: SharedExpert | None
    ops: Ops
    b_router_E: torch.Tensor | None = None
    b_logits_E: torch.Tensor | None = None
    row_experts: RowExperts | None = None
    group: DeviceGroup | None = None

    def run(self, residual: Residual, source_TD: torch.Tensor | None = None) -> None:
        assert source_TD is None, "no family has experts beside its attention"
        ops, rows_TD = self.ops, residual.rows()
        if self.row_experts is not None and len(rows_TD) <= ops.max_fused_rows:
            self._run_rows(self.row_experts, rows_TD)
            return
        if self.group is not None and isinstance(self.experts, DispatchedExperts) and self.experts.travels:
            # The shared expert computes while rows are under way.
            for _ in self.stages(residual):
                pass
            return
        normed_TD = ops.rms_norm(rows_TD, self.norm_D, self.eps)
        own = self.experts.share.of(len(rows_TD))
        own_TD = normed_TD[own]
        beside = None
        if self.shared is not None and self.shared.weights is not None:
            # From here on: the choice of the experts leaves most of the device idle.
            beside = ops.start_mlp(normed_TD, self.shared.weights)
        routes, part = self._routes(own_TD), self._part(residual)
        if self.shared is not None and beside is None:
            self._add_shared(self.shared, part, normed_TD)
        part_TD = rows_TD if self.group is None else part.rows()
        self.experts.add_to(part_TD[own], own_TD, routes, beside=beside)
        self._reduce(part_TD, rows_TD)

    def stages(self, residual: Residual) -> Iterator[None]:
        assert isinstance(self.experts, DispatchedExperts) and self.experts.travels, "no rows travel"
        rows_TD = residual.rows()
        normed_TD = self.ops.rms_norm(rows_TD, self.norm_D, self.eps)
        own = self.experts.share.of(len(rows_TD))
        own_TD = normed_TD[own]
        came = self.experts.send(own_TD, self._routes(own_TD))
        part = self._part(residual)
        if self.shared is not None:
            self._add_shared(self.shared, part, normed_TD)
        yield
        add_to = self.experts.compute(came())
        yield
        part_TD = rows_TD if self.group is None else part.rows()
        add_to(part_TD[own])
        self._reduce(part_TD, rows_TD)

    def _routes(self, normed_TD: torch.Tensor) -> Routes:
        """Experts of normed rows, of which there may be none."""
        ops = self.ops
        if not len(normed_TD):
            weights_TA = normed_TD.new_empty(0, self.rule.num_picks, dtype=torch.float32)
            return Routes(weights_TA.int(), weights_TA)
        return self._route((ops.router_logits if self._is_exact else ops.linear)(normed_TD, self.w_router_ED))

    def _part(self, residual: Residual) -> Residual:
        """Takes what this rank adds: the residual itself, or, where other ranks have parts too, zeros."""
        return residual if self.group is None else Residual(torch.zeros_like(residual.rows()))

    def _reduce(self, part_TD: torch.Tensor, rows_TD: torch.Tensor) -> None:
        """Adds to the rows all that the ranks have a part of, at once."""
        if self.group is not None:
            self.group.add_reduced(part_TD, rows_TD)
            self.ops.gemm.changed()

    def _run_rows(self, experts: RowExperts, rows_TD: torch.Tensor) -> None:
        """The norm is part of each kernel that reads the rows."""
        ops, norm = self.ops, RowNorm(self.norm_D, self.eps)
        if self._is_exact:
            logits = ops.router_logits(rows_TD, self.w_router_ED, norm)
        else:
            logits = ops.linear_fused(rows_TD, self.w_router_ED, norm_K=self.norm_D, eps=self.eps)
        experts.add_to(rows_TD, norm, self._route(logits))

    def _route(self, logits: torch.Tensor) -> Routes:
        """logits: [T, E], or parts of them [P, T, E]."""
        if self.b_logits_E is not None:
            logits_TE = logits if logits.dim() == 2 else logits[0]
            logits_TE += self.b_logits_E
        return self.ops.route(logits, self.rule, self.b_router_E)

    @property
    def _is_exact(self) -> bool:
        return self.w_router_ED.dtype != self.norm_D.dtype

    def _add_shared(self, shared: SharedExpert, residual: Residual, normed_TD: torch.Tensor) -> None:
        gate_up = shared.gate_up.multiplied(normed_TD)
        if shared.w_gate_1D is None:
            shared.down.add_gated_to(residual, gate_up, self.eps)
            return
        result_TD = shared.down.multiplied(self.ops.silu_mul(gate_up, self.eps)).out_TN
        result_TD *= torch.sigmoid(self.ops.linear(normed_TD, shared.w_gate_1D))
        rows_TD = residual.rows()
        rows_TD += result_TD


def shared_out(mlps: Iterable[Mlp]) -> tuple[DispatchedExperts, ...]:
    """The experts of these layers that are divided among ranks."""
    experts = (mlp.experts for mlp in mlps if isinstance(mlp, RoutedMlp))
    return tuple(of_layer for of_layer in experts if isinstance(of_layer, DispatchedExperts))


def rule_of(experts: ExpertsConfig) -> RouterRule:
    """A softmax over the picks alone is the softmax over all experts, divided by the sum of the picks."""
    is_normalised = experts.is_normalised or experts.router is RouterKind.PICKED_SOFTMAX
    is_sigmoid = experts.router is RouterKind.SIGMOID
    return RouterRule(num_picks=experts.num_picks, is_normalised=is_normalised, is_sigmoid=is_sigmoid)


def variant_of(experts: ExpertsConfig, weights: ExpertWeights) -> ExpertVariant:
    """Maths of the experts as the kernels take them."""
    return ExpertVariant(
        b_gate_up_E2F=weights.b_gate_up_EF2,
        b_down_ED=weights.b_down_ED,
        swiglu_limit=experts.swiglu_limit,
        swiglu_alpha=experts.swiglu_alpha,
        scales_input=experts.router is RouterKind.SIGMOID,
    )


def missing_of_experts(config: DecoderConfig, *, is_quantized: bool) -> dict[str, bool]:
    """Features of routed experts that only the CPU backend computes, and whether the model has them."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "FP8 weights of routed experts": is_quantized,
        "FP8 experts with biases, clamps or scaled input": is_quantized
        and (experts.has_bias or experts.swiglu_limit is not None or experts.router is RouterKind.SIGMOID),
        "experts with biases beside them": config.has_mlp_bias,
        f"routed experts with {config.activation}": config.activation not in SILU and experts.swiglu_limit is None,
    }
