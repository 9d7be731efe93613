"""Puts the parts of a decoder together: config, weights, maths, checkpoint names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.quantization import features_in_unit
from radixmesh.daemons.worker.models.decoder.checkpoint import RoutedLayout, expert_sources, tensor_targets
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.model import DecoderModel
from radixmesh.daemons.worker.models.decoder.sharding import shard_decoder
from radixmesh.daemons.worker.models.decoder.weights import DecoderWeights
from radixmesh.daemons.worker.models.experts import place_experts
from radixmesh.daemons.worker.models.model import BuiltModel, KvHeads, ModelFamily, Placement


class DecoderFamily(ModelFamily):
    """`read_config` and `layout` are all that families of this shape differ in."""

    def __init__(
        self, read_config: Callable[[ConfigReader], DecoderConfig], layout: RoutedLayout | None = None
    ) -> None:
        self._read_config = read_config
        self._layout = layout or RoutedLayout()

    def build(self, config: ConfigReader, placement: Placement) -> BuiltModel:
        decoder = self._read_config(config)
        if placement.max_total_len is not None:
            decoder = decoder.for_length(placement.max_total_len)
        group = placement.group
        placed = None
        if placement.experts.size > 1:
            placed = place_experts(placement, 0 if decoder.experts is None else decoder.experts.num_experts)
        if group.size == 1 and placed is None:
            weights = DecoderWeights.empty(decoder, placement)
            return BuiltModel(DecoderModel(decoder, weights, placement), tensor_targets(decoder, weights, self._layout))
        block = features_in_unit(config)
        shard = shard_decoder(decoder, group.size, group.rank, block=block, layout=self._layout, placed=placed)
        weights = DecoderWeights.empty(shard.config, placement)
        targets = replace(tensor_targets(shard.config, weights, self._layout), slices=shard.slices)
        kv_heads = KvHeads(decoder.num_kv_heads, shard.kv_heads)
        sources = expert_sources(shard.config, weights, self._layout)
        return BuiltModel(DecoderModel(shard.config, weights, placement), targets, kv_heads, sources)
