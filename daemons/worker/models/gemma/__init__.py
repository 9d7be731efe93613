"""Gemma 1, 2 and 3, text only: norms with 1 + weight, and since 2 windows, norms behind each part, soft caps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.gemma.config import read_gemma_config

    return DecoderFamily(read_gemma_config)
