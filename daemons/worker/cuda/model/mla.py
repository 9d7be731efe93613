"""Multi-head latent attention on a device, absorbed (DeepSeek-V2, 2024, section 2.1), from residual to residual.

    w_in -> query (-> norm -> w_query) -> plain part x key expansion ----+
                                       -> RoPE part -> RoPE -------------+-> attention over latents
         -> latent -> norm, RoPE key -> RoPE -> the pool                     -> x value expansion -> w_out

Legend: T rows, D hidden size, H heads, Q query rank, n / r / v plain, RoPE and value dims of a head, R rank of the
latents, Y = n + r, C = R + r, S tokens of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.linear import Linear, Norm, Residual
from radixmesh.daemons.worker.cuda.model.attention import Attention
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.mla_rows import LatentNorm
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentQuery:
    """Second projection of queries that have a rank, [H Y, Q], behind a norm of their own."""

    norm_Q: torch.Tensor
    eps: float
    w_query: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention(Attention):
    """One plane, [S, 1, C]: latents and RoPE keys, which all heads share. w_in: query or its rank, latent, RoPE key.

    key_HRn, value_HvR: expansions of latents, applied to queries and to results instead.
    """

    norm: Norm
    w_in: Linear
    query: LatentQuery | None
    latent_norm: LatentNorm
    key_HRn: torch.Tensor
    value_HvR: torch.Tensor
    w_out: Linear
    angles: RopeAngles
    latents_S1C: torch.Tensor
    ops: Ops

    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        ops, (num_heads, rank, nope_dim) = self.ops, self.key_HRn.shape
        latent_dim = self.latents_S1C.shape[2]
        in_TX = _finished(self.w_in.normed(residual, self.norm))
        query_TQ, kv_TC = in_TX[:, :-latent_dim], in_TX[:, -latent_dim:]
        if self.query is not None:
            normed_TQ = ops.rms_norm(query_TQ, self.query.norm_Q, self.query.eps)
            query_TQ = _finished(self.query.w_query.multiplied(normed_TQ))
        q_THY = query_TQ.reshape(len(query_TQ), num_heads, -1)
        q_THC = ops.mla_rows(q_THY, kv_TC, self.latent_norm, self.angles, target, self.latents_S1C.squeeze(1))
        ops.head_gemm(q_THY[..., :nope_dim], self.key_HRn, out=q_THC[..., :rank])
        o_THR = attention.attend(q_THC, self.latents_S1C, self.latents_S1C[..., :rank], None)
        self.w_out.add_to(residual, ops.head_gemm(o_THR, self.value_HvR).flatten(1))


def _finished(gemm: DeferredNormGemm) -> torch.Tensor:
    """With the bias, where the GEMM left it to the reader."""
    assert gemm.norm_input_TD is None
    return gemm.out_TN if gemm.bias_N is None else gemm.out_TN + gemm.bias_N
