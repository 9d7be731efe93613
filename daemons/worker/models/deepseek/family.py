"""Puts the parts of the family together: config, weights, maths, checkpoint names."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.quantization import features_in_unit
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.models.deepseek.checkpoint import (
    expert_sources,
    present_mtp_layers,
    tensor_targets,
)
from radixmesh.daemons.worker.models.deepseek.config import read_deepseek_config
from radixmesh.daemons.worker.models.deepseek.model import DeepseekModel
from radixmesh.daemons.worker.models.deepseek.sharding import shard_deepseek
from radixmesh.daemons.worker.models.deepseek.weights import DeepseekWeights
from radixmesh.daemons.worker.models.experts import place_experts
from radixmesh.daemons.worker.models.model import BuiltModel, ModelFamily, Placement

_log = get_logger(__name__)


class DeepseekFamily(ModelFamily):
    def build(self, config: ConfigReader, placement: Placement) -> BuiltModel:
        deepseek = read_deepseek_config(config)
        num_mtp_layers = 0
        if deepseek.num_mtp_layers:
            num_mtp_layers = present_mtp_layers(deepseek, index_tensors(config.file.parent))
            _log.info("mtp_layers", announced=deepseek.num_mtp_layers, present=num_mtp_layers)
        group = placement.group
        placed = None
        if placement.experts.size > 1:
            placed = place_experts(placement, 0 if deepseek.router is None else deepseek.router.num_experts)
        shard = shard_deepseek(deepseek, group.size, group.rank, block=features_in_unit(config), placed=placed)
        weights = DeepseekWeights.empty(shard.config, placement, num_mtp_layers=num_mtp_layers)
        targets = tensor_targets(shard.config, weights)
        if group.size > 1 or placed is not None:
            targets = replace(targets, slices=shard.slices)
        model = DeepseekModel(shard.config, weights, placement)
        return BuiltModel(model, targets, expert_sources=expert_sources(weights))
