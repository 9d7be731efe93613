"""Qwen3, dense: Llama with norms on the heads of queries and keys, and windows in the later layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.qwen3.config import read_qwen3_config

    return DecoderFamily(read_qwen3_config)
