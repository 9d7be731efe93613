"""The weights of a decoder, in the layout that the maths wants.

Legend: D hidden size, d head_dim, Q heads x d, K kv heads x d, X = Q + K + K, F mlp size, E experts, V vocabulary.
Projections are [in, out], so that a small-M GEMM reads them in order; q, k, v are one, gate and up are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, HeadNorm, NormKind
from radixmesh.daemons.worker.models.experts import ExpertWeights
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.sharding import share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Biases, head norms, output norm and sinks are None where the model has none; a norm before that it lacks has no
    elements. Head norms that are over all heads have the size Q and K."""

    norm_D: torch.Tensor
    w_qkv_DX: torch.Tensor
    b_qkv_X: torch.Tensor | None
    q_norm_d: torch.Tensor | None
    k_norm_d: torch.Tensor | None
    w_o_QD: torch.Tensor
    b_o_D: torch.Tensor | None
    norm_bias_D: torch.Tensor | None = None
    output_norm_D: torch.Tensor | None = None
    sinks_H: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """Biases are None where the model has none. An MLP without a gate has the up projection alone, of size F."""

    w_gate_up_DF2: torch.Tensor
    b_gate_up_F2: torch.Tensor | None
    w_down_FD: torch.Tensor
    b_down_D: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedWeights:
    """Experts, and the projection that says how well each suits a row; the MLP that all rows share, and its gate."""

    w_router_DE: torch.Tensor
    experts: ExpertWeights
    b_router_E: torch.Tensor | None = None
    shared: MlpWeights | None = None
    w_shared_gate_D1: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Norms as those of the attention."""

    attention: AttentionWeights
    mlp_norm_D: torch.Tensor
    mlp: MlpWeights | RoutedWeights
    mlp_norm_bias_D: torch.Tensor | None = None
    mlp_output_norm_D: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a rank; V is its share of the vocabulary. O is V of a model that generates, 1 of one that scores.
    `embedding_VD` is a view of `head_DO` where the two are tied. `positions_PD`: learned vectors of positions."""

    embedding_VD: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm_D: torch.Tensor
    head_DO: torch.Tensor
    final_norm_bias_D: torch.Tensor | None = None
    positions_PD: torch.Tensor | None = None

    @classmethod
    def empty(cls, config: DecoderConfig, placement: Placement) -> DecoderWeights:
        """Memory for the weights, not filled."""
        new = _Memory(placement)
        hidden, has_bias = config.hidden_size, config.norm_kind is NormKind.LAYER
        vocab_size = share_of(config.vocab_size, placement.group.size, placement.group.rank).size
        head_DO = new(config.hidden_size, 1 if config.is_scoring else vocab_size)
        return cls(
            embedding_VD=head_DO.t() if config.is_tied else new.table(vocab_size, config.hidden_size),
            layers=tuple(
                DecoderLayer(
                    attention=_attention(config, new),
                    mlp_norm_D=new(hidden if config.has_input_norms else 0),
                    mlp=_experts(config, new, placement) if config.has_experts(layer) else _mlp(config, new),
                    mlp_norm_bias_D=new(hidden) if has_bias else None,
                    mlp_output_norm_D=new(hidden) if config.has_output_norms else None,
                )
                for layer in range(config.num_layers)
            ),
            final_norm_D=new(hidden),
            head_DO=head_DO,
            final_norm_bias_D=new(hidden) if has_bias else None,
            positions_PD=new.table(config.max_total_len, hidden) if config.has_position_embedding else None,
        )


class _Memory:
    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def __call__(self, *shape: int) -> torch.Tensor:
        """[features], or a projection [in, out]."""
        if len(shape) == 2 and self._placement.is_out_first:
            return self.table(shape[1], shape[0]).t()
        return self.table(*shape)

    def projection(self, num_in: int, num_out: int) -> torch.Tensor:
        """Of a layer."""
        if not self._placement.has_projections:
            return torch.empty(num_in, num_out, dtype=self._placement.dtype, device="meta")
        return self(num_in, num_out)

    def table(self, *shape: int) -> torch.Tensor:
        """As it is seen, so it lies."""
        return torch.empty(*shape, dtype=self._placement.dtype, device=self._placement.device)


def _attention(config: DecoderConfig, new: _Memory) -> AttentionWeights:
    qkv_size, hidden = config.query_size + 2 * config.kv_size, config.hidden_size
    norm_sizes: tuple[int, int] | None = None
    if config.head_norm is HeadNorm.EACH:
        norm_sizes = config.head_dim, config.head_dim
    elif config.head_norm is HeadNorm.ALL:
        norm_sizes = config.query_size, config.kv_size
    return AttentionWeights(
        norm_D=new(hidden if config.has_input_norms else 0),
        w_qkv_DX=new.projection(hidden, qkv_size),
        b_qkv_X=new(qkv_size) if config.has_qkv_bias else None,
        q_norm_d=None if norm_sizes is None else new(norm_sizes[0]),
        k_norm_d=None if norm_sizes is None else new(norm_sizes[1]),
        w_o_QD=new.projection(config.query_size, hidden),
        b_o_D=new(hidden) if config.has_output_bias else None,
        norm_bias_D=new(hidden) if config.norm_kind is NormKind.LAYER else None,
        output_norm_D=new(hidden) if config.has_output_norms else None,
        sinks_H=new(config.num_heads) if config.has_sinks else None,
    )


def _mlp(config: DecoderConfig, new: _Memory, mlp_size: int | None = None) -> MlpWeights:
    size = mlp_size or config.mlp_size
    up_size = 2 * size if config.is_gated else size
    return MlpWeights(
        w_gate_up_DF2=new.projection(config.hidden_size, up_size),
        b_gate_up_F2=new(up_size) if config.has_mlp_bias else None,
        w_down_FD=new.projection(size, config.hidden_size),
        b_down_D=new(config.hidden_size) if config.has_mlp_bias else None,
    )


def _experts(config: DecoderConfig, new: _Memory, placement: Placement) -> RoutedWeights:
    experts = config.experts
    assert experts is not None
    return RoutedWeights(
        w_router_DE=new(config.hidden_size, experts.num_experts),
        experts=ExpertWeights.empty(
            num_experts=experts.num_experts,
            hidden_size=config.hidden_size,
            mlp_size=experts.mlp_size,
            placement=placement,
            has_bias=experts.has_bias,
        ),
        b_router_E=new(experts.num_experts) if experts.has_bias else None,
        shared=_mlp(config, new, experts.shared_mlp_size) if experts.shared_mlp_size else None,
        w_shared_gate_D1=new(config.hidden_size, 1) if experts.has_shared_gate else None,
    )
