"""Names of a decoder's checkpoint in Hugging Face format, and where in our weights each tensor lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.checkpoint.loader import OtherTarget, TensorTargets
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.weights import (
    AttentionWeights,
    DecoderLayer,
    DecoderWeights,
    MlpWeights,
    RoutedWeights,
)
from radixmesh.daemons.worker.models.expert_checkpoint import ExpertNames, expert_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayout:
    """A family's names for the block of router and experts, and for the experts' projections.

    other_block: the block's name in checkpoints that hold all experts of a layer in two tensors.
    """

    block: str = "mlp"
    other_block: str = "mlp"
    names: ExpertNames = ExpertNames()


class Part(NamedTuple):
    """A projection of a checkpoint that is `size` features out of a weight of ours, from `first` on. name: without
    ".weight" or ".bias"."""

    name: str
    first: int
    size: int


class LayerParts(NamedTuple):
    """Of each weight of a dense layer, in order; together they are the weight."""

    qkv: tuple[Part, ...]
    o: tuple[Part, ...]
    gate_up: tuple[Part, ...]
    down: tuple[Part, ...]


def layer_parts(config: DecoderConfig, index: int) -> LayerParts:
    """Names of the projections of a layer with an MLP."""
    query, kv, mlp = config.query_size, config.kv_size, config.mlp_size
    attention, block = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    return LayerParts(
        qkv=(
            Part(f"{attention}.q_proj", 0, query),
            Part(f"{attention}.k_proj", query, kv),
            Part(f"{attention}.v_proj", query + kv, kv),
        ),
        o=(Part(f"{attention}.o_proj", 0, config.hidden_size),),
        gate_up=(Part(f"{block}.gate_proj", 0, mlp), Part(f"{block}.up_proj", mlp, mlp)),
        down=(Part(f"{block}.down_proj", 0, config.hidden_size),),
    )


def tensor_targets(config: DecoderConfig, weights: DecoderWeights, layout: RoutedLayout) -> TensorTargets:
    """Every tensor of the checkpoint as a view of our weights in the checkpoint's shape ([out, in])."""
    targets = {"model.embed_tokens.weight": weights.embedding_VD, "model.norm.weight": weights.final_norm_D}
    others: dict[str, OtherTarget] = {}
    if not config.is_tied:
        targets["score.weight" if config.is_scoring else "lm_head.weight"] = weights.head_DO.t()
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        targets.update(_layer_targets(index, config, layer))
        if isinstance(layer.mlp, RoutedWeights):
            routed = _routed_targets(prefix, layer.mlp, layout)
            targets.update(routed.tensors)
            others.update(routed.others)
    return TensorTargets(tensors=targets, is_ignored=partial(_is_ignored, is_tied=config.is_tied), others=others)


def _layer_targets(index: int, config: DecoderConfig, layer: DecoderLayer) -> dict[str, torch.Tensor]:
    """All of a layer but routed experts."""
    prefix, parts = f"model.layers.{index}", layer_parts(config, index)
    targets = _attention_targets(f"{prefix}.self_attn", parts, layer.attention)
    targets[f"{prefix}.input_layernorm.weight"] = layer.attention.norm_D
    targets[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm_D
    if isinstance(layer.mlp, MlpWeights):
        targets.update(_mlp_targets(parts, layer.mlp))
    return targets


def _attention_targets(prefix: str, parts: LayerParts, weights: AttentionWeights) -> dict[str, torch.Tensor]:
    targets = _targets(parts.qkv, weights.w_qkv_DX, weights.b_qkv_X) | _targets(parts.o, weights.w_o_QD, weights.b_o_D)
    if weights.q_norm_d is not None and weights.k_norm_d is not None:
        targets[f"{prefix}.q_norm.weight"] = weights.q_norm_d
        targets[f"{prefix}.k_norm.weight"] = weights.k_norm_d
    return targets


def _mlp_targets(parts: LayerParts, weights: MlpWeights) -> dict[str, torch.Tensor]:
    return _targets(parts.gate_up, weights.w_gate_up_DF2, weights.b_gate_up_F2) | _targets(
        parts.down, weights.w_down_FD, weights.b_down_D
    )


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


def _targets(parts: tuple[Part, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Of a weight of ours, in columns."""
    targets = {}
    for part in parts:
        targets[f"{part.name}.weight"] = weight.narrow(1, part.first, part.size).t()
        if bias is not None:
            targets[f"{part.name}.bias"] = bias.narrow(0, part.first, part.size)
    return targets


def _is_ignored(name: str, *, is_tied: bool) -> bool:
    # Old checkpoints carry the rotary frequencies, and tied ones sometimes the embedding a second time.
    return name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
