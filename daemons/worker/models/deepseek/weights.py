"""The weights of a DeepSeek model, in the layout that the maths wants.

Legend: D hidden size, H heads, Q query rank, n / r / v a head's plain, RoPE and value dims, R rank of the latents,
F mlp size, E experts, V vocabulary. Projections are [in, out]; what reads the same rows is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig, TopkMethod
from radixmesh.daemons.worker.models.experts import ExpertWeights
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.sharding import share_of

_New = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionWeights:
    """Multi-head latent attention. The query's second projection is None where the model projects it at once."""

    w_in_DX: torch.Tensor
    """X = (Q, or H x (n + r)) + R + r: query, latent, RoPE key."""
    b_in_X: torch.Tensor | None
    query_norm_Q: torch.Tensor | None
    w_query_QY: torch.Tensor | None
    """Y = H x (n + r)."""
    latent_norm_R: torch.Tensor
    w_expand_HER: torch.Tensor
    """E = n + v: per head, from a latent to the plain part of its key, and to its value. Never applied to cached
    latents: its first part goes into the query, its second comes after the attention."""
    w_out_OD: torch.Tensor
    """O = H x v."""
    b_out_D: torch.Tensor | None

    @classmethod
    def empty(cls, config: DeepseekConfig, new: _New, projection: _New) -> LatentAttentionWeights:
        size, rank, heads, bias = config.hidden_size, config.q_lora_rank, config.num_heads, config.has_attention_bias
        num_in = config.first_query_size + config.latent_dim
        return cls(
            w_in_DX=projection(size, num_in),
            # A query that is projected at once has no bias: zeros there, the rest is filled.
            b_in_X=new(num_in).zero_() if bias else None,
            query_norm_Q=new(rank) if rank is not None else None,
            w_query_QY=projection(rank, heads * config.query_dim) if rank is not None else None,
            latent_norm_R=new(config.kv_lora_rank),
            w_expand_HER=new(heads, config.nope_dim + config.value_dim, config.kv_lora_rank),
            w_out_OD=projection(heads * config.value_dim, size),
            b_out_D=new(size) if bias else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    w_gate_up_DF2: torch.Tensor
    w_down_FD: torch.Tensor

    @classmethod
    def empty(cls, hidden_size: int, mlp_size: int, projection: _New) -> MlpWeights:
        return cls(w_gate_up_DF2=projection(hidden_size, 2 * mlp_size), w_down_FD=projection(mlp_size, hidden_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """Router (float32 always), routed experts, and the experts that see every row as one MLP."""

    w_router_DE: torch.Tensor
    b_router_E: torch.Tensor | None
    """Added to scores for choosing only."""
    experts: ExpertWeights
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekLayer:
    attention_norm_D: torch.Tensor
    attention: LatentAttentionWeights
    mlp_norm_D: torch.Tensor
    mlp: MlpWeights | MoeWeights

    @classmethod
    def empty(cls, config: DeepseekConfig, index: int, placement: Placement) -> DeepseekLayer:
        new, projection, size = _allocator(placement), _allocator(placement.of_projections()), config.hidden_size
        is_moe = config.is_moe(index)
        return cls(
            attention_norm_D=new(size),
            attention=LatentAttentionWeights.empty(config, new, projection),
            mlp_norm_D=new(size),
            mlp=_empty_moe(config, placement) if is_moe else MlpWeights.empty(size, config.mlp_size, projection),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """Predicts one more token, from a row of the layer before and the embedding of the token after it; embedding and
    output projection are the model's (DeepSeek-V3 report, section 2.2). It drafts, with --speculative-algorithm mtp."""

    embedding_norm_D: torch.Tensor
    hidden_norm_D: torch.Tensor
    w_join_GD: torch.Tensor
    """G = 2D: embedding, hidden."""
    block: DeepseekLayer
    head_norm_D: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekWeights:
    """All weights of a rank; V is its share of the vocabulary. `embedding_VD` is a view of `head_DV` where the two are
    tied."""

    embedding_VD: torch.Tensor
    layers: tuple[DeepseekLayer, ...]
    final_norm_D: torch.Tensor
    head_DV: torch.Tensor
    mtp_layers: tuple[MtpLayer, ...]

    @classmethod
    def empty(cls, config: DeepseekConfig, placement: Placement, *, num_mtp_layers: int) -> DeepseekWeights:
        """Memory for the weights, not filled."""
        new, size = _allocator(placement), config.hidden_size
        vocab = share_of(config.vocab_size, placement.group.size, placement.group.rank).size
        # Embeddings of a tied model are rows of it, which kernels read.
        head_DV = new(size, vocab)
        rows = _allocator(replace(placement, is_out_first=False))
        return cls(
            embedding_VD=head_DV.t() if config.is_tied else rows(vocab, size),
            layers=tuple(DeepseekLayer.empty(config, index, placement) for index in range(config.num_layers)),
            final_norm_D=new(size),
            head_DV=head_DV,
            mtp_layers=tuple(
                MtpLayer(
                    embedding_norm_D=new(size),
                    hidden_norm_D=new(size),
                    w_join_GD=_allocator(placement.of_projections())(2 * size, size),
                    block=DeepseekLayer.empty(config, config.num_layers + index, placement),
                    head_norm_D=new(size),
                )
                for index in range(num_mtp_layers)
            ),
        )


def _empty_moe(config: DeepseekConfig, placement: Placement) -> MoeWeights:
    assert config.router is not None
    num_experts, size = config.router.num_experts, config.hidden_size
    exact = replace(placement, dtype=torch.float32)
    is_biased = config.router.method is TopkMethod.BIASED
    return MoeWeights(
        w_router_DE=_allocator(exact)(size, num_experts),
        b_router_E=_allocator(exact)(num_experts) if is_biased else None,
        experts=ExpertWeights.empty(
            num_experts=num_experts, hidden_size=size, mlp_size=config.expert_mlp_size, placement=placement
        ),
        shared=MlpWeights.empty(size, config.shared_mlp_size, _allocator(placement.of_projections()))
        if config.shared_mlp_size
        else None,
    )


def _allocator(placement: Placement) -> _New:
    """Matrices are projections, [in, out]; they lie the other way round where the placement puts features out first."""

    def new(*shape: int) -> torch.Tensor:
        if len(shape) == 2 and placement.is_out_first:
            return torch.empty(*reversed(shape), dtype=placement.dtype, device=placement.device).t()
        return torch.empty(*shape, dtype=placement.dtype, device=placement.device)

    return new
