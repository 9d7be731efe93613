"""SmolLM 3: Llama with some layers that have no RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.smollm3.config import read_smollm3_config

    return DecoderFamily(read_smollm3_config)
