"""Names of a decoder's checkpoint in Hugging Face format, and where in our weights each tensor lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from radixmesh.daemons.worker.checkpoint.loader import OtherTarget, TensorTargets
from radixmesh.daemons.worker.models.expert_checkpoint import ExpertNames, expert_targets

from .config import DecoderConfig
from .weights import AttentionWeights, DecoderLayer, DecoderWeights, MlpWeights, RoutedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayout:
    """What a family calls the block of router and experts, and the experts' projections.

    other_block: the block's name in checkpoints that hold all experts of a layer in two tensors.
    """

    block: str = "mlp"
    other_block: str = "mlp"
    names: ExpertNames = ExpertNames()


def tensor_targets(config: DecoderConfig, weights: DecoderWeights, layout: RoutedLayout) -> TensorTargets:
    """Every tensor of the checkpoint as a view of our weights in the checkpoint's shape ([out, in])."""
    targets = {"model.embed_tokens.weight": weights.embedding_VD, "model.norm.weight": weights.final_norm_D}
    others: dict[str, OtherTarget] = {}
    if not config.is_tied:
        targets["score.weight" if config.is_scoring else "lm_head.weight"] = weights.head_DO.t()
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        targets.update(_layer_targets(prefix, config, layer))
        if isinstance(layer.mlp, RoutedWeights):
            routed = _routed_targets(prefix, layer.mlp, layout)
            targets.update(routed.tensors)
            others.update(routed.others)
    return TensorTargets(tensors=targets, is_ignored=partial(_is_ignored, is_tied=config.is_tied), others=others)


def _layer_targets(prefix: str, config: DecoderConfig, layer: DecoderLayer) -> dict[str, torch.Tensor]:
    """All of a layer but routed experts."""
    targets = _attention_targets(f"{prefix}.self_attn", config, layer.attention)
    targets[f"{prefix}.input_layernorm.weight"] = layer.attention.norm_D
    targets[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm_D
    if isinstance(layer.mlp, MlpWeights):
        targets.update(_mlp_targets(f"{prefix}.mlp", config, layer.mlp))
    return targets


def _attention_targets(prefix: str, config: DecoderConfig, weights: AttentionWeights) -> dict[str, torch.Tensor]:
    query, kv = config.query_size, config.kv_size
    targets = {
        **_part(f"{prefix}.q_proj", 0, query, weights.w_qkv_DX, weights.b_qkv_X),
        **_part(f"{prefix}.k_proj", query, kv, weights.w_qkv_DX, weights.b_qkv_X),
        **_part(f"{prefix}.v_proj", query + kv, kv, weights.w_qkv_DX, weights.b_qkv_X),
        **_part(f"{prefix}.o_proj", 0, config.hidden_size, weights.w_o_QD, weights.b_o_D),
    }
    if weights.q_norm_d is not None and weights.k_norm_d is not None:
        targets[f"{prefix}.q_norm.weight"] = weights.q_norm_d
        targets[f"{prefix}.k_norm.weight"] = weights.k_norm_d
    return targets


def _mlp_targets(prefix: str, config: DecoderConfig, weights: MlpWeights) -> dict[str, torch.Tensor]:
    size = config.mlp_size
    return {
        **_part(f"{prefix}.gate_proj", 0, size, weights.w_gate_up_DF2, weights.b_gate_up_F2),
        **_part(f"{prefix}.up_proj", size, size, weights.w_gate_up_DF2, weights.b_gate_up_F2),
        **_part(f"{prefix}.down_proj", 0, config.hidden_size, weights.w_down_FD, weights.b_down_D),
    }


def _routed_targets(prefix: str, weights: RoutedWeights, layout: RoutedLayout) -> TensorTargets:
    block, other_block = f"{prefix}.{layout.block}", f"{prefix}.{layout.other_block}"
    router_ED = weights.w_router_DE.t()
    experts = expert_targets(
        f"{block}.experts", weights.experts, names=layout.names, fused_prefix=f"{other_block}.experts"
    )
    others = dict(experts.others)
    if other_block != block:
        others[f"{other_block}.gate.weight"] = OtherTarget(tensor=router_ED, replaces=(f"{block}.gate.weight",))
    return TensorTargets(
        tensors={f"{block}.gate.weight": router_ED, **experts.tensors}, is_ignored=experts.is_ignored, others=others
    )


def _part(name: str, first: int, size: int, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A projection that is `size` columns of a weight of ours, from `first` on."""
    targets = {f"{name}.weight": weight.narrow(1, first, size).t()}
    if bias is not None:
        targets[f"{name}.bias"] = bias.narrow(0, first, size)
    return targets


def _is_ignored(name: str, *, is_tied: bool) -> bool:
    # Old checkpoints carry the rotary frequencies, and tied ones sometimes the embedding a second time.
    return name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
