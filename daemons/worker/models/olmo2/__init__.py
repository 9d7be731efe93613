"""OLMo 2: Llama with norms behind attention and MLP in place of before, and over all heads of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("Olmo2ForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.olmo2.config import read_olmo2_config

    return DecoderFamily(read_olmo2_config)
