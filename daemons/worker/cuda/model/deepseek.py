"""DeepSeek on a device: latent attention, dense layers and routed experts as parts that run fused operations.

Legend: T rows, D hidden size, H heads, R rank of the latents.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DispatchedExperts
from radixmesh.daemons.worker.cuda.experts import RowExperts
from radixmesh.daemons.worker.cuda.fp8.deepseek_weights import DeepseekMatrices, QuantizedDeepseek
from radixmesh.daemons.worker.cuda.fp8.weights import Matrix
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue
from radixmesh.daemons.worker.cuda.linear import Norm, PlainLinear, Residual, note_hidden
from radixmesh.daemons.worker.cuda.model.attention import Attention
from radixmesh.daemons.worker.cuda.model.device_model import (
    DeviceModel,
    Kernels,
    LoadedModel,
    TunableMatrices,
    create_experts,
    create_linear,
    create_output_linear,
    create_vocabulary,
    ids_as_embedding,
    share_out,
)
from radixmesh.daemons.worker.cuda.model.half_batches import HalfBatch, Stages
from radixmesh.daemons.worker.cuda.model.layer_kinds import LaunchedLayers
from radixmesh.daemons.worker.cuda.model.mla import LatentQuery, MlaAttention
from radixmesh.daemons.worker.cuda.model.mlp import GatedMlp, Mlp
from radixmesh.daemons.worker.cuda.model.routed_mlp import RoutedMlp, SharedExpert, shared_out
from radixmesh.daemons.worker.models.deepseek.attention import INNER_EPS
from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig, RouterConfig, TopkMethod
from radixmesh.daemons.worker.models.deepseek.model import PLANE, DeepseekModel
from radixmesh.daemons.worker.models.deepseek.weights import DeepseekLayer, LatentAttentionWeights, MlpWeights
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.kernels.mla_rows import LatentNorm
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts
from radixmesh.kernels.moe.route import RouterRule
from radixmesh.kernels.moe.row_experts import SharedWeights
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles


class LoadedDeepseek(LoadedModel):
    """quantized: the projections and experts, where the weights have none. is_share: other ranks have the rest of
    them."""

    shows_hidden = True

    def __init__(
        self, model: DeepseekModel, quantized: QuantizedDeepseek | None = None, *, is_share: bool = False
    ) -> None:
        config, weights = model.config, model.weights
        # A share's results are summed over the ranks before anything is added to the residual.
        self._output_epilogue = GemmEpilogue.PLAIN if is_share else GemmEpilogue.ADDED
        self.config, self.weights, self.mtp_layers = config, weights, model.mtp_layers
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_total_len = config.num_layers, config.max_total_len
        self.dtype = weights.final_norm_D.dtype
        self.tasks = model.tasks
        self.kv_layout, self.attention_shape = model.kv_layout, model.attention_shape
        self.windows = (None,) * config.num_layers
        self.quantization = "none" if quantized is None else str(quantized.form)
        self.num_plain = None if quantized is None else quantized.num_plain
        self.matrices = [DeepseekMatrices.of(layer) for layer in weights.layers]
        if quantized is not None:
            self.matrices = list(quantized.layers)
        self.latent_rank = config.kv_lora_rank
        self.num_experts = 0 if config.router is None else config.router.num_experts

    def tunable_matrices(self) -> tuple[TunableMatrices, ...]:
        is_dense = [isinstance(layer.mlp, MlpWeights) for layer in self.weights.layers]
        dense, shared = (
            [of for of, is_one in zip(self.matrices, is_dense, strict=True) if is_one is wanted]
            for wanted in (True, False)
        )
        groups = [
            TunableMatrices(tuple(of.w_in for of in self.matrices), GemmEpilogue.PLAIN),
            TunableMatrices(tuple(of.w_out for of in self.matrices), self._output_epilogue),
            TunableMatrices(_there(of.w_query for of in self.matrices), GemmEpilogue.PLAIN),
        ]
        for mlps in (shared, dense):
            groups += [
                TunableMatrices(_there(mlp.gate_up for mlp in mlps), GemmEpilogue.PLAIN),
                TunableMatrices(_there(mlp.down for mlp in mlps), self._output_epilogue),
            ]
        groups.append(TunableMatrices((self.weights.head_DV.t(),), GemmEpilogue.PLAIN))
        return tuple(group for group in groups if group.matrices)

    def row_bytes(self) -> int:
        config = self.config
        # Queries before and behind the key expansion, results before and behind that of values.
        heads = config.num_heads * (config.query_dim + config.latent_dim + config.kv_lora_rank + config.value_dim)
        attention = config.first_query_size + config.latent_dim + heads
        picks = 0 if config.router is None else config.router.num_picks
        experts = 3 * max(config.mlp_size, config.shared_mlp_size) + picks * (
            config.expert_mlp_size + config.hidden_size
        )
        return (4 * config.hidden_size + attention + experts) * self.dtype.itemsize

    def expert_row_bytes(self) -> int:
        config = self.config
        if config.router is None:
            return 0
        picks = config.router.num_picks * (config.expert_mlp_size + config.hidden_size)
        return (picks + 4 * config.hidden_size) * self.dtype.itemsize

    def expert_bytes(self) -> int:
        experts = next((matrices.experts for matrices in self.matrices if matrices.experts is not None), None)
        return 0 if experts is None else experts.expert_bytes

    def position_bytes(self) -> int:
        return 4 * self.config.rope_dim

    def create(self, kernels: Kernels, kv: KvPlanes, max_total_len: int) -> DeviceModel:
        return DeviceDeepseek(self, kernels, kv, max_total_len)


class _Layer(NamedTuple):
    attention: Attention
    mlp: Mlp


class DeviceDeepseek(DeviceModel):
    def __init__(self, loaded: LoadedDeepseek, kernels: Kernels, kv: KvPlanes, max_total_len: int) -> None:
        config, weights = loaded.config, loaded.weights
        self.vocab_size, self.hidden_size = loaded.vocab_size, loaded.hidden_size
        self.num_layers, self.dtype, self.tasks = loaded.num_layers, loaded.dtype, loaded.tasks
        device = weights.final_norm_D.device
        self._vocabulary, self._embedding_WD = create_vocabulary(kernels, config.vocab_size), weights.embedding_VD
        self.embedding_VD = weights.embedding_VD
        if self._vocabulary is not None:
            self.embedding_VD = ids_as_embedding(config.vocab_size, device)
        self._ops = kernels.plain
        self._shared = kernels.experts
        self._final_norm = Norm(weights.final_norm_D, config.norm_eps)
        self._head = PlainLinear(kernels.plain, weights.head_DV.t())
        angles = RopeAngles(*RopeTable(config.rope_dim, config.rope, device).all(max_total_len))
        self.parts = [
            _Layer(
                create_attention(config, layer, matrices, kernels, angles, kv.tokens(PLANE, index)),
                create_mlp(config, layer, matrices, kernels),
            )
            for index, (layer, matrices) in enumerate(zip(weights.layers, loaded.matrices, strict=True))
        ]
        self._launched = LaunchedLayers(self.parts)

    def each_kind_once(self) -> AbstractContextManager[None]:
        return self._launched.each_kind_once()

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return super().embed(ids_T) if self._vocabulary is None else ids_T.clone()[:, None]

    def layers(
        self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention, hidden: HiddenStates | None = None
    ) -> torch.Tensor:
        if self._shared is not None:
            self._shared.next_rows(target)
        residual = self._begin(x_TD)
        for index, layer in enumerate(self._launched.now if hidden is None else self.parts):
            layer.attention.run(residual, target, attention)
            layer.mlp.run(residual)
            note_hidden(hidden, index, residual)
        return residual.rows()

    def stages(self, half: HalfBatch) -> Stages:
        assert self._shared is not None
        residual = self._begin(half.x_TD)
        for layer in self.parts:
            layer.attention.run(residual, half.target, half.attention)
            yield from layer.mlp.stages(residual)
        return residual.rows()

    def _begin(self, x_TD: torch.Tensor) -> Residual:
        """The residual ahead of the first layer."""
        return Residual(x_TD if self._vocabulary is None else self._vocabulary.embed(x_TD[:, 0], self._embedding_WD))

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        logits_TW = self._head.normed(Residual(hidden_TD), self._final_norm).out_TN
        return logits_TW if self._vocabulary is None else self._vocabulary.gather(logits_TW)

    def shared_experts(self) -> tuple[DispatchedExperts, ...]:
        return shared_out(layer.mlp for layer in self.parts)

    def final_hidden(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        assert self._final_norm.weight_D is not None
        return self._ops.rms_norm(hidden_TD, self._final_norm.weight_D, self._final_norm.eps).float()


def create_attention(
    config: DeepseekConfig,
    layer: DeepseekLayer,
    matrices: DeepseekMatrices,
    kernels: Kernels,
    angles: RopeAngles,
    latents_S1C: torch.Tensor,
) -> Attention:
    weights = layer.attention
    return MlaAttention(
        norm=Norm(layer.attention_norm_D, config.norm_eps),
        w_in=create_linear(kernels, matrices.w_in, weights.b_in_X),
        query=_create_query(weights, matrices, kernels),
        latent_norm=LatentNorm(weights.latent_norm_R, INNER_EPS, config.is_rope_interleaved),
        w_expand_HER=weights.w_expand_HER,
        nope_dim=config.nope_dim,
        w_out=create_output_linear(kernels, matrices.w_out, weights.b_out_D),
        angles=angles,
        latents_S1C=latents_S1C,
        ops=kernels.plain,
    )


def _create_query(weights: LatentAttentionWeights, matrices: DeepseekMatrices, kernels: Kernels) -> LatentQuery | None:
    if weights.query_norm_Q is None or matrices.w_query is None:
        return None
    w_query = create_linear(kernels, matrices.w_query, None)
    return LatentQuery(norm_Q=weights.query_norm_Q, eps=INNER_EPS, w_query=w_query)


def create_mlp(config: DeepseekConfig, layer: DeepseekLayer, matrices: DeepseekMatrices, kernels: Kernels) -> Mlp:
    weights = layer.mlp
    if isinstance(weights, MlpWeights):
        assert matrices.gate_up is not None and matrices.down is not None
        return GatedMlp(
            norm=Norm(layer.mlp_norm_D, config.norm_eps),
            gate_up=create_linear(kernels, matrices.gate_up, None),
            down=create_output_linear(kernels, matrices.down, None),
        )
    # The shared MLP's part is summed over the ranks together with that of the experts.
    gate_up, down = (
        None if matrix is None else create_linear(kernels, matrix, None) for matrix in (matrices.gate_up, matrices.down)
    )
    assert config.router is not None and matrices.experts is not None
    shared = None
    if gate_up is not None and down is not None:
        shared = SharedExpert(gate_up=gate_up, down=down, w_gate_1D=None, weights=_weights_beside(matrices, kernels))
    return RoutedMlp(
        norm_D=layer.mlp_norm_D,
        eps=config.norm_eps,
        w_router_ED=weights.w_router_DE.t(),
        rule=router_rule(config.router),
        experts=share_out(
            kernels, create_experts(kernels, matrices.experts), config.router.num_experts, layer.mlp_norm_D
        ),
        shared=shared,
        ops=kernels.plain,
        b_router_E=weights.b_router_E,
        row_experts=_create_row_experts(matrices, kernels),
        group=kernels.group,
    )


def _create_row_experts(matrices: DeepseekMatrices, kernels: Kernels) -> RowExperts | None:
    """None where weights are FP8, or what they add to the residual has parts on other ranks."""
    experts = matrices.experts
    is_alone = kernels.group is None and kernels.experts is None
    if not is_alone or experts is None or isinstance(experts, QuantizedExperts):
        return None
    shared = None
    if matrices.gate_up is not None:
        shared = _shared_weights(matrices)
        if shared is None:
            return None
    return RowExperts.create(kernels.plain, experts.w_gate_up_E2FD, experts.w_down_EDF, shared=shared)


def _weights_beside(matrices: DeepseekMatrices, kernels: Kernels) -> SharedWeights | None:
    """None where weights are FP8, or experts have parts on other ranks."""
    is_alone = kernels.group is None and kernels.experts is None
    return _shared_weights(matrices) if is_alone and not isinstance(matrices.experts, QuantizedExperts) else None


def _shared_weights(matrices: DeepseekMatrices) -> SharedWeights | None:
    gate_up, down = matrices.gate_up, matrices.down
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return None
    return SharedWeights(gate_up, down)


def _there(matrices: Iterable[Matrix | None]) -> tuple[Matrix, ...]:
    return tuple(matrix for matrix in matrices if matrix is not None)


def router_rule(router: RouterConfig) -> RouterRule:
    """The config's router as the kernels take it."""
    is_biased = router.method is TopkMethod.BIASED
    return RouterRule(
        num_picks=router.num_picks,
        is_sigmoid=is_biased,
        is_normalised=router.is_normed,
        weight_scale=router.weight_scale,
        num_groups=router.num_groups,
        num_picked_groups=router.num_picked_groups,
        group_best=2 if is_biased else 1,
    )
