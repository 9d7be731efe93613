"""Llama 1, 2 and 3, and what has exactly their shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForSequenceClassification")


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.llama.config import read_llama_config

    return DecoderFamily(read_llama_config)
