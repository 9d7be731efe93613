"""A GPT-OSS config.json, beyond the sizes of a decoder, and the layout of its experts in a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.checkpoint import RoutedLayout
from radixmesh.daemons.worker.models.decoder.config import (
    DecoderConfig,
    DecoderDefaults,
    RouterKind,
    read_decoder_config,
    read_experts,
)
from radixmesh.daemons.worker.models.decoder.windows import SLIDING, alternating, read_layer_types, read_window

LAYOUT = RoutedLayout(router="router", is_in_first=True, is_interleaved=True)


def read_gpt_oss_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    if not reader.has("rope_parameters") and not reader.has("rope_scaling"):
        raise reader.error("rope_parameters", "the scaling that the model was trained with")
    decoder = read_decoder_config(
        reader, DecoderDefaults(num_kv_heads=8, head_dim=64, norm_eps=1e-5, rope_theta=150000.0)
    )
    has_bias = reader.boolean("attention_bias", True)
    kinds = read_layer_types(reader, alternating(2, decoder.num_layers))
    window = read_window(reader, 128)
    experts = read_experts(
        reader,
        num_key="num_local_experts",
        mlp_size=decoder.mlp_size,
        is_normalised=True,
        layers=frozenset(range(decoder.num_layers)),
    )
    return replace(
        decoder,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_sinks=True,
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        experts=replace(
            experts,
            router=RouterKind.PICKED_SOFTMAX,
            has_bias=True,
            swiglu_limit=reader.number("swiglu_limit", 7.0),
            swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        ),
    )
