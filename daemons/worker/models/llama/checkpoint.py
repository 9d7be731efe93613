"""Names of a Llama checkpoint in Hugging Face format, and where in our weights each tensor lies."""

from __future__ import annotations

from functools import partial

import torch

from radixmesh.daemons.worker.checkpoint.loader import TensorTargets

from .config import LlamaConfig
from .weights import LlamaLayer, LlamaWeights


def tensor_targets(config: LlamaConfig, weights: LlamaWeights) -> TensorTargets:
    """Every tensor of the checkpoint as a view of our weights in the checkpoint's shape ([out, in])."""
    targets = {"model.embed_tokens.weight": weights.embedding_VD, "model.norm.weight": weights.final_norm_D}
    if not config.is_tied:
        targets["lm_head.weight"] = weights.head_DV.t()
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_targets(config, layer).items():
            targets[f"model.layers.{index}.{name}"] = tensor
    return TensorTargets(tensors=targets, is_ignored=partial(_is_ignored, is_tied=config.is_tied))


def _layer_targets(config: LlamaConfig, layer: LlamaLayer) -> dict[str, torch.Tensor]:
    parts = {
        "self_attn.q_proj": (0, config.query_size, layer.w_qkv_DX, layer.b_qkv_X),
        "self_attn.k_proj": (config.query_size, config.kv_size, layer.w_qkv_DX, layer.b_qkv_X),
        "self_attn.v_proj": (config.query_size + config.kv_size, config.kv_size, layer.w_qkv_DX, layer.b_qkv_X),
        "self_attn.o_proj": (0, config.hidden_size, layer.w_o_QD, layer.b_o_D),
        "mlp.gate_proj": (0, config.mlp_size, layer.w_gate_up_DF2, layer.b_gate_up_F2),
        "mlp.up_proj": (config.mlp_size, config.mlp_size, layer.w_gate_up_DF2, layer.b_gate_up_F2),
        "mlp.down_proj": (0, config.hidden_size, layer.w_down_FD, layer.b_down_D),
    }
    targets = {
        "input_layernorm.weight": layer.attention_norm_D,
        "post_attention_layernorm.weight": layer.mlp_norm_D,
    }
    for name, (first, size, weight, bias) in parts.items():
        targets[f"{name}.weight"] = weight.narrow(1, first, size).t()
        if bias is not None:
            targets[f"{name}.bias"] = bias.narrow(0, first, size)
    return targets


def _is_ignored(name: str, *, is_tied: bool) -> bool:
    # Old checkpoints carry the rotary frequencies, and tied ones sometimes the embedding a second time.
    return name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
