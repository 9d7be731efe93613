"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with routed experts, and an MLP with a gate that all rows share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.qwen2_moe.config import read_qwen2_moe_config

    return DecoderFamily(read_qwen2_moe_config)
