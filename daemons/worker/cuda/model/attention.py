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
    heads, in this order."""

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

    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        qkv = self.qkv.normed(residual, self.norm)
        q_THd = self.ops.rope_write_kv(
            qkv, self.angles, target, self.keys_SKd, self.values_SKd, self.heads, self.head_norms, self.scales.factors_X
        )
        o_THd = attention.attend(q_THd, self.keys_SKd, self.values_SKd, self.window)
        self.o.add_to(residual, self.scales.of_values(o_THd).flatten(1))
