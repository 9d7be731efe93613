"""EAGLE-3 on a device (Li et al. 2025): the head of `daemons/worker/speculation/models/eagle3.py`, by its weights.

Legend: T rows, D hidden size of the head, G = 3 hidden sizes of the target, d head_dim, W ids that the head can draft.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.drafting.network import DraftNetwork, LoadedNetwork
from radixmesh.daemons.worker.cuda.linear import Norm, PlainLinear, Residual
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, Kernels
from radixmesh.daemons.worker.cuda.model.mlp import GatedMlp
from radixmesh.daemons.worker.cuda.model.rope_order import angle_table
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane, KvPlanes
from radixmesh.daemons.worker.speculation.models.eagle3 import BuiltEagle3
from radixmesh.kernels.rope_kv import HeadNorms, HeadShape, KvTarget


class LoadedEagle3(LoadedNetwork):
    """A head whose weights are filled. max_rows: rows whose logits are computed at once."""

    def __init__(self, built: BuiltEagle3, max_rows: int) -> None:
        self.built, self.max_rows = built, max_rows
        config = built.config
        self.hidden_layers, self.num_features = built.hidden_layers, config.hidden_size
        self.max_total_len, self.dtype = config.max_total_len, built.weights.w_join_GD.dtype
        row_shape = (config.num_kv_heads, config.head_dim)
        planes = (KvPlane(name="keys", row_shape=row_shape), KvPlane(name="values", row_shape=row_shape))
        self.kv_layout = KvLayout(num_layers=1, planes=planes)
        self.attention_shape = AttentionShape(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, scale=config.scale
        )

    def create(self, kernels: Kernels, kv: KvPlanes, target: DeviceModel, max_total_len: int) -> DraftNetwork:
        return Eagle3Network(self, kernels, kv, target, max_total_len)

    def row_bytes(self) -> int:
        config = self.built.config
        numbers = 8 * config.hidden_size + 2 * (config.query_size + config.kv_size) + 3 * config.mlp_size
        return (len(self.hidden_layers) * config.hidden_size + numbers) * self.dtype.itemsize


class Eagle3Network(DraftNetwork):
    def __init__(
        self, loaded: LoadedEagle3, kernels: Kernels, kv: KvPlanes, target: DeviceModel, max_total_len: int
    ) -> None:
        config, weights, ops = loaded.built.config, loaded.built.weights, kernels.plain
        self._config, self._weights, self._ops, self._target = config, weights, ops, target
        self._angles = angle_table(config.head_dim, config.rope, max_total_len, weights.w_join_GD.device)
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._keys_SKd, self._values_SKd = kv.tokens("keys", 0), kv.tokens("values", 0)
        self._join, self._qkv, self._o, self._head = (
            PlainLinear(ops, w.t()) for w in (weights.w_join_GD, weights.w_qkv_2DX, weights.w_out_QD, weights.head_DW)
        )
        self._mlp = GatedMlp(
            norm=Norm(weights.mlp_norm_D, config.norm_eps),
            gate_up=PlainLinear(ops, weights.w_gate_up_DF2.t()),
            down=PlainLinear(ops, weights.w_down_FD.t()),
        )
        self._final_norm = Norm(weights.final_norm_D, config.norm_eps)
        self._ids_W = weights.ids_W
        # All but the ids that can be drafted stay as they are.
        self._logits_TV = weights.head_DW.new_full((loaded.max_rows, target.vocab_size), float("-inf"))

    def features(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._join.multiplied(torch.cat(hidden, dim=-1)).out_TN

    def forward(
        self, ids_T: torch.Tensor, features_TF: torch.Tensor | None, target: KvTarget, attention: StepAttention
    ) -> torch.Tensor:
        assert features_TF is not None
        ops, weights, eps = self._ops, self._weights, self._config.norm_eps
        normed_TD = ops.rms_norm(self._embed(ids_T), weights.embedding_norm_D, eps)
        joined_T2D = torch.cat((normed_TD, ops.rms_norm(features_TF, weights.feature_norm_D, eps)), dim=-1)
        keys_SKd, values_SKd = self._keys_SKd, self._values_SKd
        q_THd = ops.rope_write_kv(
            self._qkv.multiplied(joined_T2D), self._angles, target, keys_SKd, values_SKd, self._heads, HeadNorms()
        )
        residual = Residual(features_TF.clone())
        self._o.add_to(residual, attention.attend(q_THd, keys_SKd, values_SKd, None).flatten(1))
        self._mlp.run(residual)
        return residual.rows()

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        logits_TW = self._head.normed(Residual(output), self._final_norm).out_TN
        if logits_TW.shape[1] == self._target.vocab_size:
            return logits_TW
        return self._logits_TV[: len(output)].index_copy_(1, self._ids_W, logits_TW)

    def _embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        table_VD = self._weights.embedding_VD
        return self._target.embed(ids_T) if table_VD is None else functional.embedding(ids_T, table_VD)
