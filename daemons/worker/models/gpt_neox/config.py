"""A GPT-NeoX config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import (
    DecoderConfig,
    DecoderDefaults,
    NormKind,
    read_decoder_config,
)
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames

_NAMES = CheckpointNames(
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    other_head="lm_head",
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    is_qkv_by_head=True,
    # Frequencies and causal masks that old versions stored.
    ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)


def read_gpt_neox_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    theta = reader.number("rotary_emb_base", 10000.0)
    decoder = read_decoder_config(reader, DecoderDefaults(rope_theta=theta, rotary_share=0.25, activation="gelu"))
    if decoder.num_kv_heads != decoder.num_heads:
        raise reader.error("num_key_value_heads", "absent: every head has its own keys")
    has_bias = reader.boolean("attention_bias", True)
    return replace(
        decoder,
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=True,
        norm_kind=NormKind.LAYER,
        is_parallel=reader.boolean("use_parallel_residual", True),
        is_gated=False,
        names=_NAMES,
    )
