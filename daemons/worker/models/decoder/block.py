"""One layer of a decoder: attention and an MLP or routed experts, each added to the residual.

Legend: T rows, D hidden size, H heads, d head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch

from radixmesh.daemons.worker.models.activations import ACTIVATIONS
from radixmesh.daemons.worker.models.decoder.attention import GroupedAttention
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, ExpertsConfig, RouterKind
from radixmesh.daemons.worker.models.decoder.norms import create_norm
from radixmesh.daemons.worker.models.decoder.weights import DecoderLayer, MlpWeights, RoutedWeights
from radixmesh.daemons.worker.models.experts import RoutedExperts, Router
from radixmesh.daemons.worker.models.model import ModelBatch, Placement, RowInput, RowProbe
from radixmesh.daemons.worker.models.row_maths import clamped_gated, gated, linear, plus
from radixmesh.daemons.worker.models.softmax_router import route_by_picked_softmax, route_by_sigmoid, route_by_softmax
from radixmesh.daemons.worker.tiles import Tensors


class Block(ABC):
    """A layer, apart from the attention over the KV pool, which comes between `attention.project` and `finish`."""

    def __init__(self, config: DecoderConfig, index: int, layer: DecoderLayer, placement: Placement) -> None:
        self.attention = GroupedAttention(config, index, layer.attention, placement)
        self._config = config
        self._mlp_norm = create_norm(config, layer.mlp_norm_D, layer.mlp_norm_bias_D)
        self._mlp_output_norm = create_norm(config, layer.mlp_output_norm_D)
        self._group = placement.group

    @abstractmethod
    def finish(self, x_TD: torch.Tensor, o_THd: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        """[T, D]: x with the attention's output o and what the MLP or the experts make of that added."""

    @abstractmethod
    def row_probes(self, hidden: RowInput, heads: RowInput) -> tuple[RowProbe, ...]:
        """Probes of all that `finish` gives to `RowTiles.map`; rows of x and o are like `hidden` and `heads`."""

    def _attend(self, x_TD: torch.Tensor, o_THd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x with the attention's output added, and the normed rows that the MLP or the experts read."""
        attended_TD = self._plus(x_TD, self.attention.output(o_THd))
        return attended_TD, self._mlp_norm(x_TD if self._config.is_parallel else attended_TD)

    def _run_mlp(self, mlp: MlpWeights, normed_TD: torch.Tensor) -> torch.Tensor:
        act = ACTIVATIONS[self._config.activation]
        up_TF = linear(normed_TD, mlp.w_gate_up_DF2, mlp.b_gate_up_F2)
        if self._config.is_gated:
            gate_TF, up_TF = up_TF.chunk(2, dim=-1)
            up_TF = act(gate_TF) * up_TF
        else:
            up_TF = act(up_TF)
        return plus(self._group.all_reduce(up_TF @ mlp.w_down_FD), mlp.b_down_D)

    def _plus(self, x_TD: torch.Tensor, added_TD: torch.Tensor) -> torch.Tensor:
        scale = self._config.residual_scale
        return x_TD + (added_TD if scale == 1.0 else added_TD * scale)


class DenseBlock(Block):
    """A block with an MLP."""

    def __init__(
        self, config: DecoderConfig, index: int, layer: DecoderLayer, mlp: MlpWeights, placement: Placement
    ) -> None:
        super().__init__(config, index, layer, placement)
        self._mlp = mlp

    def finish(self, x_TD: torch.Tensor, o_THd: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        (x_TD,) = batch.tiles.map(self._finish, (x_TD, o_THd))
        return x_TD

    def row_probes(self, hidden: RowInput, heads: RowInput) -> tuple[RowProbe, ...]:
        return (RowProbe("finish", self._finish, (hidden, heads)),)

    def _finish(self, inputs: Tensors) -> Tensors:
        x_TD, normed_TD = self._attend(*inputs)
        return (self._plus(x_TD, self._mlp_output_norm(self._run_mlp(self._mlp, normed_TD))),)


class RoutedBlock(Block):
    """A block with routed experts."""

    def __init__(
        self, config: DecoderConfig, index: int, layer: DecoderLayer, routed: RoutedWeights, placement: Placement
    ) -> None:
        super().__init__(config, index, layer, placement)
        assert config.experts is not None
        assert not config.has_output_norms, "norms behind experts"
        experts = config.experts
        expert_gate = partial(gated, activation=ACTIVATIONS[config.activation])
        if experts.swiglu_limit is not None:
            expert_gate = partial(clamped_gated, limit=experts.swiglu_limit, alpha=experts.swiglu_alpha)
        self._routed = routed
        self.experts = RoutedExperts(
            routed.experts,
            _create_router(experts, routed),
            placement,
            gated=expert_gate,
            scales_input=experts.router is RouterKind.SIGMOID,
        )

    def finish(self, x_TD: torch.Tensor, o_THd: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        x_TD, normed_TD = batch.tiles.map(self._attended, (x_TD, o_THd))
        return self._plus(x_TD, self.experts.compute(normed_TD, batch.num_rows, batch.tiles))

    def row_probes(self, hidden: RowInput, heads: RowInput) -> tuple[RowProbe, ...]:
        return (RowProbe("attended", self._attended, (hidden, heads)), *self.experts.row_probes())

    def _attended(self, inputs: Tensors) -> Tensors:
        """(x_TD, o_THd) -> x_TD with the outputs of attention and shared MLP added, and normed rows for the experts."""
        x_TD, normed_TD = self._attend(*inputs)
        routed = self._routed
        if routed.shared is not None:
            shared_TD = self._run_mlp(routed.shared, normed_TD)
            if routed.w_shared_gate_D1 is not None:
                shared_TD = torch.sigmoid(normed_TD @ routed.w_shared_gate_D1) * shared_TD
            x_TD = self._plus(x_TD, shared_TD)
        return x_TD, normed_TD


def _create_router(config: ExpertsConfig, routed: RoutedWeights) -> Router:
    w_router_DE, num_picks = routed.w_router_DE, config.num_picks
    if config.router is RouterKind.SIGMOID:
        return partial(route_by_sigmoid, w_router_DE=w_router_DE, num_picks=num_picks)
    if config.router is RouterKind.PICKED_SOFTMAX:
        return partial(
            route_by_picked_softmax, w_router_DE=w_router_DE, b_router_E=routed.b_router_E, num_picks=num_picks
        )
    return partial(route_by_softmax, w_router_DE=w_router_DE, num_picks=num_picks, is_normalised=config.is_normalised)


def create_block(config: DecoderConfig, index: int, layer: DecoderLayer, placement: Placement) -> Block:
    """The block that the layer's weights are for."""
    if isinstance(layer.mlp, RoutedWeights):
        return RoutedBlock(config, index, layer, layer.mlp, placement)
    return DenseBlock(config, index, layer, layer.mlp, placement)
