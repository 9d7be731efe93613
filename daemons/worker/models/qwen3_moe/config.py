"""A Qwen3-MoE config.json, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import (
    DecoderConfig,
    DecoderDefaults,
    ExpertsConfig,
    HeadNorm,
    read_decoder_config,
    read_experts,
)
from radixmesh.daemons.worker.models.decoder.windows import read_window


def read_qwen3_moe_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    decoder = read_decoder_config(reader, DecoderDefaults(num_kv_heads=4))
    has_bias = reader.boolean("attention_bias", False)
    window = read_window(reader, 4096) if reader.boolean("use_sliding_window", False) else None
    return replace(
        decoder,
        head_norm=HeadNorm.EACH,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        windows=(window,) * decoder.num_layers,
        experts=read_qwen_experts(reader, decoder.num_layers),
    )


def read_qwen_experts(reader: ConfigReader, num_layers: int, *, default_num: int = 128) -> ExpertsConfig | None:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers names it; None: no layer has."""
    # Newer files spell the number of experts as other families do.
    num_key = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    step, dense_layers = reader.integer("decoder_sparse_step", 1), reader.integers("mlp_only_layers", low=0)
    if reader.integer(num_key, default_num, low=0) == 0:
        return None
    return read_experts(
        reader,
        num_key=num_key,
        mlp_size=reader.integer("moe_intermediate_size"),
        is_normalised=reader.boolean("norm_topk_prob", False),
        layers=frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0) - set(dense_layers),
    )
