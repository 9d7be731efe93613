"""A GPT-2 config.json; most of its keys have names of their own."""

from __future__ import annotations

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, NormKind, read_activation
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames

_NAMES = CheckpointNames(
    optional_prefix="transformer.",
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    is_in_first=True,
    # Causal masks that old versions stored.
    ignored=("attn.bias", "attn.masked_bias"),
)


def read_gpt2_config(reader: ConfigReader) -> DecoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    hidden_size, num_heads = reader.integer("n_embd"), reader.integer("n_head")
    num_layers = reader.integer("n_layer")
    if hidden_size % num_heads:
        raise reader.error("n_embd", f"a multiple of n_head ({num_heads})")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if reader.boolean(key, False):
            raise reader.unsupported(key, "false")
    return DecoderConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=reader.integer("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_total_len=reader.integer("n_positions"),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        rope=None,
        windows=(None,) * num_layers,
        is_tied=reader.boolean("tie_word_embeddings", True),
        has_qkv_bias=True,
        has_output_bias=True,
        has_mlp_bias=True,
        has_position_embedding=True,
        norm_kind=NormKind.LAYER,
        attention_scale=None if reader.boolean("scale_attn_weights", True) else 1.0,
        activation=read_activation(reader, "activation_function", "gelu_new"),
        is_gated=False,
        names=_NAMES,
    )
