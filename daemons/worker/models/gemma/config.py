"""Config.json files of Gemma 1, 2 and 3, beyond the sizes of a decoder."""

from __future__ import annotations

from dataclasses import replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import (
    DecoderConfig,
    DecoderDefaults,
    HeadNorm,
    NormKind,
    read_decoder_config,
)
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames
from radixmesh.daemons.worker.models.decoder.windows import FULL, SLIDING, alternating, read_layer_types, read_window
from radixmesh.daemons.worker.models.rope_config import RopeConfig, read_rope

_NAMES = CheckpointNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def read_gemma_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    version = reader.strings("architectures")[0]
    if version == "GemmaForCausalLM":
        return _read_first(reader)
    if reader.boolean("use_bidirectional_attention", False):
        raise reader.unsupported("use_bidirectional_attention", "false")
    is_third = version == "Gemma3ForCausalLM"
    decoder = _read_second(reader, theta=1e6 if is_third else 10000.0)
    period = reader.integer("sliding_window_pattern", 6 if is_third else 2)
    kinds = read_layer_types(reader, alternating(period, decoder.num_layers))
    window = read_window(reader, 4096)
    decoder = replace(decoder, windows=tuple(window if kind == SLIDING else None for kind in kinds))
    if not is_third:
        return decoder
    ropes = {kind: _read_rope(reader, decoder, kind) for kind in (SLIDING, FULL)}
    return replace(decoder, head_norm=HeadNorm.EACH, layer_ropes=tuple(ropes[kind] for kind in kinds))


def _read_first(reader: ConfigReader) -> DecoderConfig:
    decoder = _read_common(reader, DecoderDefaults(head_dim=256, is_tied=True, activation="gelu_pytorch_tanh"))
    return replace(decoder, names=CheckpointNames())


def _read_second(reader: ConfigReader, theta: float) -> DecoderConfig:
    """The parts that Gemma 2 and 3 share."""
    decoder = _read_common(
        reader,
        DecoderDefaults(
            num_kv_heads=4,
            head_dim=256,
            is_tied=True,
            rope_theta=theta,
            activation="gelu_pytorch_tanh",
            activation_key="hidden_activation",
        ),
    )
    return replace(
        decoder,
        has_output_norms=True,
        attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_read_cap(reader, "attn_logit_softcapping", 50.0),
        logit_softcap=_read_cap(reader, "final_logit_softcapping", 30.0),
    )


def _read_common(reader: ConfigReader, defaults: DecoderDefaults) -> DecoderConfig:
    decoder = read_decoder_config(reader, defaults)
    has_bias = reader.boolean("attention_bias", False)
    return replace(
        decoder,
        norm_kind=NormKind.RMS_PLUS_ONE,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        embedding_scale=decoder.hidden_size**0.5,
        names=_NAMES,
    )


def _read_cap(reader: ConfigReader, key: str, default: float) -> float | None:
    """Gemma 2 caps where its config says nothing, Gemma 3 does not; null is none."""
    if reader.has(key):
        return reader.number(key)
    is_second = reader.strings("architectures")[0] == "Gemma2ForCausalLM"
    return default if is_second and not reader.is_null(key) else None


def _read_rope(reader: ConfigReader, decoder: DecoderConfig, kind: str) -> RopeConfig:
    """Older files have rope_local_base_freq for layers with windows, and a scaling for the others alone."""
    if kind == SLIDING and not reader.has("rope_parameters"):
        return RopeConfig(theta=reader.number("rope_local_base_freq", 10000.0))
    theta = 1e6 if kind == FULL else 10000.0
    return read_rope(reader, decoder.max_total_len, head_dim=decoder.head_dim, default_theta=theta, layer_type=kind)
