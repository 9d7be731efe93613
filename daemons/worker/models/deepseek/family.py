"""Puts the parts of the family together: config, weights, maths, checkpoint names."""

from __future__ import annotations

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.models.deepseek.checkpoint import present_mtp_layers, tensor_targets
from radixmesh.daemons.worker.models.deepseek.config import read_deepseek_config
from radixmesh.daemons.worker.models.deepseek.model import DeepseekModel
from radixmesh.daemons.worker.models.deepseek.weights import DeepseekWeights
from radixmesh.daemons.worker.models.model import BuiltModel, ModelFamily, Placement

_log = get_logger(__name__)


class DeepseekFamily(ModelFamily):
    def build(self, config: ConfigReader, placement: Placement) -> BuiltModel:
        deepseek = read_deepseek_config(config)
        # Sharding is a later file beside this one; a group of more ranks must not compute something else meanwhile.
        assert placement.group.size == 1, f"weights are not sharded yet: {placement.group.size} ranks"
        num_mtp_layers = 0
        if deepseek.num_mtp_layers:
            num_mtp_layers = present_mtp_layers(deepseek, index_tensors(config.file.parent))
            _log.info("mtp_layers", announced=deepseek.num_mtp_layers, present=num_mtp_layers)
        weights = DeepseekWeights.empty(deepseek, placement, num_mtp_layers=num_mtp_layers)
        return BuiltModel(DeepseekModel(deepseek, weights, placement), tensor_targets(deepseek, weights))
