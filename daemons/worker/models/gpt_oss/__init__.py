"""GPT-OSS: windows in every second layer, attention sinks, routed experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("GptOssForCausalLM",)


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.decoder.family import DecoderFamily
    from radixmesh.daemons.worker.models.gpt_oss.config import LAYOUT, read_gpt_oss_config

    return DecoderFamily(read_gpt_oss_config, LAYOUT)
