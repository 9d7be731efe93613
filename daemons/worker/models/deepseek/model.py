"""The maths of DeepSeek-V2 and V3: blocks of latent attention and a dense or a mixture-of-experts MLP.

Legend: T rows (tokens of all segments, padded), D hidden size, H heads, C cached numbers of a token, h half of the
RoPE dims, F mlp size, V vocabulary.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.models.deepseek.attention import LatentAttention
from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig
from radixmesh.daemons.worker.models.deepseek.routing import DeepseekRouter
from radixmesh.daemons.worker.models.deepseek.weights import DeepseekLayer, DeepseekWeights, MlpWeights, MoeWeights
from radixmesh.daemons.worker.models.experts import RoutedExperts
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.models.model import Model, ModelBatch, Placement, RowInput, RowProbe
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.daemons.worker.models.row_maths import rms_norm, silu_gated
from radixmesh.daemons.worker.models.vocabulary import ShardedVocabulary
from radixmesh.daemons.worker.tiles import RowTiles, Tensors

PLANE = "latents"


class DeepseekModel(Model):
    shows_hidden = True

    def __init__(self, config: DeepseekConfig, weights: DeepseekWeights, placement: Placement) -> None:
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_total_len = config.max_total_len
        self.kv_layout = KvLayout(
            num_layers=config.num_layers,
            planes=(KvPlane(name=PLANE, row_shape=(1, config.latent_dim)),),
            is_whole=True,
        )
        self.attention_shape = AttentionShape(
            num_heads=config.num_heads, num_kv_heads=1, head_dim=config.latent_dim, scale=config.softmax_scale
        )
        self.mtp_layers = weights.mtp_layers
        self.config = config
        self.weights = weights
        self._rope = RopeTable(config.rope_dim, config.rope, placement.device)
        self._blocks = tuple(create_block(config, layer, placement) for layer in weights.layers)
        self._vocabulary = ShardedVocabulary(config.vocab_size, placement.group)

    def forward(self, batch: ModelBatch) -> torch.Tensor:
        x_TD = self._vocabulary.embed(batch.ids_T, self.weights.embedding_VD)
        cos_T1h, sin_T1h = self._rope.at(batch.positions_T)
        for index, block in enumerate(self._blocks):
            q_THC, kv_T1C = batch.tiles.map(block.attention.project, (x_TD, cos_T1h, sin_T1h))
            latents_S1C = batch.kv.tokens(PLANE, index)
            latents_S1C.index_copy_(0, batch.kv_slots_N, kv_T1C[: batch.num_rows])
            o_THC = batch.attention.attend(q_THC, latents_S1C, latents_S1C)
            x_TD = block.finish(x_TD, o_THC, batch)
            if batch.hidden is not None:
                batch.hidden.note(index, x_TD)
        return x_TD

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.embed(ids_T, self.weights.embedding_VD)

    def logits(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        (logits_TV,) = tiles.map(self._head, (hidden_TD,))
        return logits_TV

    def final_hidden(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        (final_TD,) = tiles.map(self._final, (hidden_TD,))
        return final_TD

    def row_probes(self) -> tuple[RowProbe, ...]:
        config, dtype = self.config, self.weights.head_DV.dtype
        hidden = RowInput((config.hidden_size,), dtype)
        angles = RowInput((1, config.rope_dim // 2), torch.float32)
        summed = RowInput((config.num_heads, config.latent_dim), dtype)
        return (
            *(RowProbe("project", block.attention.project, (hidden, angles, angles)) for block in self._blocks),
            *(probe for block in self._blocks for probe in block.row_probes(hidden, summed)),
            RowProbe("head", self._head, (hidden,)),
            RowProbe("final_norm", self._final, (hidden,)),
        )

    def routed_experts(self) -> tuple[RoutedExperts, ...]:
        return tuple(block.experts for block in self._blocks if isinstance(block, _MoeBlock))

    def _final(self, inputs: Tensors) -> Tensors:
        return (rms_norm(inputs[0], self.weights.final_norm_D, self.config.norm_eps).float(),)

    def _head(self, inputs: Tensors) -> Tensors:
        (x_TD,) = inputs
        x_TD = rms_norm(x_TD, self.weights.final_norm_D, self.config.norm_eps)
        return (self._vocabulary.gather(x_TD @ self.weights.head_DV).float(),)


class _DenseBlock:
    """One layer whose MLP computes every row with all of its weights."""

    def __init__(self, config: DeepseekConfig, layer: DeepseekLayer, mlp: MlpWeights, placement: Placement) -> None:
        self.attention = LatentAttention(config, layer.attention_norm_D, layer.attention, placement)
        self._norm_D = layer.mlp_norm_D
        self._eps = config.norm_eps
        self._mlp = mlp
        self._group = placement.group

    def finish(self, x_TD: torch.Tensor, o_THC: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        """Adds the attention's output and the MLP."""
        (x_TD,) = batch.tiles.map(self._finish, (x_TD, o_THC))
        return x_TD

    def row_probes(self, hidden: RowInput, summed: RowInput) -> list[RowProbe]:
        return [RowProbe("finish", self._finish, (hidden, summed))]

    def _finish(self, inputs: Tensors) -> Tensors:
        x_TD = inputs[0] + self.attention.output(inputs[1])
        return (x_TD + self._group.all_reduce(_mlp(rms_norm(x_TD, self._norm_D, self._eps), self._mlp)),)


