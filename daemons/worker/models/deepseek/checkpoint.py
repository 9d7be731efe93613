"""Names of a DeepSeek checkpoint in Hugging Face format, and where in our weights each tensor lies."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch

from radixmesh.daemons.worker.checkpoint.loader import OtherTarget, TensorTargets
from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig
from radixmesh.daemons.worker.models.deepseek.weights import (
    DeepseekLayer,
    DeepseekWeights,
    LatentAttentionWeights,
    MlpWeights,
    MoeWeights,
    MtpLayer,
)
from radixmesh.daemons.worker.models.expert_checkpoint import ExpertSource, expert_targets

# Tensors that an MTP layer shares with the model; its checkpoint holds them again.
_SHARED_BY_MTP = ("embed_tokens.weight", "shared_head.head.weight")


def tensor_targets(config: DeepseekConfig, weights: DeepseekWeights) -> TensorTargets:
    """Every tensor of the checkpoint as a view of our weights in the checkpoint's shape ([out, in])."""
    tensors = {"model.embed_tokens.weight": weights.embedding_VD, "model.norm.weight": weights.final_norm_D}
    if not config.is_tied:
        tensors["lm_head.weight"] = weights.head_DV.t()
    others: dict[str, OtherTarget] = {}
    elsewhere: set[str] = set()
    blocks = [*weights.layers, *(layer.block for layer in weights.mtp_layers)]
    for index, layer in enumerate(blocks):
        prefix = layer_prefix(index)
        tensors.update({f"{prefix}{name}": tensor for name, tensor in _layer_tensors(config, layer).items()})
        if isinstance(layer.mlp, MoeWeights):
            experts = expert_targets(f"{prefix}mlp.experts", layer.mlp.experts)
            tensors.update(experts.tensors)
            elsewhere.update(experts.elsewhere)
            others.update(experts.others)
    ignored = {"lm_head.weight"} if config.is_tied else set()
    for index, mtp_layer in enumerate(weights.mtp_layers, config.num_layers):
        prefix = layer_prefix(index)
        tensors.update({f"{prefix}{name}": tensor for name, tensor in _mtp_tensors(mtp_layer).items()})
        ignored.update(f"{prefix}{name}" for name in _SHARED_BY_MTP)
    return TensorTargets(
        tensors=tensors,
        # Old checkpoints carry the rotary frequencies.
        is_ignored=lambda name: name in ignored or name.endswith("rotary_emb.inv_freq"),
        others=others,
        elsewhere=frozenset(elsewhere),
    )


def expert_sources(weights: DeepseekWeights) -> tuple[ExpertSource, ...]:
    """Of the layers that run: MTP layers do not."""
    return tuple(
        ExpertSource(layer.mlp.experts, partial(expert_targets, f"{layer_prefix(index)}mlp.experts"))
        for index, layer in enumerate(weights.layers)
        if isinstance(layer.mlp, MoeWeights)
    )


def present_mtp_layers(config: DeepseekConfig, names: Collection[str]) -> int:
    """Number of MTP layers, counted from the first, that a checkpoint of these tensors holds.

    Checkpoints that were saved again have often lost them, though their config still announces them.
    """
    for index in range(config.num_mtp_layers):
        prefix = layer_prefix(config.num_layers + index)
        if not any(name.startswith(prefix) for name in names):
            return index
    return config.num_mtp_layers


def layer_prefix(index: int) -> str:
    """Prefix of the names of all tensors of a layer."""
    return f"model.layers.{index}."


def _layer_tensors(config: DeepseekConfig, layer: DeepseekLayer) -> dict[str, torch.Tensor]:
    """All but the routed experts."""
    tensors = {
        "input_layernorm.weight": layer.attention_norm_D,
        "post_attention_layernorm.weight": layer.mlp_norm_D,
        **_attention_tensors(config, layer.attention),
    }
    if isinstance(layer.mlp, MlpWeights):
        return tensors | _mlp_tensors("mlp", layer.mlp)
    tensors["mlp.gate.weight"] = layer.mlp.w_router_DE.t()
    if layer.mlp.b_router_E is not None:
        tensors["mlp.gate.e_score_correction_bias"] = layer.mlp.b_router_E
    if layer.mlp.shared is not None:
        tensors.update(_mlp_tensors("mlp.shared_experts", layer.mlp.shared))
    return tensors


def _attention_tensors(config: DeepseekConfig, weights: LatentAttentionWeights) -> dict[str, torch.Tensor]:
    query, latent = config.first_query_size, config.latent_dim
    first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
    tensors = {
        f"{first}.weight": weights.w_in_DX.narrow(1, 0, query).t(),
        "kv_a_proj_with_mqa.weight": weights.w_in_DX.narrow(1, query, latent).t(),
        "kv_a_layernorm.weight": weights.latent_norm_R,
        "kv_b_proj.weight": weights.w_expand_HER.flatten(0, 1),
        "o_proj.weight": weights.w_out_OD.t(),
    }
    if weights.query_norm_Q is not None and weights.w_query_QY is not None:
        tensors["q_a_layernorm.weight"] = weights.query_norm_Q
        tensors["q_b_proj.weight"] = weights.w_query_QY.t()
    if weights.b_in_X is not None and weights.b_out_D is not None:
        if config.q_lora_rank is not None:
            tensors["q_a_proj.bias"] = weights.b_in_X.narrow(0, 0, query)
        tensors["kv_a_proj_with_mqa.bias"] = weights.b_in_X.narrow(0, query, latent)
        tensors["o_proj.bias"] = weights.b_out_D
    return {f"self_attn.{name}": tensor for name, tensor in tensors.items()}


def _mlp_tensors(prefix: str, weights: MlpWeights) -> dict[str, torch.Tensor]:
    gate_DF, up_DF = weights.w_gate_up_DF2.chunk(2, dim=1)
    return {
        f"{prefix}.gate_proj.weight": gate_DF.t(),
        f"{prefix}.up_proj.weight": up_DF.t(),
        f"{prefix}.down_proj.weight": weights.w_down_FD.t(),
    }


def _mtp_tensors(layer: MtpLayer) -> dict[str, torch.Tensor]:
    return {
        "enorm.weight": layer.embedding_norm_D,
        "hnorm.weight": layer.hidden_norm_D,
        "eh_proj.weight": layer.w_join_GD.t(),
        "shared_head.norm.weight": layer.head_norm_D,
    }
