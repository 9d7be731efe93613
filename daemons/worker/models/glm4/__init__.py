"""GLM-4, dense, old and 0414: fused gate and up, interleaved RoPE of half of each head; 0414 has four norms a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = (
    "GlmForCausalLM",
    "Glm4ForCausalLM",
)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.glm4.config import read_glm4_config

    return DecoderFamily(read_glm4_config)
