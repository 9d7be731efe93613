"""Attention of a layer, from the residual to the residual.

Legend: T rows, D hidden size, H heads, K kv heads, d head_dim, S tokens of the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.linear import Linear, Norm, Residual
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, HeadNorm
from radixmesh.daemons.worker.models.decoder.weights import AttentionWeights
from radixmesh.kernels.kv_fp8 import KvScales
from radixmesh.kernels.rope_kv import HeadNorms, HeadShape, KvTarget, RopeAngles, head_factors


class PoolScales(NamedTuple):
    """Scales of a layer's keys and values in an FP8 pool, as the kernels around the attention take them.

    factors_X: of `rope_write_kv`. values_H1: float32 [H, 1], what is left to multiply the attention's result by. None:
    numbers are as they are stored.
    """

    factors_X: torch.Tensor | None = None
    values_H1: torch.Tensor | None = None

    @classmethod
    def create(cls, scales: KvScales | None, heads: HeadShape) -> PoolScales:
        if scales is None:
            return cls()
        values_H = scales.values_K.repeat_interleave(heads.num_heads // heads.num_kv_heads)
        return cls(head_factors(scales, heads), values_H[:, None].float())

    def of_values(self, o_THd: torch.Tensor) -> torch.Tensor:
        """[T, H, d]: the result of attention over values as they are stored, made that over values; in place."""
        return o_THd if self.values_H1 is None else o_THd.mul_(self.values_H1)


class Attention(ABC):
    """One layer's. The attention backend of the step computes softmax and sums over the pool."""

    @abstractmethod
    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        """Writes the KV of the residual's rows to `target`, and adds what they attend to to the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention(Attention):
    """Keys and values in two planes, [S, K, d] each (Ainslie et al. 2023). qkv gives queries, keys and values of all
    heads, in this order. sinks_H, attention_chunk: as of `StepAttention.attend`. temperatures_P11: float32, by
    which the queries of each position are multiplied."""

    norm: Norm
    qkv: Linear
    o: Linear
    heads: HeadShape
    head_norms: HeadNorms
    angles: RopeAngles
    keys_SKd: torch.Tensor
    values_SKd: torch.Tensor
    window: int | None
    ops: Ops
    scales: PoolScales
    sinks_H: torch.Tensor | None = None
    attention_chunk: int | None = None
    temperatures_P11: torch.Tensor | None = None

    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        qkv = self.qkv.normed(residual, self.norm)
        q_THd = self.ops.rope_write_kv(
            qkv, self.angles, target, self.keys_SKd, self.values_SKd, self.heads, self.head_norms, self.scales.factors_X
        )
        if self.temperatures_P11 is not None:
            q_THd = (q_THd * self.temperatures_P11[target.positions_T]).to(q_THd.dtype)
        o_THd = attention.attend(
            q_THd,
            self.keys_SKd,
            self.values_SKd,
            self.window,
            sinks_H=self.sinks_H,
            attention_chunk=self.attention_chunk,
        )
        self.o.add_to(residual, self.scales.of_values(o_THd).flatten(1))


def head_norms(config: DecoderConfig, index: int, weights: AttentionWeights) -> HeadNorms:
    """Norms of a layer's heads, as the kernel applies them ahead of RoPE. Behind it a norm without weights gives the
    same: RoPE turns pairs, and keeps their squares."""
    if config.head_norm is not HeadNorm.AFTER_ROPE:
        return HeadNorms(weights.q_norm_d, weights.k_norm_d, config.norm_eps)
    if config.rope_of(index) is None:
        return HeadNorms()
    ones_d = weights.norm_D.new_ones(config.head_dim)
    return HeadNorms(ones_d, ones_d, config.norm_eps)


def query_temperatures(config: DecoderConfig, index: int, angles: RopeAngles) -> torch.Tensor | None:
    """float32 [P, 1, 1], by position, of a layer without RoPE whose queries have them."""
    tuning = config.query_temperature
    if tuning is None or config.rope_of(index) is not None:
        return None
    positions_P = torch.arange(len(angles.cos), device=angles.cos.device)
    steps_P = torch.floor((positions_P.float() + 1.0) / tuning.floor_scale)
    return (torch.log1p(steps_P) * tuning.scale + 1.0)[:, None, None]
