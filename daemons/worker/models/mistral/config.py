"""A Mistral config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, DecoderDefaults, read_decoder_config
from radixmesh.daemons.worker.models.decoder.windows import read_window

# A config that does not mention its window has this one; null means none.
_DEFAULT_WINDOW = 4096


def read_mistral_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    if reader.has("layer_types"):  # Ministral's, whose layers differ.
        raise reader.unsupported("layer_types", "absent: all layers have the window of sliding_window")
    decoder = read_decoder_config(reader, DecoderDefaults(num_kv_heads=8))
    return replace(decoder, windows=(read_window(reader, _DEFAULT_WINDOW),) * decoder.num_layers)
