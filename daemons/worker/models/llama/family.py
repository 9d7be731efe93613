"""Puts the parts of the family together: config, weights, maths, checkpoint names."""

from __future__ import annotations

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.model import BuiltModel, ModelFamily, Placement

from .checkpoint import tensor_targets
from .config import read_llama_config
from .model import LlamaModel
from .weights import LlamaWeights


class LlamaFamily(ModelFamily):
    def build(self, config: ConfigReader, placement: Placement) -> BuiltModel:
        llama = read_llama_config(config)
        # Sharding is a later file beside this one; a group of more ranks must not compute something else meanwhile.
        assert placement.group.size == 1, f"weights are not sharded yet: {placement.group.size} ranks"
        weights = LlamaWeights.empty(llama, placement)
        return BuiltModel(LlamaModel(llama, weights, placement), tensor_targets(llama, weights))
