"""A Mixtral config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import (
    DecoderConfig,
    DecoderDefaults,
    read_decoder_config,
    read_experts,
)
from radixmesh.daemons.worker.models.decoder.windows import read_window


def read_mixtral_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader, DecoderDefaults(num_kv_heads=8, norm_eps=1e-5, rope_theta=1e6))
    return replace(
        decoder,
        windows=(read_window(reader, None),) * decoder.num_layers,
        experts=read_experts(
            reader,
            num_key="num_local_experts",
            mlp_size=decoder.mlp_size,
            is_normalised=True,
            layers=frozenset(range(decoder.num_layers)),
        ),
    )
