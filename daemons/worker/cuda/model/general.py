"""Attention and MLP with the variants of `DecoderConfig` that no fused kernel has: other norms and activations, norms
behind a part, scaled additions. Right first: what fused kernels do for Llama's shape is plain torch here.

Legend: T rows, D hidden size, H heads, K kv heads, d head_dim, X = (H + 2K) d, F mlp size, S tokens of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.linear import Linear, Residual
from radixmesh.daemons.worker.cuda.model.attention import Attention, PoolScales
from radixmesh.daemons.worker.cuda.model.mlp import Mlp
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.daemons.worker.models.activations import SILU, Activation
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, HeadNorm, NormKind
from radixmesh.daemons.worker.models.decoder.norms import Norm
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.rope_kv import HeadNorms, HeadShape, KvTarget, RopeAngles

_NO_NORMS = HeadNorms(None, None, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralAttention(Attention):
    """norm, output_norm: of rows [T, D]. q_norm, k_norm: of each head, or of all heads of a row as one vector."""

    norm: Norm
    qkv: Linear
    o: Linear
    output_norm: Norm
    scale: float
    heads: HeadShape
    head_norm: HeadNorm
    q_norm: Norm
    k_norm: Norm
    angles: RopeAngles
    keys_SKd: torch.Tensor
    values_SKd: torch.Tensor
    window: int | None
    ops: Ops
    scales: PoolScales

    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        qkv_TX = _finished(self.qkv.multiplied(self.norm(residual.rows())))
        if self.head_norm is not HeadNorm.NONE:
            self._norm_heads(qkv_TX)
        q_THd = self.ops.rope_write_kv(
            DeferredNormGemm(qkv_TX),
            self.angles,
            target,
            self.keys_SKd,
            self.values_SKd,
            self.heads,
            _NO_NORMS,
            self.scales.factors_X,
        )
        o_THd = self.scales.of_values(attention.attend(q_THd, self.keys_SKd, self.values_SKd, self.window))
        y_TD = self.output_norm(_finished(self.o.multiplied(o_THd.flatten(1))))
        residual.rows().add_(y_TD, alpha=self.scale)

    def _norm_heads(self, qkv_TX: torch.Tensor) -> None:
        """Norms queries and keys in place."""
        query_size = self.heads.num_heads * self.heads.head_dim
        key_end = query_size + self.heads.num_kv_heads * self.heads.head_dim
        for x, norm in ((qkv_TX[:, :query_size], self.q_norm), (qkv_TX[:, query_size:key_end], self.k_norm)):
            if self.head_norm is HeadNorm.EACH:
                x.copy_(norm(x.reshape(len(x), -1, self.heads.head_dim)).flatten(1))
            else:
                x.copy_(norm(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralMlp(Mlp):
    """gate_up is up alone, [F, D], where is_gated is False."""

    norm: Norm
    gate_up: Linear
    down: Linear
    output_norm: Norm
    scale: float
    activation: Activation
    is_gated: bool

    def run(self, residual: Residual, source_TD: torch.Tensor | None = None) -> None:
        rows_TD = residual.rows()
        up_TF = _finished(self.gate_up.multiplied(self.norm(rows_TD if source_TD is None else source_TD)))
        if self.is_gated:
            gate_TF, up_TF = up_TF.chunk(2, dim=1)
            up_TF = self.activation(gate_TF) * up_TF
        else:
            up_TF = self.activation(up_TF)
        rows_TD.add_(self.output_norm(_finished(self.down.multiplied(up_TF))), alpha=self.scale)


def needs_general_attention(config: DecoderConfig) -> bool:
    """True where the fused attention part lacks a feature of the config."""
    return _has_other_norms(config) or config.head_norm is HeadNorm.ALL


def needs_general_mlp(config: DecoderConfig) -> bool:
    """As `needs_general_attention`, of the MLP. A fused one behind a general attention would take sums of squares of
    the residual that are not of its rows any more."""
    return needs_general_attention(config) or config.activation not in SILU or not config.is_gated


def _has_other_norms(config: DecoderConfig) -> bool:
    return (
        config.norm_kind is not NormKind.RMS
        or not config.has_input_norms
        or config.has_output_norms
        or config.is_parallel
        or config.residual_scale != 1.0
    )


def _finished(gemm: DeferredNormGemm) -> torch.Tensor:
    """The GEMM of rows that were normed before, with its bias."""
    assert gemm.norm_input_TD is None
    return gemm.out_TN if gemm.bias_N is None else gemm.out_TN.add_(gemm.bias_N)
