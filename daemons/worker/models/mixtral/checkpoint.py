"""Names of a Mixtral checkpoint: w1, w3 and w2 of an expert are gate, up and down."""

from __future__ import annotations

from radixmesh.daemons.worker.models.decoder.checkpoint import RoutedLayout
from radixmesh.daemons.worker.models.expert_checkpoint import ExpertNames

LAYOUT = RoutedLayout(block="block_sparse_moe", other_block="mlp", names=ExpertNames(gate="w1", up="w3", down="w2"))
