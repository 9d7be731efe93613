"""A rank's share of a decoder: its config, and the slices of the checkpoint's tensors that it holds.

Legend: D hidden size, Q heads x head_dim, K kv heads x head_dim, F mlp size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertShare
from radixmesh.daemons.worker.models.decoder.checkpoint import RoutedLayout
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, ExpertsConfig, HeadNorm
from radixmesh.daemons.worker.models.expert_checkpoint import (
    expert_slices,
    fused_expert_slices,
    mlp_slices,
    placed_expert_slices,
)
from radixmesh.daemons.worker.models.sharding import HeadShares, Share, share_heads, share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShard:
    """config: of the rank's share, whose sizes are those of its weights; the vocabulary stays whole. vocabulary: its
    rows of embedding and head. slices: by a tensor's name in the checkpoint; others are whole."""

    config: DecoderConfig
    kv_heads: Share
    vocabulary: Share
    slices: Mapping[str, TensorSlice]


def shard_decoder(
    config: DecoderConfig,
    num_ranks: int,
    rank: int,
    *,
    block: int = 1,
    layout: RoutedLayout | None = None,
    placed: ExpertShare | None = None,
) -> DecoderShard:
    """layout: names of routed experts, where there are any. block: features in are cut at multiples of it, those of the
    scales of FP8 weights. placed: the experts that this rank holds whole; None: a part of each.

    Raises MeshError UNSUPPORTED for a decoder that is not cut yet, INVALID_ARGUMENT for too many ranks.
    """
    layout = layout or RoutedLayout()
    _check(config, layout)
    heads = share_heads(config.num_heads, config.num_kv_heads, num_ranks, rank, head_dim=config.head_dim, block=block)
    mlp = share_of(config.mlp_size, num_ranks, rank, unit=block)
    vocabulary = share_of(config.vocab_size, num_ranks, rank)
    slices = dict(_vocabulary_slices(config, vocabulary))
    experts = None if config.experts is None else _share_experts(config.experts, num_ranks, rank, block, placed)
    for layer in range(config.num_layers):
        slices.update(_layer_slices(config, layer, heads, mlp))
        if experts is not None and config.has_experts(layer):
            slices.update(_expert_slices(config, layer, experts, layout))
    local = replace(config, num_heads=heads.query.size, num_kv_heads=heads.kv.size, mlp_size=mlp.size)
    if experts is not None:
        sizes = replace(experts.whole, mlp_size=experts.routed.size, shared_mlp_size=experts.shared.size)
        local = replace(local, experts=sizes)
    return DecoderShard(config=local, kv_heads=heads.kv, vocabulary=vocabulary, slices=slices)


def _vocabulary_slices(config: DecoderConfig, share: Share) -> Iterator[tuple[str, TensorSlice]]:
    cut = TensorSlice(0, (share,), config.vocab_size)
    yield f"{config.names.embedding}.weight", cut
    if not config.is_tied and not config.is_scoring:
        yield f"{config.names.head}.weight", cut


def _layer_slices(
    config: DecoderConfig, layer: int, heads: HeadShares, mlp: Share
) -> Iterator[tuple[str, TensorSlice]]:
    names, query, kv = config.names, heads.query.times(config.head_dim), heads.kv.times(config.head_dim)
    whole_qkv = ((query, config.query_size), (kv, config.kv_size), (kv, config.kv_size))
    whole_up = ((mlp, config.mlp_size),) * (2 if config.is_gated else 1)
    for of, shares in ((names.qkv, whole_qkv), (names.gate_up, whole_up)):
        for name, cut in zip(of, _columns(shares, len(of)), strict=True):
            out_dim = 1 if names.is_in_first else 0
            yield f"{names.of_layer(layer, name)}.weight", cut._replace(dim=out_dim)
            yield f"{names.of_layer(layer, name)}.bias", cut
    in_dim = 0 if names.is_in_first else 1
    yield f"{names.of_layer(layer, names.o)}.weight", TensorSlice(in_dim, (query,), config.query_size)
    yield f"{names.of_layer(layer, names.down)}.weight", TensorSlice(in_dim, (mlp,), config.mlp_size)
    if config.has_sinks:
        yield names.of_layer(layer, names.sinks), TensorSlice(0, (heads.query,), config.num_heads)


def _columns(shares: tuple[tuple[Share, int], ...], num_tensors: int) -> list[TensorSlice]:
    """Of projections that the checkpoint holds apart, or side by side in one tensor."""
    if num_tensors == len(shares):
        return [TensorSlice(0, (share,), size) for share, size in shares]
    assert num_tensors == 1, num_tensors
    ranges, first = [], 0
    for share, size in shares:
        ranges.append((first + share.start, first + share.stop))
        first += size
    return [TensorSlice(0, tuple(ranges), first)]


class _ExpertShares(NamedTuple):
    whole: ExpertsConfig
    routed: Share
    shared: Share
    placed: ExpertShare | None


def _share_experts(
    config: ExpertsConfig, num_ranks: int, rank: int, block: int, placed: ExpertShare | None
) -> _ExpertShares:
    """Of every expert, unless some are here whole, and of the MLP that all rows share, a part of the width."""
    shared = Share(0, 0)
    if config.shared_mlp_size:
        shared = share_of(config.shared_mlp_size, num_ranks, rank, unit=block)
    routed = Share(0, config.mlp_size)
    if placed is None:
        routed = share_of(config.mlp_size, num_ranks, rank, unit=block)
    return _ExpertShares(config, routed, shared, placed)


def _expert_slices(
    config: DecoderConfig, layer: int, experts: _ExpertShares, layout: RoutedLayout
) -> Iterator[tuple[str, TensorSlice]]:
    prefix, whole = config.names.of_layer(layer, ""), experts.whole
    block = f"{prefix}{layout.block}"
    if experts.placed is not None:
        fused = f"{block}.experts" if layout.is_in_first else f"{prefix}{layout.other_block}.experts"
        yield from placed_expert_slices(fused, experts.placed, whole.num_experts)
    elif layout.is_in_first:
        yield from fused_expert_slices(f"{block}.experts", experts.routed, whole.mlp_size)
    else:
        fused = f"{prefix}{layout.other_block}.experts"
        yield from expert_slices(
            f"{block}.experts", whole.num_experts, experts.routed, whole.mlp_size, layout.names, fused
        )
    if whole.shared_mlp_size:
        yield from mlp_slices(f"{block}.{layout.shared}", experts.shared, whole.shared_mlp_size)


def _check(config: DecoderConfig, layout: RoutedLayout) -> None:
    missing = {
        "experts whose gate and up alternate": config.experts is not None and layout.is_interleaved,
        "experts with biases": config.experts is not None and config.experts.has_bias,
        "norms over all heads": config.head_norm is HeadNorm.ALL,
        "queries, keys and values by head": config.names.is_qkv_by_head,
    }
    what = ", ".join(name for name, is_there in missing.items() if is_there)
    if what:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"the model has {what}, which is not divided among ranks yet: set --tp-size 1 and --ep-size 1",
            {"feature": what},
        )
