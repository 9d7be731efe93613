"""The maths of a decoder: embedding, blocks, final norm, output projection.

Legend: T rows (tokens of all segments, padded), D hidden size, H heads, K kv heads, d head_dim, h = d / 2,
V vocabulary, O V or 1, S tokens of the pool.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.models.decoder.block import create_block
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.weights import DecoderWeights
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.models.model import Model, ModelBatch, Placement, RowInput, RowProbe
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.daemons.worker.models.row_maths import rms_norm
from radixmesh.daemons.worker.tiles import RowTiles, Tensors


class DecoderModel(Model):
    def __init__(self, config: DecoderConfig, weights: DecoderWeights, placement: Placement) -> None:
        row_shape = (config.num_kv_heads, config.head_dim)
        self.vocab_size = config.vocab_size
        self.max_total_len = config.max_total_len
        self.kv_layout = KvLayout(
            num_layers=config.num_layers,
            planes=(KvPlane(name="keys", row_shape=row_shape), KvPlane(name="values", row_shape=row_shape)),
        )
        self.attention_shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self.tasks = frozenset({Task.EMBED, Task.SCORE if config.is_scoring else Task.GENERATE})
        self.config = config
        self.weights = weights
        self._rope = RopeTable(config.head_dim, config.rope, placement.device)
        self._blocks = tuple(create_block(config, layer, placement) for layer in weights.layers)
        self._group = placement.group

    def forward(self, batch: ModelBatch) -> torch.Tensor:
        x_TD = functional.embedding(batch.ids_T, self.weights.embedding_VD)
        cos_T1h, sin_T1h = self._rope.at(batch.positions_T)
        for index, (block, window) in enumerate(zip(self._blocks, self.config.windows, strict=True)):
            q_THd, k_TKd, v_TKd = batch.tiles.map(block.attention.project, (x_TD, cos_T1h, sin_T1h))
            keys_SKd, values_SKd = batch.kv.tokens("keys", index), batch.kv.tokens("values", index)
            keys_SKd.index_copy_(0, batch.kv_slots_N, k_TKd[: batch.num_rows])
            values_SKd.index_copy_(0, batch.kv_slots_N, v_TKd[: batch.num_rows])
            o_THd = batch.attention.attend(q_THd, keys_SKd, values_SKd, window)
            x_TD = block.finish(x_TD, o_THd, batch)
        return x_TD

    def logits(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        assert not self.config.is_scoring, "a model that scores has no logits of tokens"
        (logits_TV,) = tiles.map(self._head, (hidden_TD,))
        return logits_TV

    def scores(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        assert self.config.is_scoring, "a model that generates has no scores"
        (scores_T1,) = tiles.map(self._head, (hidden_TD,))
        return scores_T1[:, 0]

    def final_hidden(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        (final_TD,) = tiles.map(self._final, (hidden_TD,))
        return final_TD

    def row_probes(self) -> tuple[RowProbe, ...]:
        config, dtype = self.config, self.weights.head_DO.dtype
        hidden = RowInput((config.hidden_size,), dtype)
        angles = RowInput((1, config.head_dim // 2), torch.float32)
        heads = RowInput((config.num_heads, config.head_dim), dtype)
        return (
            *(RowProbe("project", block.attention.project, (hidden, angles, angles)) for block in self._blocks),
            *(probe for block in self._blocks for probe in block.row_probes(hidden, heads)),
            RowProbe("head", self._head, (hidden,)),
            RowProbe("final", self._final, (hidden,)),
        )

    def _head(self, inputs: Tensors) -> Tensors:
        return (self._group.all_gather(self._normed(inputs[0]) @ self.weights.head_DO).float(),)

    def _final(self, inputs: Tensors) -> Tensors:
        return (self._normed(inputs[0]).float(),)

    def _normed(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self.weights.final_norm_D, self.config.norm_eps)
