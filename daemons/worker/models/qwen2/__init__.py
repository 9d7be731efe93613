"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in the later layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification")


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.qwen2.config import read_qwen2_config

    return DecoderFamily(read_qwen2_config)
