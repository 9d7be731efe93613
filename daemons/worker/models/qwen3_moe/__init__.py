"""Qwen3-MoE: Qwen3 with routed experts in some or all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification")


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.qwen3_moe.config import read_qwen3_moe_config

    return DecoderFamily(read_qwen3_moe_config)
