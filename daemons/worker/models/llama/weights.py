"""The weights of a Llama model, in the layout that the maths wants.

Legend: D hidden size, Q heads x head_dim, K kv heads x head_dim, F mlp size, V vocabulary. Projections are [in, out],
so that a product of few rows reads them in order; q, k, v are one, gate and up are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.models.model import Placement

from .config import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """One block; biases are None where the model has none."""

    attention_norm_D: torch.Tensor
    w_qkv_DX: torch.Tensor
    """X = Q + K + K."""
    b_qkv_X: torch.Tensor | None
    w_o_QD: torch.Tensor
    b_o_D: torch.Tensor | None
    mlp_norm_D: torch.Tensor
    w_gate_up_DF2: torch.Tensor
    b_gate_up_F2: torch.Tensor | None
    w_down_FD: torch.Tensor
    b_down_D: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights. `embedding_VD` is a view of `head_DV` where the two are tied."""

    embedding_VD: torch.Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm_D: torch.Tensor
    head_DV: torch.Tensor

    @classmethod
    def empty(cls, config: LlamaConfig, placement: Placement) -> LlamaWeights:
        """Memory for the weights, not filled."""

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=placement.dtype, device=placement.device)

        size, vocab, mlp, query = config.hidden_size, config.vocab_size, config.mlp_size, config.query_size
        qkv = query + 2 * config.kv_size
        head_DV = new(size, vocab)
        return cls(
            embedding_VD=head_DV.t() if config.is_tied else new(vocab, size),
            layers=tuple(
                LlamaLayer(
                    attention_norm_D=new(size),
                    w_qkv_DX=new(size, qkv),
                    b_qkv_X=new(qkv) if config.has_attention_bias else None,
                    w_o_QD=new(query, size),
                    b_o_D=new(size) if config.has_attention_bias else None,
                    mlp_norm_D=new(size),
                    w_gate_up_DF2=new(size, 2 * mlp),
                    b_gate_up_F2=new(2 * mlp) if config.has_mlp_bias else None,
                    w_down_FD=new(mlp, size),
                    b_down_D=new(size) if config.has_mlp_bias else None,
                )
                for _ in range(config.num_layers)
            ),
            final_norm_D=new(size),
            head_DV=head_DV,
        )