class _MoeBlock:
    """One layer whose rows go through the experts that its router picks, and through the shared ones."""

    def __init__(self, config: DeepseekConfig, layer: DeepseekLayer, mlp: MoeWeights, placement: Placement) -> None:
        assert config.router is not None
        self.attention = LatentAttention(config, layer.attention_norm_D, layer.attention, placement)
        self._norm_D = layer.mlp_norm_D
        self._eps = config.norm_eps
        self._shared = mlp.shared
        self.experts = RoutedExperts(mlp.experts, DeepseekRouter(config.router, mlp), placement)
        self._group = placement.group

    def finish(self, x_TD: torch.Tensor, o_THC: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        """Adds the attention's output and the experts."""
        x_TD, normed_TD = batch.tiles.map(self._attended, (x_TD, o_THC))
        routed_TD = self.experts.compute(normed_TD, batch.num_rows, batch.tiles)
        (x_TD,) = batch.tiles.map(self._add_experts, (x_TD, normed_TD, routed_TD))
        return x_TD

    def row_probes(self, hidden: RowInput, summed: RowInput) -> list[RowProbe]:
        return [
            RowProbe("attended", self._attended, (hidden, summed)),
            *self.experts.row_probes(),
            RowProbe("add_experts", self._add_experts, (hidden, hidden, hidden)),
        ]

    def _attended(self, inputs: Tensors) -> Tensors:
        x_TD = inputs[0] + self.attention.output(inputs[1])
        return x_TD, rms_norm(x_TD, self._norm_D, self._eps)

    def _add_experts(self, inputs: Tensors) -> Tensors:
        x_TD, normed_TD, routed_TD = inputs
        if self._shared is not None:
            routed_TD = routed_TD + self._group.all_reduce(_mlp(normed_TD, self._shared))
        return (x_TD + routed_TD,)


def create_block(config: DeepseekConfig, layer: DeepseekLayer, placement: Placement) -> _DenseBlock | _MoeBlock:
    """The block that the layer's weights are for."""
    if isinstance(layer.mlp, MoeWeights):
        return _MoeBlock(config, layer, layer.mlp, placement)
    return _DenseBlock(config, layer, layer.mlp, placement)


def _mlp(x_TD: torch.Tensor, weights: MlpWeights) -> torch.Tensor:
    return silu_gated(x_TD @ weights.w_gate_up_DF2) @ weights.w_down_FD
