"""A Qwen2 config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, read_decoder_config
from radixmesh.daemons.worker.models.decoder.windows import read_late_windows


def read_qwen2_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader)
    return replace(decoder, has_qkv_bias=True, windows=read_late_windows(reader, decoder.num_layers))
