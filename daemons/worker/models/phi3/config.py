"""A Phi-3 config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, DecoderDefaults, read_decoder_config
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames
from radixmesh.daemons.worker.models.decoder.windows import read_window

_NAMES = CheckpointNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read_phi3_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader, DecoderDefaults(norm_eps=1e-5))
    return replace(decoder, windows=(read_window(reader, None),) * decoder.num_layers, names=_NAMES)
