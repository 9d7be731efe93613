"""A Qwen3 config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, DecoderDefaults, HeadNorm, read_decoder_config
from radixmesh.daemons.worker.models.decoder.windows import read_late_windows


def read_qwen3_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader, DecoderDefaults(head_dim=128))
    has_bias = reader.boolean("attention_bias", False)
    return replace(
        decoder,
        head_norm=HeadNorm.EACH,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        windows=read_late_windows(reader, decoder.num_layers),
    )
