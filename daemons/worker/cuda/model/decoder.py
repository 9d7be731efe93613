"""A decoder on a device: the weights of `models/decoder` as parts that run fused operations.

Legend: T rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn import functional

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DispatchedExperts
from radixmesh.daemons.worker.cuda.experts import PlainExperts, RowExperts
from radixmesh.daemons.worker.cuda.fp8.weights import LayerMatrices, Matrix, QuantizedLayers
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue
from radixmesh.daemons.worker.cuda.linear import Norm, PlainLinear, Residual, note_hidden
from radixmesh.daemons.worker.cuda.model.attention import (
    Attention,
    GroupedQueryAttention,
    PoolScales,
    head_norms,
    query_temperatures,
)
from radixmesh.daemons.worker.cuda.model.device_model import (
    DeviceModel,
    Kernels,
    LoadedModel,
    TunableMatrices,
    create_linear,
    create_output_linear,
    create_vocabulary,
    ids_as_embedding,
    share_out,
)
from radixmesh.daemons.worker.cuda.model.general import (
    GeneralAttention,
    GeneralMlp,
    needs_general_attention,
    needs_general_mlp,
)
from radixmesh.daemons.worker.cuda.model.half_batches import HalfBatch, Stages
from radixmesh.daemons.worker.cuda.model.layer_kinds import LaunchedLayers
from radixmesh.daemons.worker.cuda.model.mlp import GatedMlp, Mlp
from radixmesh.daemons.worker.cuda.model.rope_order import angle_table, head_order, reorder, reordered, row_order
from radixmesh.daemons.worker.cuda.model.routed_mlp import (
    RoutedMlp,
    SharedExpert,
    missing_of_experts,
    rule_of,
    shared_out,
    variant_of,
)
from radixmesh.daemons.worker.cuda.weights.fold import fold_norm
from radixmesh.daemons.worker.models.activations import ACTIVATIONS
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, HeadNorm, NormKind
from radixmesh.daemons.worker.models.decoder.model import DecoderModel
from radixmesh.daemons.worker.models.decoder.norms import create_norm
from radixmesh.daemons.worker.models.decoder.weights import DecoderLayer, MlpWeights, RoutedWeights
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.kernels.moe.grouped_gemm import ExpertVariant
from radixmesh.kernels.moe.row_experts import SharedWeights
from radixmesh.kernels.rope_kv import HeadShape, KvTarget, RopeAngles


class LoadedDecoder(LoadedModel):
    """The norms of the layers are folded into projections that are in the model's dtype: these are the decoder's own
    from then on. quantized: the projections, where the weights have none. is_share: other ranks have the rest of them.

    Raises MeshError UNSUPPORTED for what only the CPU backend computes.
    """

    shows_hidden = True

    def __init__(
        self, model: DecoderModel, quantized: QuantizedLayers | None = None, *, is_share: bool = False
    ) -> None:
        config, weights = model.config, model.weights
        check_decoder(config, is_quantized=quantized is not None)
        self.config = config
        self.weights = weights
        # A share's results are summed over the ranks before anything is added to the residual.
        self._output_epilogue = GemmEpilogue.PLAIN if is_share else GemmEpilogue.ADDED
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_total_len = config.num_layers, config.max_total_len
        self.num_experts = 0 if config.experts is None else config.experts.num_experts
        self.dtype = weights.final_norm_D.dtype
        self.tasks = model.tasks
        self.kv_layout, self.attention_shape = model.kv_layout, model.attention_shape
        if any(head_order(config.head_dim, config.rope_of(layer)) is not None for layer in range(config.num_layers)):
            self.kv_layout = self.kv_layout.in_form("keys", "~rope-order")
        self.windows, self.has_sinks = config.windows, config.has_sinks
        self.attention_chunks = tuple({chunk: None for chunk in config.chunks or () if chunk is not None})
        self.quantization = "none" if quantized is None else str(quantized.form)
        self.num_plain = None if quantized is None else quantized.num_plain
        self.matrices = [_matrices(layer) for layer in weights.layers] if quantized is None else list(quantized.layers)
        assert len(self.matrices) == config.num_layers, (len(self.matrices), config.num_layers)
        # A deferred-norm GEMM can overflow in float16.
        can_fold = quantized is None and self.dtype != torch.float16
        self.is_qkv_folded = can_fold and not needs_general_attention(config)
        self.is_gate_up_folded = can_fold and not needs_general_mlp(config)
        self.ropes = {config.rope_of(layer): None for layer in range(config.num_layers)}
        for index in range(config.num_layers):
            self._prepare(index)

    def _prepare(self, index: int) -> None:
        """Puts a layer's weights as the kernels take them."""
        config, layer, matrices = self.config, self.weights.layers[index], self.matrices[index]
        if self.is_qkv_folded and isinstance(matrices.qkv, torch.Tensor):
            fold_norm(layer.attention.norm_D, matrices.qkv)
        if self.is_gate_up_folded and isinstance(matrices.gate_up, torch.Tensor):
            fold_norm(layer.mlp_norm_D, matrices.gate_up)
        rope, device = config.rope_of(index), self.weights.final_norm_D.device
        order = row_order(config, rope, device)
        if order is None:
            return
        if isinstance(matrices.qkv, torch.Tensor):
            reorder(matrices.qkv, order)
        else:
            self.matrices[index] = replace(matrices, qkv=reordered(matrices.qkv, order))
        if layer.attention.b_qkv_X is not None:
            reorder(layer.attention.b_qkv_X, order)
        of_heads = order % config.head_dim if config.head_norm is HeadNorm.EACH else order
        for norm in (layer.attention.q_norm_d, layer.attention.k_norm_d):
            if norm is not None:
                # Over all heads the order of the first ones is that of fewer heads too.
                reorder(norm, of_heads[: len(norm)])

    def tunable_matrices(self) -> tuple[TunableMatrices, ...]:
        mlps = [layer.mlp for layer in self.weights.layers if isinstance(layer.mlp, MlpWeights)]
        has_bias = any(mlp.b_gate_up_F2 is not None for mlp in mlps)
        gated = GemmEpilogue.GATED if self.is_gate_up_folded and not has_bias else GemmEpilogue.PLAIN
        groups = (
            TunableMatrices(_there(of.gate_up for of in self.matrices), gated, self.is_gate_up_folded),
            TunableMatrices(_there(of.down for of in self.matrices), self._output_epilogue),
            TunableMatrices(tuple(of.qkv for of in self.matrices), GemmEpilogue.PLAIN, self.is_qkv_folded),
            TunableMatrices(tuple(of.o for of in self.matrices), self._output_epilogue),
            TunableMatrices((self.weights.head_DO.t(),), GemmEpilogue.PLAIN),
        )
        return tuple(group for group in groups if group.matrices)

    def row_bytes(self) -> int:
        config = self.config
        qkv = config.query_size + 2 * config.kv_size
        numbers = 4 * config.hidden_size + qkv + 2 * config.query_size + 3 * config.mlp_size
        if config.experts is not None:
            numbers += config.experts.num_picks * (config.experts.mlp_size + config.hidden_size)
        return numbers * self.dtype.itemsize

    def expert_row_bytes(self) -> int:
        config, experts = self.config, self.config.experts
        if experts is None:
            return 0
        return (experts.num_picks * (experts.mlp_size + config.hidden_size) + 4 * config.hidden_size) * (
            self.dtype.itemsize
        )

    def expert_bytes(self) -> int:
        mlps = (layer.mlp for layer in self.weights.layers)
        return next((mlp.experts.expert_bytes for mlp in mlps if isinstance(mlp, RoutedWeights)), 0)

    def position_bytes(self) -> int:
        # cos and sin of half a head each, float32.
        return 4 * self.config.head_dim * len(self.ropes)

    def create(self, kernels: Kernels, kv: KvPlanes, max_total_len: int) -> DeviceDecoder:
        return DeviceDecoder(self, kernels, kv, max_total_len)


