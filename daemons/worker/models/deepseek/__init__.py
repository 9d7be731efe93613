"""DeepSeek-V2 and V3: latent attention, shared and routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.model import ModelFamily

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def create_family() -> ModelFamily:
    from radixmesh.daemons.worker.models.deepseek.family import DeepseekFamily

    return DeepseekFamily()
