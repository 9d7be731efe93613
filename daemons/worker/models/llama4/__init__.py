"""Llama 4, text only: chunked layers with RoPE and whole ones without, routed experts beside a shared MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("Llama4ForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.llama4.config import LAYOUT, read_llama4_config

    return DecoderFamily(read_llama4_config, LAYOUT)
