"""The maths of Llama (Touvron et al. 2023; grouped-query attention as in Llama 2 and 3).

Legend: T rows (tokens of all segments, padded), D hidden size, H heads, K kv heads, X = (H + 2K) x head_dim,
d head_dim, h = d / 2, F mlp size, V vocabulary, S tokens of the pool, N rows without padding.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from radixmesh.daemons.worker.attention.backend import AttentionShape
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.models.model import Model, ModelBatch, Placement, RowInput, RowProbe
from radixmesh.daemons.worker.tiles import RowTiles, Tensors

from .config import LlamaConfig
from .rope import RopeTable, rotate
from .weights import LlamaLayer, LlamaWeights


class LlamaModel(Model):
    def __init__(self, config: LlamaConfig, weights: LlamaWeights, placement: Placement) -> None:
        row_shape = (config.num_kv_heads, config.head_dim)
        self.vocab_size = config.vocab_size
        self.max_total_len = config.max_total_len
        self.kv_layout = KvLayout(
            num_layers=config.num_layers,
            planes=(KvPlane(name="keys", row_shape=row_shape), KvPlane(name="values", row_shape=row_shape)),
        )
        self.attention_shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self._config = config
        self._weights = weights
        self._rope = RopeTable(config, placement.device)
        self._blocks = tuple(_LlamaBlock(config, layer, placement) for layer in weights.layers)
        self._group = placement.group

    def forward(self, batch: ModelBatch) -> torch.Tensor:
        x_TD = functional.embedding(batch.ids_T, self._weights.embedding_VD)
        cos_T1h, sin_T1h = self._rope.at(batch.positions_T)
        for index, block in enumerate(self._blocks):
            q_THd, k_TKd, v_TKd = batch.tiles.map(block.project, (x_TD, cos_T1h, sin_T1h))
            keys_SKd, values_SKd = batch.kv.tokens("keys", index), batch.kv.tokens("values", index)
            keys_SKd.index_copy_(0, batch.kv_slots_N, k_TKd[: batch.num_rows])
            values_SKd.index_copy_(0, batch.kv_slots_N, v_TKd[: batch.num_rows])
            o_THd = batch.attention.attend(q_THd, keys_SKd, values_SKd)
            (x_TD,) = batch.tiles.map(block.finish, (x_TD, o_THd))
        return x_TD

    def logits(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        (logits_TV,) = tiles.map(self._head, (hidden_TD,))
        return logits_TV

    def row_probes(self) -> tuple[RowProbe, ...]:
        config, block, dtype = self._config, self._blocks[0], self._weights.head_DV.dtype
        hidden = RowInput((config.hidden_size,), dtype)
        angles = RowInput((1, config.head_dim // 2), torch.float32)
        heads = RowInput((config.num_heads, config.head_dim), dtype)
        return (
            RowProbe("project", block.project, (hidden, angles, angles)),
            RowProbe("finish", block.finish, (hidden, heads)),
            RowProbe("head", self._head, (hidden,)),
        )

    def _head(self, inputs: Tensors) -> Tensors:
        (x_TD,) = inputs
        x_TD = _rms_norm(x_TD, self._weights.final_norm_D, self._config.norm_eps)
        return (self._group.all_gather(x_TD @ self._weights.head_DV).float(),)


class _LlamaBlock:
    """One layer, apart from its attention: two functions of rows."""

    def __init__(self, config: LlamaConfig, layer: LlamaLayer, placement: Placement) -> None:
        self._config = config
        self._layer = layer
        self._group = placement.group

    def project(self, inputs: Tensors) -> Tensors:
        """(x_TD, cos_T1h, sin_T1h) -> q_THd and k_TKd, rotated, and v_TKd."""
        x_TD, cos_T1h, sin_T1h = inputs
        config, layer = self._config, self._layer
        x_TD = _rms_norm(x_TD, layer.attention_norm_D, config.norm_eps)
        qkv = _linear(x_TD, layer.w_qkv_DX, layer.b_qkv_X).view(x_TD.shape[0], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = rotate(qkv[:, :num_rotated], cos_T1h, sin_T1h)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], qkv[:, num_rotated:]

    def finish(self, inputs: Tensors) -> Tensors:
        """(x_TD, o_THd) -> x_TD with the attention's output and the MLP added."""
        x_TD, o_THd = inputs
        layer = self._layer
        attended_TD = self._group.all_reduce(o_THd.flatten(1) @ layer.w_o_QD)
        x_TD = x_TD + _plus(attended_TD, layer.b_o_D)
        normed_TD = _rms_norm(x_TD, layer.mlp_norm_D, self._config.norm_eps)
        gate_TF, up_TF = _linear(normed_TD, layer.w_gate_up_DF2, layer.b_gate_up_F2).chunk(2, dim=-1)
        down_TD = self._group.all_reduce((functional.silu(gate_TF) * up_TF) @ layer.w_down_FD)
        return (x_TD + _plus(down_TD, layer.b_down_D),)


def _linear(x_TI: torch.Tensor, w_IO: torch.Tensor, b_O: torch.Tensor | None) -> torch.Tensor:
    return _plus(x_TI @ w_IO, b_O)


def _plus(x_TD: torch.Tensor, b_D: torch.Tensor | None) -> torch.Tensor:
    # Apart from the product: with the bias inside, some libraries take another kernel.
    return x_TD if b_D is None else x_TD + b_D


def _rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) x weight, float32 inside (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)
