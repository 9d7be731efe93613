"""Phi-3 and Phi-4: Llama with fused projections, RoPE of a part of each head, longrope and windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("Phi3ForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.phi3.config import read_phi3_config

    return DecoderFamily(read_phi3_config)
