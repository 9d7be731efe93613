"""GPT-2: learned positions, LayerNorm with biases, an MLP without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("GPT2LMHeadModel",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.gpt2.config import read_gpt2_config

    return DecoderFamily(read_gpt2_config)
