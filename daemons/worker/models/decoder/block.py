"""One layer of a decoder: attention, then an MLP or routed experts, each added to its input.

Legend: T rows, D hidden size, H heads, d head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch

from radixmesh.daemons.worker.models.decoder.attention import GroupedAttention
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.weights import DecoderLayer, MlpWeights, RoutedWeights
from radixmesh.daemons.worker.models.experts import RoutedExperts
from radixmesh.daemons.worker.models.model import ModelBatch, Placement, RowInput, RowProbe
from radixmesh.daemons.worker.models.row_maths import linear, plus, rms_norm, silu_gated
from radixmesh.daemons.worker.models.softmax_router import route_by_softmax
from radixmesh.daemons.worker.tiles import Tensors


class Block(ABC):
    """A layer, apart from the attention over the KV pool, which comes between `attention.project` and `finish`."""

    def __init__(self, config: DecoderConfig, layer: DecoderLayer, placement: Placement) -> None:
        self.attention = GroupedAttention(config, layer.attention, placement)
        self._config = config
        self._mlp_norm_D = layer.mlp_norm_D
        self._group = placement.group

    @abstractmethod
    def finish(self, x_TD: torch.Tensor, o_THd: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        """[T, D]: x with the attention's output o and what the MLP or the experts make of that added."""

    @abstractmethod
    def row_probes(self, hidden: RowInput, heads: RowInput) -> tuple[RowProbe, ...]:
        """Probes of all that `finish` gives to `RowTiles.map`; rows of x and o are like `hidden` and `heads`."""

    def _normed(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self._mlp_norm_D, self._config.norm_eps)


class DenseBlock(Block):
    """A block with a gated MLP."""

    def __init__(self, config: DecoderConfig, layer: DecoderLayer, mlp: MlpWeights, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        self._mlp = mlp

    def finish(self, x_TD: torch.Tensor, o_THd: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        (x_TD,) = batch.tiles.map(self._finish, (x_TD, o_THd))
        return x_TD

    def row_probes(self, hidden: RowInput, heads: RowInput) -> tuple[RowProbe, ...]:
        return (RowProbe("finish", self._finish, (hidden, heads)),)

    def _finish(self, inputs: Tensors) -> Tensors:
        x_TD, o_THd = inputs
        mlp = self._mlp
        x_TD = self.attention.add_output(x_TD, o_THd)
        gate_up_TF2 = linear(self._normed(x_TD), mlp.w_gate_up_DF2, mlp.b_gate_up_F2)
        down_TD = self._group.all_reduce(silu_gated(gate_up_TF2) @ mlp.w_down_FD)
        return (x_TD + plus(down_TD, mlp.b_down_D),)


class RoutedBlock(Block):
    """A block with routed experts."""

    def __init__(self, config: DecoderConfig, layer: DecoderLayer, routed: RoutedWeights, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        assert config.experts is not None
        router = partial(
            route_by_softmax,
            w_router_DE=routed.w_router_DE,
            num_picks=config.experts.num_picks,
            is_normalised=config.experts.is_normalised,
        )
        self._experts = RoutedExperts(routed.experts, router, placement)

    def finish(self, x_TD: torch.Tensor, o_THd: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        x_TD, normed_TD = batch.tiles.map(self._attended, (x_TD, o_THd))
        return x_TD + self._experts.compute(normed_TD, batch.num_rows, batch.tiles)

    def row_probes(self, hidden: RowInput, heads: RowInput) -> tuple[RowProbe, ...]:
        return (RowProbe("attended", self._attended, (hidden, heads)), *self._experts.row_probes())

    def _attended(self, inputs: Tensors) -> Tensors:
        """(x_TD, o_THd) -> x_TD with the attention's output added, and the same normed for the experts."""
        x_TD = self.attention.add_output(*inputs)
        return x_TD, self._normed(x_TD)


def create_block(config: DecoderConfig, layer: DecoderLayer, placement: Placement) -> Block:
    """The block that the layer's weights are for."""
    if isinstance(layer.mlp, RoutedWeights):
        return RoutedBlock(config, layer, layer.mlp, placement)
    return DenseBlock(config, layer, layer.mlp, placement)
