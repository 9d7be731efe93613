"""Attention of a layer, from the residual to the residual.

Legend: T rows, D hidden size, H heads, K kv heads, d head_dim, S tokens of the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.linear import Linear, Norm, Residual
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.kernels.rope_kv import HeadNorms, HeadShape, KvTarget, RopeAngles


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

    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        qkv = self.qkv.normed(residual, self.norm)
        q_THd = self.ops.rope_write_kv(
            qkv, self.angles, target, self.keys_SKd, self.values_SKd, self.heads, self.head_norms
        )
        o_THd = attention.attend(q_THd, self.keys_SKd, self.values_SKd, self.window)
        self.o.add_to(residual, o_THd.flatten(1))
