"""Grouped-query attention as two functions of rows, before and after the attention over the KV pool.

Legend: T rows, D hidden size, H heads, K kv heads, d head_dim, h = d / 2.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.weights import AttentionWeights
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.rope import apply_rope
from radixmesh.daemons.worker.models.row_maths import linear, plus, rms_norm
from radixmesh.daemons.worker.tiles import Tensors


class GroupedAttention:
    """The projections of one layer (grouped queries: Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig, weights: AttentionWeights, placement: Placement) -> None:
        self._config = config
        self._weights = weights
        self._group = placement.group

    def project(self, inputs: Tensors) -> Tensors:
        """(x_TD, cos_T1h, sin_T1h) -> q_THd and k_TKd, with RoPE, and v_TKd."""
        x_TD, cos_T1h, sin_T1h = inputs
        config, weights = self._config, self._weights
        x_TD = rms_norm(x_TD, weights.norm_D, config.norm_eps)
        qkv = linear(x_TD, weights.w_qkv_DX, weights.b_qkv_X).view(x_TD.shape[0], -1, config.head_dim)
        num_rope_heads = config.num_heads + config.num_kv_heads
        with_rope = apply_rope(self._normed(qkv[:, :num_rope_heads]), cos_T1h, sin_T1h)
        return with_rope[:, : config.num_heads], with_rope[:, config.num_heads :], qkv[:, num_rope_heads:]

    def add_output(self, x_TD: torch.Tensor, o_THd: torch.Tensor) -> torch.Tensor:
        """x with the projected output of the heads added."""
        attended_TD = self._group.all_reduce(o_THd.flatten(1) @ self._weights.w_o_QD)
        return x_TD + plus(attended_TD, self._weights.b_o_D)

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries and keys, [T, H + K, d], each head normed by itself where the model has it so."""
        q_norm_d, k_norm_d, num_heads = self._weights.q_norm_d, self._weights.k_norm_d, self._config.num_heads
        if q_norm_d is None or k_norm_d is None:
            return heads
        return torch.cat(
            (
                rms_norm(heads[:, :num_heads], q_norm_d, self._config.norm_eps),
                rms_norm(heads[:, num_heads:], k_norm_d, self._config.norm_eps),
            ),
            dim=1,
        )
