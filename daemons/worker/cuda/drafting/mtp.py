"""Multi-token prediction on a device: the layer behind the last one of a DeepSeek-V3 checkpoint (its report, 2.2).

Legend: T rows, D hidden size.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.drafting.network import DraftNetwork, LoadedNetwork
from radixmesh.daemons.worker.cuda.fp8.deepseek_weights import DeepseekMatrices
from radixmesh.daemons.worker.cuda.linear import PlainLinear, Residual
from radixmesh.daemons.worker.cuda.model.deepseek import LoadedDeepseek, create_attention, create_mlp
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, Kernels
from radixmesh.daemons.worker.models.deepseek.model import PLANE
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlanes
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles


class LoadedMtp(LoadedNetwork):
    """The first MTP layer of a target that has some, in the target's dtype."""

    def __init__(self, target: LoadedDeepseek) -> None:
        config = target.config
        self.target = target
        self.hidden_layers, self.num_features = (config.num_layers - 1,), config.hidden_size
        self.max_total_len, self.dtype = target.max_total_len, target.dtype
        self.kv_layout = KvLayout(num_layers=1, planes=target.kv_layout.planes)
        self.attention_shape, self.latent_rank = target.attention_shape, target.latent_rank

    def create(self, kernels: Kernels, kv: KvPlanes, target: DeviceModel, max_total_len: int) -> DraftNetwork:
        return MtpNetwork(self.target, kernels, kv, target, max_total_len)


class MtpNetwork(DraftNetwork):
    def __init__(
        self, loaded: LoadedDeepseek, kernels: Kernels, kv: KvPlanes, target: DeviceModel, max_total_len: int
    ) -> None:
        config, layer = loaded.config, loaded.mtp_layers[0]
        self._ops, self._target, self._layer, self._eps = kernels.plain, target, layer, config.norm_eps
        self._target_norm_D = loaded.weights.final_norm_D
        self._join = PlainLinear(kernels.plain, layer.w_join_GD.t())
        self._head = PlainLinear(kernels.plain, loaded.weights.head_DV.t())
        matrices = DeepseekMatrices.of(layer.block)
        angles = RopeAngles(*RopeTable(config.rope_dim, config.rope, layer.w_join_GD.device).all(max_total_len))
        self._attention = create_attention(config, layer.block, matrices, kernels, angles, kv.tokens(PLANE, 0))
        self._mlp = create_mlp(config, layer.block, matrices, kernels)

    def features(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._ops.rms_norm(hidden[0], self._target_norm_D, self._eps)

    def forward(
        self, ids_T: torch.Tensor, features_TF: torch.Tensor | None, target: KvTarget, attention: StepAttention
    ) -> torch.Tensor:
        assert features_TF is not None
        ops, layer, eps = self._ops, self._layer, self._eps
        embedded_TD = ops.rms_norm(self._target.embed(ids_T), layer.embedding_norm_D, eps)
        normed_TD = ops.rms_norm(features_TF, layer.hidden_norm_D, eps)
        residual = Residual(self._join.multiplied(torch.cat((embedded_TD, normed_TD), dim=-1)).out_TN)
        self._attention.run(residual, target, attention)
        self._mlp.run(residual)
        return ops.rms_norm(residual.rows(), layer.head_norm_D, eps)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return self._head.multiplied(output).out_TN
