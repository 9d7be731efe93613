"""A Granite config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, read_decoder_config


def read_granite_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    has_bias = reader.boolean("attention_bias", False)
    return replace(
        read_decoder_config(reader),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=reader.boolean("mlp_bias", False),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        attention_scale=reader.number("attention_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        logits_divisor=reader.number("logits_scaling", 1.0),
    )
