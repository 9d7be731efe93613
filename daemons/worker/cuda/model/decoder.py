"""A dense decoder on a device: the weights of `models/decoder` as parts that run fused operations.

Legend: T rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.fp8.weights import LayerMatrices, QuantizedLayers
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue
from radixmesh.daemons.worker.cuda.linear import Norm, PlainLinear, Residual
from radixmesh.daemons.worker.cuda.model.attention import Attention, GroupedQueryAttention
from radixmesh.daemons.worker.cuda.model.device_model import (
    DeviceModel,
    Kernels,
    LoadedModel,
    TunableMatrices,
    create_linear,
)
from radixmesh.daemons.worker.cuda.model.mlp import GatedMlp, Mlp
from radixmesh.daemons.worker.cuda.weights.fold import fold_norms
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, HeadNorm, NormKind
from radixmesh.daemons.worker.models.decoder.model import DecoderModel
from radixmesh.daemons.worker.models.decoder.weights import DecoderLayer, MlpWeights
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.kernels.rope_kv import HeadNorms, HeadShape, KvTarget, RopeAngles


class LoadedDecoder(LoadedModel):
    """The norms of the layers are folded into projections that are in the model's dtype: these are the decoder's own
    from then on. quantized: the projections, where the weights have none.

    Raises MeshError UNSUPPORTED for what only the CPU backend computes.
    """

    def __init__(self, model: DecoderModel, quantized: QuantizedLayers | None = None) -> None:
        config, weights = model.config, model.weights
        check_decoder(config)
        self.config = config
        self.weights = weights
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_total_len = config.num_layers, config.max_total_len
        self.dtype = weights.final_norm_D.dtype
        self.tasks = model.tasks
        self.kv_layout, self.attention_shape = model.kv_layout, model.attention_shape
        self.windows = config.windows
        self.quantization = "none" if quantized is None else str(quantized.form)
        self.num_plain = None if quantized is None else quantized.num_plain
        # A deferred-norm GEMM can overflow in float16.
        self.is_folded = quantized is None and self.dtype != torch.float16
        if self.is_folded:
            fold_norms(weights)
        self.matrices = [_matrices(layer) for layer in weights.layers] if quantized is None else quantized.layers
        assert len(self.matrices) == config.num_layers, (len(self.matrices), config.num_layers)

    def tunable_matrices(self) -> tuple[TunableMatrices, ...]:
        has_bias = any(mlp_of(layer).b_gate_up_F2 is not None for layer in self.weights.layers)
        gated = GemmEpilogue.GATED if self.is_folded and not has_bias else GemmEpilogue.PLAIN
        groups = (
            TunableMatrices(tuple(of.gate_up for of in self.matrices), gated, self.is_folded),
            TunableMatrices(tuple(of.down for of in self.matrices), GemmEpilogue.ADDED),
            TunableMatrices(tuple(of.qkv for of in self.matrices), GemmEpilogue.PLAIN, self.is_folded),
            TunableMatrices(tuple(of.o for of in self.matrices), GemmEpilogue.ADDED),
            TunableMatrices((self.weights.head_DO.t(),), GemmEpilogue.PLAIN),
        )
        return tuple(group for group in groups if group.matrices)

    def row_bytes(self) -> int:
        config = self.config
        qkv = config.query_size + 2 * config.kv_size
        numbers = 4 * config.hidden_size + qkv + 2 * config.query_size + 3 * config.mlp_size
        return numbers * self.dtype.itemsize

    def position_bytes(self) -> int:
        # cos and sin of half a head each, float32.
        return 4 * self.config.head_dim

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
        self.embedding_VD = weights.embedding_VD
        self.kernels = kernels
        self._final_norm = Norm(weights.final_norm_D, config.norm_eps)
        self._head = PlainLinear(kernels.plain, weights.head_DO.t())
        assert config.rope is not None
        rope = RopeTable(config.head_dim, config.rope, weights.final_norm_D.device)
        angles = RopeAngles(*rope.all(max_total_len))
        self._layers = [_create_layer(loaded, index, kernels, kv, angles) for index in range(config.num_layers)]

    def layers(self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        residual = Residual(x_TD)
        for layer in self._layers:
            layer.attention.run(residual, target, attention)
            layer.mlp.run(residual)
        return residual.rows()

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self._head.normed(Residual(hidden_TD), self._final_norm).out_TN

    def final_hidden(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        norm_D, eps = self._final_norm
        assert norm_D is not None
        return self.kernels.plain.rms_norm(hidden_TD, norm_D, eps).float()

    def scores(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        assert Task.SCORE in self.tasks, "a model that generates has no scores"
        return self.logits(hidden_TD)[:, 0].float()


def check_decoder(config: DecoderConfig) -> None:
    """Raises MeshError UNSUPPORTED for what only the CPU backend computes."""
    rope = config.rope
    missing = {
        "routed experts": config.experts is not None,
        "a score head": config.is_scoring,
        "layers with different RoPE": config.layer_ropes is not None,
        "no RoPE": rope is None,
        "partial RoPE": rope is not None and rope.rotary_dim is not None,
        "interleaved RoPE": rope is not None and rope.is_interleaved,
        "position embeddings": config.has_position_embedding,
        f"{config.norm_kind.value} norms": config.norm_kind is not NormKind.RMS,
        "norms over all heads": config.head_norm is HeadNorm.ALL,
        "norms of heads after RoPE": config.head_norm is HeadNorm.AFTER_ROPE,
        "chunked attention": config.chunks is not None,
        "query temperatures": config.query_temperature is not None,
        "no norms before attention and MLP": not config.has_input_norms,
        "norms behind attention and MLP": config.has_output_norms,
        "parallel attention and MLP": config.is_parallel,
        "soft-capped scores": config.attention_softcap is not None,
        "soft-capped logits": config.logit_softcap is not None,
        "scaled embeddings": config.embedding_scale != 1.0,
        "scaled residuals": config.residual_scale != 1.0,
        "divided logits": config.logits_divisor != 1.0,
        "attention sinks": config.has_sinks,
        f"the activation {config.activation}": config.activation not in ("silu", "swish"),
        "an MLP without a gate": not config.is_gated,
    }
    what = ", ".join(name for name, is_there in missing.items() if is_there)
    if what:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"the model has {what}, which the cuda backend does not compute yet: use --backend cpu",
            {"feature": what},
        )


def mlp_of(layer: DecoderLayer) -> MlpWeights:
    assert isinstance(layer.mlp, MlpWeights)
    return layer.mlp


def _create_layer(loaded: LoadedDecoder, index: int, kernels: Kernels, kv: KvPlanes, angles: RopeAngles) -> _Layer:
    config, layer, matrices = loaded.config, loaded.weights.layers[index], loaded.matrices[index]
    weights, mlp, eps = layer.attention, mlp_of(layer), config.norm_eps
    attention = GroupedQueryAttention(
        norm=Norm(None if loaded.is_folded else weights.norm_D, eps),
        qkv=create_linear(kernels, matrices.qkv, weights.b_qkv_X),
        o=create_linear(kernels, matrices.o, weights.b_o_D),
        heads=HeadShape(config.num_heads, config.num_kv_heads, config.head_dim),
        head_norms=HeadNorms(weights.q_norm_d, weights.k_norm_d, eps),
        angles=angles,
        keys_SKd=kv.tokens("keys", index),
        values_SKd=kv.tokens("values", index),
        window=config.windows[index],
        ops=kernels.plain,
    )
    return _Layer(
        attention,
        GatedMlp(
            norm=Norm(None if loaded.is_folded else layer.mlp_norm_D, eps),
            gate_up=create_linear(kernels, matrices.gate_up, mlp.b_gate_up_F2),
            down=create_linear(kernels, matrices.down, mlp.b_down_D),
        ),
    )


def _matrices(layer: DecoderLayer) -> LayerMatrices:
    mlp = mlp_of(layer)
    return LayerMatrices(
        qkv=layer.attention.w_qkv_DX.t(),
        o=layer.attention.w_o_QD.t(),
        gate_up=mlp.w_gate_up_DF2.t(),
        down=mlp.w_down_FD.t(),
    )
