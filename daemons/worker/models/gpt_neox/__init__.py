"""GPT-NeoX and Pythia: parallel attention and MLP, RoPE of a part of each head, LayerNorm with biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("GPTNeoXForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.gpt_neox.config import read_gpt_neox_config

    return DecoderFamily(read_gpt_neox_config)
