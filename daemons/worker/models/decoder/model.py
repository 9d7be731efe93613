"""The maths of a decoder: embedding, blocks, final norm, output projection.

Legend: T rows (tokens of all segments, padded), D hidden size, H heads, K kv heads, d head_dim, h = d / 2,
V vocabulary, O V or 1, S tokens of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.models.cached_attention import attend_cached
from radixmesh.daemons.worker.models.decoder.block import RoutedBlock, create_block
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.norms import create_norm
from radixmesh.daemons.worker.models.decoder.weights import DecoderWeights
from radixmesh.daemons.worker.models.experts import RoutedExperts
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.models.model import Model, ModelBatch, Placement, RowInput, RowProbe
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.daemons.worker.models.rope_config import LongRopeScaling, RopeConfig
from radixmesh.daemons.worker.models.row_maths import soft_capped
from radixmesh.daemons.worker.models.vocabulary import ShardedVocabulary
from radixmesh.daemons.worker.tiles import RowTiles, Tensors


class DecoderModel(Model):
    shows_hidden = True

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, placement: Placement) -> None:
        row_shape = (config.num_kv_heads, config.head_dim)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_total_len = config.max_total_len
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        keys = KvPlane(name="keys", row_shape=row_shape, form=_form_of_keys(ropes))
        self.kv_layout = KvLayout(
            num_layers=config.num_layers, planes=(keys, KvPlane(name="values", row_shape=row_shape))
        )
        self.attention_shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.scale,
            softcap=config.attention_softcap,
        )
        self.tasks = frozenset({Task.EMBED, Task.SCORE if config.is_scoring else Task.GENERATE})
        self.config = config
        self.weights = weights
        # A table for each RoPE that layers have, by its config.
        self._ropes = {rope: RopeTable(config.head_dim, rope, placement.device) for rope in ropes if rope is not None}
        self._layer_ropes = ropes
        self._blocks = tuple(create_block(config, *layer, placement) for layer in enumerate(weights.layers))
        self._final_norm = create_norm(config, weights.final_norm_D, weights.final_norm_bias_D)
        self._vocabulary = ShardedVocabulary(config.vocab_size, placement.group)

    def forward(self, batch: ModelBatch) -> torch.Tensor:
        x_TD = self._embed(batch.ids_T, batch.positions_T)
        angles = {rope: table.at(batch.positions_T) for rope, table in self._ropes.items()}
        temperature = _temperature(self.config, batch.positions_T)
        for index, (block, window) in enumerate(zip(self._blocks, self.config.windows, strict=True)):
            rope = self._layer_ropes[index]
            inputs = (x_TD, *temperature) if rope is None else (x_TD, *angles[rope])
            q_THd, k_TKd, v_TKd = batch.tiles.map(block.attention.project, inputs)
            sinks_H = self.weights.layers[index].attention.sinks_H
            chunk = None if self.config.chunks is None else self.config.chunks[index]
            o_THd = attend_cached(batch, index, q_THd, k_TKd, v_TKd, window=window, sinks_H=sinks_H, chunk=chunk)
            x_TD = block.finish(x_TD, o_THd, batch)
            if batch.hidden is not None:
                batch.hidden.note(index, x_TD)
        return x_TD

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.embed(ids_T, self.weights.embedding_VD)

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
        heads = RowInput((config.num_heads, config.head_dim), dtype)
        return (
            *(
                # Apart, as layers with other angles have other inputs.
                RowProbe(
                    f"project{_num_pairs(config, rope) or ''}", block.attention.project, _inputs(config, hidden, rope)
                )
                for block, rope in zip(self._blocks, self._layer_ropes, strict=True)
            ),
            *(probe for block in self._blocks for probe in block.row_probes(hidden, heads)),
            RowProbe("head", self._head, (hidden,)),
            RowProbe("final", self._final, (hidden,)),
        )

    def routed_experts(self) -> tuple[RoutedExperts, ...]:
        return tuple(block.experts for block in self._blocks if isinstance(block, RoutedBlock))

    def _embed(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        weights, scale = self.weights, self.config.embedding_scale
        x_TD = self._vocabulary.embed(ids_T, weights.embedding_VD)
        if scale != 1.0:
            # Rounded as the embedding is, which transformers does.
            x_TD = x_TD * torch.tensor(scale, dtype=x_TD.dtype)
        if weights.positions_PD is not None:
            x_TD = x_TD + functional.embedding(positions_T, weights.positions_PD)
        return x_TD

    def _head(self, inputs: Tensors) -> Tensors:
        config = self.config
        out_TO = self._final_norm(inputs[0]) @ self.weights.head_DO
        # The head of a model that scores has one feature, which every rank computes.
        out_TO = (out_TO if config.is_scoring else self._vocabulary.gather(out_TO)).float()
        if config.logits_divisor != 1.0:
            out_TO = out_TO / config.logits_divisor
        return (out_TO if config.logit_softcap is None else soft_capped(out_TO, config.logit_softcap),)

    def _final(self, inputs: Tensors) -> Tensors:
        return (self._final_norm(inputs[0]).float(),)


def _form_of_keys(ropes: Sequence[RopeConfig | None]) -> str:
    """The list of factors that LongRoPE took for this worker's lengths; empty: keys follow from the weights alone."""
    scalings = [rope.scaling for rope in ropes if rope is not None]
    longest = [scaling for scaling in scalings if isinstance(scaling, LongRopeScaling)]
    return "" if not longest else "~longrope-long" if longest[0].is_long else "~longrope-short"


def _temperature(config: DecoderConfig, positions_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float32 [T, 1, 1] for layers without RoPE, or nothing."""
    tuning = config.query_temperature
    if tuning is None:
        return ()
    steps_T = torch.floor((positions_T.float() + 1.0) / tuning.floor_scale)
    return ((torch.log1p(steps_T) * tuning.scale + 1.0)[:, None, None],)


def _num_pairs(config: DecoderConfig, rope: RopeConfig | None) -> int:
    return 0 if rope is None else (rope.rotary_dim or config.head_dim) // 2


def _inputs(config: DecoderConfig, hidden: RowInput, rope: RopeConfig | None) -> tuple[RowInput, ...]:
    """Of `GroupedAttention.project` in a layer with that RoPE."""
    if rope is None:
        has_temperature = config.query_temperature is not None
        return (hidden, RowInput((1, 1), torch.float32)) if has_temperature else (hidden,)
    angles = RowInput((1, _num_pairs(config, rope)), torch.float32)
    return (hidden, angles, angles)
