"""A Llama 4 config.json, beyond the sizes of a decoder, and the names of its checkpoint."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.checkpoint import RoutedLayout
from radixmesh.daemons.worker.models.decoder.config import (
    DecoderConfig,
    DecoderDefaults,
    ExpertsConfig,
    HeadNorm,
    QueryTemperature,
    RouterKind,
    read_decoder_config,
    read_experts,
)
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames
from radixmesh.daemons.worker.models.smollm3.config import read_rope_layers

LAYOUT = RoutedLayout(block="feed_forward", other_block="feed_forward", router="router", is_in_first=True)
_NAMES = CheckpointNames(gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")
_CHUNKED, _FULL = "chunked_attention", "full_attention"


def read_llama4_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    defaults = DecoderDefaults(num_kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=500000.0)
    decoder = read_decoder_config(reader, defaults)
    assert decoder.rope is not None
    rope, has_rope = replace(decoder.rope, is_interleaved=True), read_rope_layers(reader, decoder.num_layers)
    has_bias = reader.boolean("attention_bias", False)
    temperature = QueryTemperature(
        scale=reader.number("attn_scale", 0.1), floor_scale=reader.number("floor_scale", 8192.0)
    )
    return replace(
        decoder,
        mlp_size=reader.integer("intermediate_size_mlp", 16384),
        rope=rope,
        layer_ropes=tuple(rope if turned else None for turned in has_rope),
        chunks=_read_chunks(reader, has_rope),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        head_norm=HeadNorm.AFTER_ROPE if reader.boolean("use_qk_norm", True) else HeadNorm.NONE,
        query_temperature=temperature if reader.boolean("attn_temperature_tuning", True) else None,
        experts=_read_experts(reader, decoder),
        names=_NAMES,
    )


def _read_chunks(reader: ConfigReader, has_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    """By layer_types, else in the layers with RoPE."""
    size = None if reader.is_null("attention_chunk_size") else reader.integer("attention_chunk_size", 8192)
    kinds = tuple(_CHUNKED if turned else _FULL for turned in has_rope)
    if reader.has("layer_types"):
        kinds = reader.strings("layer_types")
        if len(kinds) != len(has_rope) or not set(kinds) <= {_CHUNKED, _FULL}:
            raise reader.error("layer_types", f"{_CHUNKED} or {_FULL} for each of {len(has_rope)} layers")
    return tuple(size if kind == _CHUNKED else None for kind in kinds)


def _read_experts(reader: ConfigReader, decoder: DecoderConfig) -> ExpertsConfig:
    """In the layers of moe_layers, else in every interleave_moe_layer_step-th."""
    step, mlp_size = reader.integer("interleave_moe_layer_step", 1), decoder.mlp_size
    layers = reader.integers("moe_layers", low=0) or tuple(range(step - 1, decoder.num_layers, step))
    experts = read_experts(
        reader,
        num_key="num_local_experts",
        mlp_size=mlp_size,
        is_normalised=False,
        layers=frozenset(layers),
    )
    return replace(experts, router=RouterKind.SIGMOID, shared_mlp_size=mlp_size)
