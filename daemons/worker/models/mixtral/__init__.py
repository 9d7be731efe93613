"""Mixtral: Mistral with routed experts in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("MixtralForCausalLM", "MixtralForSequenceClassification")


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.mixtral.checkpoint import LAYOUT
    from radixmesh.daemons.worker.models.mixtral.config import read_mixtral_config

    return DecoderFamily(read_mixtral_config, LAYOUT)
