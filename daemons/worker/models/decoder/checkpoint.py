"""Names of a decoder's checkpoint in Hugging Face format, and where in our weights each tensor lies."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from radixmesh.daemons.worker.models.expert_checkpoint import (
    ExpertNames,
    ExpertSource,
    expert_targets,
    fused_expert_targets,
)
from radixmesh.daemons.worker.models.experts import ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayout:
    """A family's names for the block of router and experts, and for the experts' projections.

    other_block: the block's name in checkpoints that hold all experts of a layer in two tensors. is_in_first: there
    are only these two, [experts, in, out]; with is_interleaved gate and up alternate in the first one.
    """

    block: str = "mlp"
    other_block: str = "mlp"
    names: ExpertNames = ExpertNames()
    router: str = "gate"
    shared: str = "shared_expert"
    is_in_first: bool = False
    is_interleaved: bool = False


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
    query, kv, mlp, names = config.query_size, config.kv_size, config.mlp_size, config.names
    up_sizes = (mlp, mlp) if config.is_gated else (mlp,)
    return LayerParts(
        qkv=_parts(config, index, names.qkv, (query, kv, kv)),
        o=_parts(config, index, (names.o,), (config.hidden_size,)),
        gate_up=_parts(config, index, names.gate_up, up_sizes),
        down=_parts(config, index, (names.down,), (config.hidden_size,)),
    )


def _parts(config: DecoderConfig, index: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Part, ...]:
    """A single name is all of the weight."""
    if len(names) == 1:
        sizes = (sum(sizes),)
    parts, first = [], 0
    for name, size in zip(names, sizes, strict=True):
        parts.append(Part(config.names.of_layer(index, name), first, size))
        first += size
    return tuple(parts)


def tensor_targets(config: DecoderConfig, weights: DecoderWeights, layout: RoutedLayout) -> TensorTargets:
    """Every tensor of the checkpoint as a view of our weights, of the checkpoint's shape ([out, in]) or to be reshaped
    to it."""
    names = config.names
    targets = {f"{names.embedding}.weight": weights.embedding_VD}
    targets.update(_norm_targets(names.final_norm, weights.final_norm_D, weights.final_norm_bias_D))
    if weights.positions_PD is not None:
        targets[f"{names.positions}.weight"] = weights.positions_PD
    others: dict[str, OtherTarget] = {}
    elsewhere: set[str] = set()
    if not config.is_tied:
        targets["score.weight" if config.is_scoring else f"{names.head}.weight"] = weights.head_DO.t()
    for index, layer in enumerate(weights.layers):
        targets.update(_layer_targets(index, config, layer))
        if isinstance(layer.mlp, RoutedWeights):
            routed = _routed_targets(names.of_layer(index, "").removesuffix("."), layer.mlp, layout)
            targets.update(routed.tensors)
            others.update(routed.others)
            elsewhere.update(routed.elsewhere)
    others.update(_renamed_targets(config, targets))
    return TensorTargets(
        tensors=targets,
        is_ignored=partial(_is_ignored, config=config),
        others=others,
        elsewhere=frozenset(elsewhere),
    )


def expert_sources(config: DecoderConfig, weights: DecoderWeights, layout: RoutedLayout) -> tuple[ExpertSource, ...]:
    """Of the layers with routed experts."""

    def targets_of(prefix: str, experts: ExpertWeights) -> TensorTargets:
        targets = _expert_targets(prefix, experts, layout)
        return replace(targets, others={**targets.others, **_renamed_targets(config, dict(targets.tensors))})

    return tuple(
        ExpertSource(layer.mlp.experts, partial(targets_of, config.names.of_layer(index, "").removesuffix(".")))
        for index, layer in enumerate(weights.layers)
        if isinstance(layer.mlp, RoutedWeights)
    )


def _renamed_targets(config: DecoderConfig, targets: dict[str, torch.Tensor]) -> dict[str, OtherTarget]:
    """The same tensors by the other names that some checkpoints have for them."""
    names, others = config.names, {}
    if names.optional_prefix:
        for name, tensor in targets.items():
            others[name.removeprefix(names.optional_prefix)] = OtherTarget(tensor=tensor, replaces=(name,))
    if names.other_head and f"{names.head}.weight" in targets:
        name = f"{names.head}.weight"
        others[f"{names.other_head}.weight"] = OtherTarget(tensor=targets[name], replaces=(name,))
    return others


def _layer_targets(index: int, config: DecoderConfig, layer: DecoderLayer) -> dict[str, torch.Tensor]:
    """All of a layer but routed experts."""
    names, parts = config.names, layer_parts(config, index)
    targets = _attention_targets(config, index, parts, layer.attention)
    for name, weight_D, bias_D in (
        (names.attention_norm, layer.attention.norm_D, layer.attention.norm_bias_D),
        (names.mlp_norm, layer.mlp_norm_D, layer.mlp_norm_bias_D),
        (names.attention_output_norm, layer.attention.output_norm_D, None),
        (names.mlp_output_norm, layer.mlp_output_norm_D, None),
    ):
        if weight_D is not None and weight_D.numel():
            targets.update(_norm_targets(names.of_layer(index, name), weight_D, bias_D))
    if isinstance(layer.mlp, MlpWeights):
        targets.update(_mlp_targets(config, parts, layer.mlp))
    return targets


def _norm_targets(name: str, weight_D: torch.Tensor, bias_D: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": weight_D} | ({} if bias_D is None else {f"{name}.bias": bias_D})


def _attention_targets(
    config: DecoderConfig, index: int, parts: LayerParts, weights: AttentionWeights
) -> dict[str, torch.Tensor]:
    names = config.names
    if names.is_qkv_by_head:
        targets = _targets_by_head(config, parts.qkv[0].name, weights)
    else:
        targets = _targets(config, parts.qkv, weights.w_qkv_DX, weights.b_qkv_X)
    targets |= _targets(config, parts.o, weights.w_o_QD, weights.b_o_D)
    if weights.q_norm_d is not None and weights.k_norm_d is not None:
        targets[f"{names.of_layer(index, names.q_norm)}.weight"] = weights.q_norm_d
        targets[f"{names.of_layer(index, names.k_norm)}.weight"] = weights.k_norm_d
    if weights.sinks_H is not None:
        targets[names.of_layer(index, names.sinks)] = weights.sinks_H
    return targets


def _targets_by_head(config: DecoderConfig, name: str, weights: AttentionWeights) -> dict[str, torch.Tensor]:
    """[heads, 3, head_dim, hidden], which the checkpoint has as [heads x 3 x head_dim, hidden]."""
    assert config.num_kv_heads == config.num_heads, "a query head for each key head"
    by_head = (3, config.num_heads, config.head_dim)
    targets = {f"{name}.weight": weights.w_qkv_DX.t().view(*by_head, config.hidden_size).transpose(0, 1)}
    if weights.b_qkv_X is not None:
        targets[f"{name}.bias"] = weights.b_qkv_X.view(by_head).transpose(0, 1)
    return targets


def _mlp_targets(config: DecoderConfig, parts: LayerParts, weights: MlpWeights) -> dict[str, torch.Tensor]:
    return _targets(config, parts.gate_up, weights.w_gate_up_DF2, weights.b_gate_up_F2) | _targets(
        config, parts.down, weights.w_down_FD, weights.b_down_D
    )


def _routed_targets(prefix: str, weights: RoutedWeights, layout: RoutedLayout) -> TensorTargets:
    block, other_block = f"{prefix}.{layout.block}", f"{prefix}.{layout.other_block}"
    router_ED = weights.w_router_DE.t()
    experts = _expert_targets(prefix, weights.experts, layout)
    others = dict(experts.others)
    router = f"{block}.{layout.router}"
    if other_block != block:
        others[f"{other_block}.{layout.router}.weight"] = OtherTarget(tensor=router_ED, replaces=(f"{router}.weight",))
    targets = {f"{router}.weight": router_ED, **experts.tensors, **_shared_targets(f"{block}.{layout.shared}", weights)}
    if weights.b_router_E is not None:
        targets[f"{router}.bias"] = weights.b_router_E
    return TensorTargets(tensors=targets, is_ignored=experts.is_ignored, others=others, elsewhere=experts.elsewhere)


def _expert_targets(prefix: str, experts: ExpertWeights, layout: RoutedLayout) -> TensorTargets:
    block, fused = f"{prefix}.{layout.block}.experts", f"{prefix}.{layout.other_block}.experts"
    if layout.is_in_first:
        return fused_expert_targets(block, experts, is_interleaved=layout.is_interleaved)
    return expert_targets(block, experts, names=layout.names, fused_prefix=fused)


def _shared_targets(prefix: str, weights: RoutedWeights) -> dict[str, torch.Tensor]:
    """Of the MLP that all rows share, which has no biases."""
    if weights.shared is None:
        return {}
    gate_DF, up_DF = weights.shared.w_gate_up_DF2.chunk(2, dim=1)
    targets = {
        f"{prefix}.gate_proj.weight": gate_DF.t(),
        f"{prefix}.up_proj.weight": up_DF.t(),
        f"{prefix}.down_proj.weight": weights.shared.w_down_FD.t(),
    }
    if weights.w_shared_gate_D1 is not None:
        targets[f"{prefix}_gate.weight"] = weights.w_shared_gate_D1.t()
    return targets


def _targets(
    config: DecoderConfig, parts: tuple[Part, ...], weight: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Of a weight of ours, in columns."""
    targets = {}
    for part in parts:
        columns = weight.narrow(1, part.first, part.size)
        targets[f"{part.name}.weight"] = columns if config.names.is_in_first else columns.t()
        if bias is not None:
            targets[f"{part.name}.bias"] = bias.narrow(0, part.first, part.size)
    return targets


def _is_ignored(name: str, *, config: DecoderConfig) -> bool:
    # Tied checkpoints sometimes carry the embedding a second time.
    return name.endswith(config.names.ignored) or (config.is_tied and name == f"{config.names.head}.weight")
