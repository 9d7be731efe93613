"""Multi-head latent attention on a device (DeepSeek-V2, 2024, section 2.1), from residual to residual: absorbed, or
up-projected where a step has long chunks of prompts.

    w_in -> query (-> norm -> w_query) -> plain part x key expansion ----+
                                       -> RoPE part -> RoPE -------------+-> attention over latents
         -> latent -> norm, RoPE key -> RoPE -> the pool                     -> x value expansion -> w_out

Legend: T rows, D hidden size, H heads, Q query rank, n / r / v plain, RoPE and value dims of a head, R rank of the
latents, E = n + v, Y = n + r, C = R + r, S tokens of the pool.
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

    w_expand_HER: expansions of latents to keys and values, applied to queries and to results instead, unless a step's
    chunks are so long that it is faster as it is. nope_dim: n.
    """

    norm: Norm
    w_in: Linear
    query: LatentQuery | None
    latent_norm: LatentNorm
    w_expand_HER: torch.Tensor
    nope_dim: int
    w_out: Linear
    angles: RopeAngles
    latents_S1C: torch.Tensor
    ops: Ops

    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        ops, nope_dim = self.ops, self.nope_dim
        num_heads, _, rank = self.w_expand_HER.shape
        latent_dim = self.latents_S1C.shape[2]
        in_TX = _finished(self.w_in.normed(residual, self.norm))
        query_TQ, kv_TC = in_TX[:, :-latent_dim], in_TX[:, -latent_dim:]
        if self.query is not None:
            normed_TQ = ops.rms_norm(query_TQ, self.query.norm_Q, self.query.eps)
            query_TQ = _finished(self.query.w_query.multiplied(normed_TQ))
        q_THY = query_TQ.reshape(len(query_TQ), num_heads, -1)
        q_THC = ops.mla_rows(q_THY, kv_TC, self.latent_norm, self.angles, target, self.latents_S1C.squeeze(1))
        first = attention.first_projected
        if first is None:
            o_THv = self._absorbed(q_THY, q_THC, attention)
        else:
            o_THv = q_THY.new_empty(*q_THY.shape[:2], self.w_expand_HER.shape[1] - nope_dim)
            if first:
                o_THv[:first] = self._absorbed(q_THY[:first], q_THC[:first], attention)
            of_plain, of_rope = q_THY[..., :nope_dim], q_THC[..., rank:]
            attention.attend_projected(of_plain, of_rope, self.latents_S1C, self.w_expand_HER, o_THv)
        self.w_out.add_to(residual, o_THv.flatten(1))

    def _absorbed(self, q_THY: torch.Tensor, q_THC: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """Expansions of latents are applied to queries and to results. q_THC: its last r numbers are set."""
        key_HRn = self.w_expand_HER[:, : self.nope_dim].transpose(1, 2)
        rank = key_HRn.shape[1]
        self.ops.head_gemm(q_THY[..., : self.nope_dim], key_HRn, out=q_THC[..., :rank])
        value_HvR = self.w_expand_HER[:, self.nope_dim :]
        o_THv = attention.attend_expanded(q_THC, self.latents_S1C, value_HvR)
        if o_THv is not None:
            return o_THv
        o_THR = attention.attend(q_THC, self.latents_S1C, self.latents_S1C[..., :rank], None)
        return self.ops.head_gemm(o_THR, value_HvR)


def _finished(gemm: DeferredNormGemm) -> torch.Tensor:
    """With the bias, where the GEMM left it to the reader."""
    assert gemm.norm_input_TD is None
    return gemm.out_TN if gemm.bias_N is None else gemm.out_TN + gemm.bias_N
