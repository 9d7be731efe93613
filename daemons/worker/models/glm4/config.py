"""A GLM-4 config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, DecoderDefaults, read_decoder_config
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames

_NAMES = CheckpointNames(gate_up=("mlp.gate_up_proj",))
_SANDWICH_NAMES = replace(
    _NAMES, attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"
)


def read_glm4_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    defaults = DecoderDefaults(num_kv_heads=2, head_dim=128, norm_eps=0.00000015625, rotary_share=0.5)
    decoder = read_decoder_config(reader, defaults)
    assert decoder.rope is not None
    has_output_norms = reader.strings("architectures")[0] == "Glm4ForCausalLM"
    return replace(
        decoder,
        rope=replace(decoder.rope, is_interleaved=True),
        has_qkv_bias=reader.boolean("attention_bias", True),
        has_output_norms=has_output_norms,
        names=_SANDWICH_NAMES if has_output_norms else _NAMES,
    )
