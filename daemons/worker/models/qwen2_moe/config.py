"""A Qwen2-MoE config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, DecoderDefaults, read_decoder_config
from radixmesh.daemons.worker.models.decoder.windows import FULL, SLIDING, read_layer_types, read_window
from radixmesh.daemons.worker.models.qwen3_moe.config import read_qwen_experts


def read_qwen2_moe_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader, DecoderDefaults(num_kv_heads=16))
    experts = read_qwen_experts(reader, decoder.num_layers, default_num=60)
    if experts is not None:
        shared_size = reader.integer("shared_expert_intermediate_size", 5632)
        experts = replace(experts, shared_mlp_size=shared_size, has_shared_gate=True)
    return replace(
        decoder, has_qkv_bias=reader.boolean("qkv_bias", True), windows=_read_windows(reader, decoder), experts=experts
    )


def _read_windows(reader: ConfigReader, decoder: DecoderConfig) -> tuple[int | None, ...]:
    """By layer_types, else in every second layer before max_window_layers."""
    window = read_window(reader, 4096) if reader.boolean("use_sliding_window", False) else None
    last = reader.integer("max_window_layers", 28, low=0) if window is not None else 0
    default = tuple(SLIDING if layer < last and layer % 2 == 0 else FULL for layer in range(decoder.num_layers))
    return tuple(window if kind == SLIDING else None for kind in read_layer_types(reader, default))