class _Layer(NamedTuple):
    attention: Attention
    mlp: Mlp


class DeviceDecoder(DeviceModel):
    def __init__(self, loaded: LoadedDecoder, kernels: Kernels, kv: KvPlanes, max_total_len: int) -> None:
        config, weights = loaded.config, loaded.weights
        self.vocab_size, self.hidden_size = loaded.vocab_size, loaded.hidden_size
        self.num_layers, self.dtype, self.tasks = loaded.num_layers, loaded.dtype, loaded.tasks
        device = weights.final_norm_D.device
        self._vocabulary, self._embedding_WD = create_vocabulary(kernels, config.vocab_size), weights.embedding_VD
        self.embedding_VD = weights.embedding_VD
        if self._vocabulary is not None:
            self.embedding_VD = ids_as_embedding(config.vocab_size, device)
        self.kernels = kernels
        self._shared = kernels.experts
        self._config = config
        self._positions_PD = weights.positions_PD
        # Rounded as the embedding is, which transformers does.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self._final_norm = create_norm(config, weights.final_norm_D, weights.final_norm_bias_D)
        self._fused_final_norm = (
            Norm(weights.final_norm_D, config.norm_eps) if config.norm_kind is NormKind.RMS else None
        )
        self._head = PlainLinear(kernels.plain, weights.head_DO.t())
        angles = {rope: angle_table(config.head_dim, rope, max_total_len, device) for rope in loaded.ropes}
        self.parts = [
            _Layer(
                _create_attention(loaded, index, kernels, kv, angles[config.rope_of(index)]),
                _create_mlp(loaded, index, kernels),
            )
            for index in range(config.num_layers)
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
        residual = self._begin(x_TD, target)
        if self._config.is_parallel:
            return self._parallel_layers(residual, target, attention, hidden)
        for index, layer in enumerate(self._launched.now if hidden is None else self.parts):
            layer.attention.run(residual, target, attention)
            layer.mlp.run(residual)
            note_hidden(hidden, index, residual)
        return residual.rows()

    def stages(self, half: HalfBatch) -> Stages:
        assert self._shared is not None and not self._config.is_parallel
        residual = self._begin(half.x_TD, half.target)
        for layer in self.parts:
            layer.attention.run(residual, half.target, half.attention)
            yield from layer.mlp.stages(residual)
        return residual.rows()

    def _begin(self, x_TD: torch.Tensor, target: KvTarget) -> Residual:
        """The residual ahead of the first layer; changes x."""
        if self._vocabulary is not None:
            x_TD = self._vocabulary.embed(x_TD[:, 0], self._embedding_WD)
        if self._embedding_scale != 1.0:
            x_TD *= self._embedding_scale
        if self._positions_PD is not None:
            x_TD += functional.embedding(target.positions_T, self._positions_PD)
        return Residual(x_TD)

    def _parallel_layers(
        self, residual: Residual, target: KvTarget, attention: StepAttention, hidden: HiddenStates | None
    ) -> torch.Tensor:
        """Attention and MLP both read the input of the layer, which the attention overwrites."""
        for index, layer in enumerate(self._launched.now if hidden is None else self.parts):
            source_TD = residual.rows().clone()
            layer.attention.run(residual, target, attention)
            layer.mlp.run(residual, source_TD)
            note_hidden(hidden, index, residual)
        return residual.rows()

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        if self._fused_final_norm is not None:
            logits_TV = self._head.normed(Residual(hidden_TD), self._fused_final_norm).out_TN
        else:
            logits_TV = self._head.multiplied(self._final_norm(hidden_TD)).out_TN
        config = self._config
        # The head of a model that scores has one feature, which every rank computes.
        if self._vocabulary is not None and not config.is_scoring:
            logits_TV = self._vocabulary.gather(logits_TV)
        if config.logits_divisor != 1.0:
            logits_TV.div_(config.logits_divisor)
        if config.logit_softcap is not None:
            logits_TV.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits_TV

    def shared_experts(self) -> tuple[DispatchedExperts, ...]:
        return shared_out(layer.mlp for layer in self.parts)

    def final_hidden(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self._final_norm(hidden_TD).float()

    def scores(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        assert Task.SCORE in self.tasks, "a model that generates has no scores"
        return self.logits(hidden_TD)[:, 0].float()


def check_decoder(config: DecoderConfig, *, is_quantized: bool) -> None:
    """Raises MeshError UNSUPPORTED for what only the CPU backend computes."""
    missing = {
        **missing_of_experts(config, is_quantized=is_quantized),
        "routed experts between other norms": config.experts is not None and needs_general_attention(config),
        "sinks, chunks or temperatures between other norms": needs_general_attention(config)
        and (config.has_sinks or config.chunks is not None or config.query_temperature is not None),
        "FP8 weights that lie [in, out]": is_quantized and config.names.is_in_first,
        "FP8 queries, keys and values by head": is_quantized and config.names.is_qkv_by_head,
    }
    what = ", ".join(name for name, is_there in missing.items() if is_there)
    if what:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"the model has {what}, which the cuda backend does not compute yet: use --backend cpu",
            {"feature": what},
        )


def _create_attention(
    loaded: LoadedDecoder, index: int, kernels: Kernels, kv: KvPlanes, angles: RopeAngles
) -> Attention:
    """Fused where kernels have the layer's shape."""
    config, weights, eps = loaded.config, loaded.weights.layers[index].attention, loaded.config.norm_eps
    qkv = create_linear(kernels, loaded.matrices[index].qkv, weights.b_qkv_X)
    o = create_output_linear(kernels, loaded.matrices[index].o, weights.b_o_D)
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    keys_SKd, values_SKd = kv.tokens("keys", index), kv.tokens("values", index)
    scales = PoolScales.create(kv.scales(index), heads)
    if not needs_general_attention(config):
        return GroupedQueryAttention(
            norm=Norm(None if loaded.is_qkv_folded else weights.norm_D, eps),
            qkv=qkv,
            o=o,
            heads=heads,
            head_norms=head_norms(config, index, weights),
            angles=angles,
            keys_SKd=keys_SKd,
            values_SKd=values_SKd,
            window=config.windows[index],
            ops=kernels.plain,
            scales=scales,
            sinks_H=weights.sinks_H,
            attention_chunk=None if config.chunks is None else config.chunks[index],
            temperatures_P11=query_temperatures(config, index, angles),
        )
    return GeneralAttention(
        norm=create_norm(config, weights.norm_D, weights.norm_bias_D),
        qkv=qkv,
        o=o,
        output_norm=create_norm(config, weights.output_norm_D),
        scale=config.residual_scale,
        heads=heads,
        head_norm=config.head_norm,
        q_norm=create_norm(config, weights.q_norm_d),
        k_norm=create_norm(config, weights.k_norm_d),
        angles=angles,
        keys_SKd=keys_SKd,
        values_SKd=values_SKd,
        window=config.windows[index],
        ops=kernels.plain,
        scales=scales,
    )


def _create_mlp(loaded: LoadedDecoder, index: int, kernels: Kernels) -> Mlp:
    """Fused where kernels have the layer's shape."""
    config, layer, matrices = loaded.config, loaded.weights.layers[index], loaded.matrices[index]
    weights = layer.mlp
    if isinstance(weights, RoutedWeights):
        return _create_routed_mlp(config, layer.mlp_norm_D, weights, kernels)
    assert matrices.gate_up is not None and matrices.down is not None
    gate_up = create_linear(kernels, matrices.gate_up, weights.b_gate_up_F2)
    down = create_output_linear(kernels, matrices.down, weights.b_down_D)
    if not needs_general_mlp(config):
        norm_D = None if loaded.is_gate_up_folded else layer.mlp_norm_D
        return GatedMlp(norm=Norm(norm_D, config.norm_eps), gate_up=gate_up, down=down)
    return GeneralMlp(
        norm=create_norm(config, layer.mlp_norm_D, layer.mlp_norm_bias_D),
        gate_up=gate_up,
        down=down,
        output_norm=create_norm(config, layer.mlp_output_norm_D),
        scale=config.residual_scale,
        activation=ACTIVATIONS[config.activation],
        is_gated=config.is_gated,
    )


def _create_routed_mlp(
    config: DecoderConfig, norm_D: torch.Tensor, weights: RoutedWeights, kernels: Kernels
) -> RoutedMlp:
    assert config.experts is not None
    shared, gate, shared_weights = None, weights.w_shared_gate_D1, None
    if weights.shared is not None:
        shared_weights = SharedWeights(weights.shared.w_gate_up_DF2.t(), weights.shared.w_down_FD.t())
        shared = SharedExpert(
            gate_up=create_linear(kernels, shared_weights.w_gate_up, None),
            down=create_linear(kernels, shared_weights.w_down, None),
            w_gate_1D=None if gate is None else gate.t(),
        )
    experts = (
        weights.experts.w_gate_up_EDF2.transpose(1, 2),
        weights.experts.w_down_EFD.transpose(1, 2),
        variant_of(config.experts, weights.experts),
    )
    return RoutedMlp(
        norm_D=norm_D,
        eps=config.norm_eps,
        w_router_ED=weights.w_router_DE.t(),
        rule=rule_of(config.experts),
        experts=share_out(kernels, PlainExperts(kernels.plain, *experts), config.experts.num_experts, norm_D),
        shared=shared,
        ops=kernels.plain,
        b_logits_E=weights.b_router_E,
        row_experts=_create_row_experts(kernels, experts, shared_weights) if gate is None else None,
        group=kernels.group,
    )


def _create_row_experts(
    kernels: Kernels, experts: tuple[torch.Tensor, torch.Tensor, ExpertVariant], shared: SharedWeights | None
) -> RowExperts | None:
    """None where they add to the residual what other ranks have a part of."""
    is_alone = kernels.group is None and kernels.experts is None
    return None if not is_alone else RowExperts.create(kernels.plain, *experts, shared)


def _matrices(layer: DecoderLayer) -> LayerMatrices:
    mlp = layer.mlp if isinstance(layer.mlp, MlpWeights) else None
    return LayerMatrices(
        qkv=layer.attention.w_qkv_DX.t(),
        o=layer.attention.w_o_QD.t(),
        gate_up=None if mlp is None else mlp.w_gate_up_DF2.t(),
        down=None if mlp is None else mlp.w_down_FD.t(),
    )


def _there(matrices: Iterable[Matrix | None]) -> tuple[Matrix, ...]:
    return tuple(matrix for matrix in matrices if matrix is not None)
