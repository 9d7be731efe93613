"""Grouped-query attention as two functions of rows, before and after the attention over the KV pool.

Legend: T rows, D hidden size, H heads, K kv heads, d head_dim, h pairs that RoPE turns.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, HeadNorm
from radixmesh.daemons.worker.models.decoder.norms import create_norm
from radixmesh.daemons.worker.models.decoder.weights import AttentionWeights
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.rope import apply_rope
from radixmesh.daemons.worker.models.row_maths import linear, plus, rms_norm
from radixmesh.daemons.worker.tiles import Tensors


class GroupedAttention:
    """The projections of one layer (grouped queries: Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig, layer: int, weights: AttentionWeights, placement: Placement) -> None:
        self._config = config
        self._rope = config.rope_of(layer)
        self._weights = weights
        self._group = placement.group
        self._norm = create_norm(config, weights.norm_D, weights.norm_bias_D)
        self._q_norm, self._k_norm = (create_norm(config, norm_d) for norm_d in (weights.q_norm_d, weights.k_norm_d))
        self._output_norm = create_norm(config, weights.output_norm_D)

    def project(self, inputs: Tensors) -> Tensors:
        """(x_TD, cos_T1h, sin_T1h) -> q_THd and k_TKd, with RoPE, and v_TKd. Of a layer without RoPE: (x_TD,), or
        (x_TD, temperature_T11) where the config has one."""
        x_TD, *more = inputs
        config, weights = self._config, self._weights
        qkv = linear(self._norm(x_TD), weights.w_qkv_DX, weights.b_qkv_X).view(x_TD.shape[0], -1, config.head_dim)
        num_qk_heads = config.num_heads + config.num_kv_heads
        heads = self._normed(qkv[:, :num_qk_heads])
        if self._rope is not None:
            heads = apply_rope(heads, *more, is_interleaved=self._rope.is_interleaved)
            if config.head_norm is HeadNorm.AFTER_ROPE:
                heads = rms_norm(heads, None, config.norm_eps)
        q_THd = heads[:, : config.num_heads]
        if self._rope is None and more:
            q_THd = (q_THd * more[0]).to(q_THd.dtype)
        return q_THd, heads[:, config.num_heads :], qkv[:, num_qk_heads:]

    def output(self, o_THd: torch.Tensor) -> torch.Tensor:
        """[T, D]: the projected output of the heads, as it is added to the residual."""
        attended_TD = self._group.all_reduce(o_THd.flatten(1) @ self._weights.w_o_QD)
        return self._output_norm(plus(attended_TD, self._weights.b_o_D))

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries and keys, [T, H + K, d], normed as the config says."""
        config = self._config
        if config.head_norm in (HeadNorm.NONE, HeadNorm.AFTER_ROPE):
            return heads
        q_THd, k_TKd = heads[:, : config.num_heads], heads[:, config.num_heads :]
        if config.head_norm is HeadNorm.ALL:
            q_THd = self._q_norm(q_THd.flatten(1)).view(q_THd.shape)
            k_TKd = self._k_norm(k_TKd.flatten(1)).view(k_TKd.shape)
        else:
            q_THd, k_TKd = self._q_norm(q_THd), self._k_norm(k_TKd)
        return torch.cat((q_THd, k_TKd), dim=1)
