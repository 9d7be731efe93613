"""Granite, dense: Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("GraniteForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.granite.config import read_granite_config

    return DecoderFamily(read_granite_config)
