"""A rank's share of a DeepSeek model: its config, and the slices of the checkpoint's tensors that it holds.

Heads are divided; latents are not: every rank computes and caches them whole. Experts are divided by width, each rank
having a part of every one, or are placed whole, each rank having some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertShare
from radixmesh.daemons.worker.models.deepseek.checkpoint import layer_prefix
from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig
from radixmesh.daemons.worker.models.expert_checkpoint import (
    expert_slices,
    mlp_slices,
    placed_expert_slices,
)
from radixmesh.daemons.worker.models.sharding import Share, share_heads, share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekShard:
    """config: of the rank's share, whose sizes are those of its weights; the vocabulary stays whole. slices: by a
    tensor's name in the checkpoint; others are whole."""

    config: DeepseekConfig
    slices: Mapping[str, TensorSlice]


def shard_deepseek(
    config: DeepseekConfig, num_ranks: int, rank: int, *, block: int = 1, placed: ExpertShare | None = None
) -> DeepseekShard:
    """block: features in are cut at multiples of it, those of the scales of FP8 weights. placed: the experts that this
    rank holds whole; None: a part of each.

    Raises MeshError INVALID_ARGUMENT for too many ranks.
    """
    of_value = share_heads(config.num_heads, config.num_heads, num_ranks, rank, head_dim=config.value_dim, block=block)
    heads = of_value.query

    def share(size: int) -> Share:
        return share_of(size, num_ranks, rank, unit=block) if size else Share(0, 0)

    mlp, shared = share(config.mlp_size), share(config.shared_mlp_size)
    expert = share(config.expert_mlp_size) if placed is None else Share(0, config.expert_mlp_size)
    vocabulary = TensorSlice(0, (share_of(config.vocab_size, num_ranks, rank),), config.vocab_size)
    slices = {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
    for layer in range(config.num_layers + config.num_mtp_layers):
        prefix = layer_prefix(layer)
        slices.update((f"{prefix}self_attn.{name}", cut) for name, cut in _attention_slices(config, heads))
        if config.is_moe(layer):
            assert config.router is not None
            num_experts = config.router.num_experts
            if placed is not None:
                slices.update(placed_expert_slices(f"{prefix}mlp.experts", placed, num_experts))
            else:
                slices.update(expert_slices(f"{prefix}mlp.experts", num_experts, expert, config.expert_mlp_size))
            slices.update(mlp_slices(f"{prefix}mlp.shared_experts", shared, config.shared_mlp_size))
        else:
            slices.update(mlp_slices(f"{prefix}mlp", mlp, config.mlp_size))
    local = replace(
        config,
        num_heads=heads.size,
        mlp_size=mlp.size,
        expert_mlp_size=expert.size,
        shared_mlp_size=shared.size,
    )
    return DeepseekShard(config=local, slices=slices)


def _attention_slices(config: DeepseekConfig, heads: Share) -> Iterator[tuple[str, TensorSlice]]:
    def of_heads(dim: int, size: int) -> TensorSlice:
        return TensorSlice(dim, (heads.times(size),), config.num_heads * size)

    # The second projection of queries, or the only one.
    query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    yield f"{query}.weight", of_heads(0, config.query_dim)
    yield "kv_b_proj.weight", of_heads(0, config.nope_dim + config.value_dim)
    yield "o_proj.weight", of_heads(1, config.value_dim)
