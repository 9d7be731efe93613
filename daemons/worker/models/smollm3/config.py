"""A SmolLM 3 config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, DecoderDefaults, read_decoder_config
from radixmesh.daemons.worker.models.decoder.windows import FULL, SLIDING, read_layer_types, read_window


def read_smollm3_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader, DecoderDefaults(num_kv_heads=4, rope_theta=2e6, is_tied=True))
    has_bias = reader.boolean("attention_bias", False)
    has_rope = read_rope_layers(reader, decoder.num_layers)
    window = read_window(reader, None) if reader.boolean("use_sliding_window", False) else None
    kinds = read_layer_types(reader, tuple(FULL if window is None or rope else SLIDING for rope in has_rope))
    return replace(
        decoder,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=reader.boolean("mlp_bias", False),
        layer_ropes=tuple(decoder.rope if rope else None for rope in has_rope),
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
    )


def read_rope_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """no_rope_layers, which is 1 where a layer has RoPE; else all but every no_rope_layer_interval-th have."""
    flags = reader.integers("no_rope_layers", low=0)
    if not flags:
        interval = reader.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(flags) < num_layers:
        raise reader.error("no_rope_layers", f"one entry for each of num_hidden_layers ({num_layers})")
    return tuple(bool(flag) for flag in flags[:num_layers])
