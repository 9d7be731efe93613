"""An OLMo 2 config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import (
    DecoderConfig,
    DecoderDefaults,
    HeadNorm,
    read_decoder_config,
)
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames

_NAMES = CheckpointNames(
    attention_output_norm="post_attention_layernorm", mlp_norm="", mlp_output_norm="post_feedforward_layernorm"
)


def read_olmo2_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader, DecoderDefaults(norm_eps=1e-5))
    has_bias = reader.boolean("attention_bias", False)
    return replace(
        decoder,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        head_norm=HeadNorm.ALL,
        has_input_norms=False,
        has_output_norms=True,
        names=_NAMES,
    )
