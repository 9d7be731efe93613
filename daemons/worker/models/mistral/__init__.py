"""Mistral: Llama with a sliding window in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("MistralForCausalLM", "MistralForSequenceClassification")


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.mistral.config import read_mistral_config

    return DecoderFamily(read_mistral_config)
