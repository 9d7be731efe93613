"""The maths of a dense decoder on a device, in fused operations over the weights of `models/decoder`.

Legend: T rows, D hidden size, H heads, K kv heads, d head_dim, V vocabulary, S tokens of the pool.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.ops import DeferredNormGemm, HeadNorms, HeadShape, KvTarget, Ops, RopeAngles
from radixmesh.daemons.worker.cuda.weights.fold import fold_norms
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, HeadNorm, NormKind
from radixmesh.daemons.worker.models.decoder.weights import AttentionWeights, DecoderLayer, DecoderWeights, MlpWeights
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.rope import RopeTable


class DeviceDecoder:
    """Rows in, final hidden states out. Weights are [in, out] views of tensors that lie [out, in] in memory; the norms
    of the layers are folded into them, so that they are the decoder's own from then on.

    Raises MeshError UNSUPPORTED for what only the CPU backend computes: routed experts, scores.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        kv: KvPlanes,
        ops: Ops,
        *,
        max_total_len: int,
        folds_norms: bool = True,
    ) -> None:
        check_decoder(config)
        self.config = config
        self.dtype = weights.final_norm_D.dtype
        # A deferred-norm GEMM can overflow in float16.
        self._is_folded = folds_norms and self.dtype != torch.float16
        if self._is_folded:
            fold_norms(weights)
        self._weights = weights
        self._kv = kv
        self._ops = ops
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        assert config.rope is not None
        rope = RopeTable(config.head_dim, config.rope, weights.final_norm_D.device)
        self._angles = RopeAngles(*rope.all(max_total_len))

    @property
    def embedding_VD(self) -> torch.Tensor:
        return self._weights.embedding_VD

    def forward(self, ids_T: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        """Writes the KV of all rows; [T, D] after the last layer, before the final norm. ids int32."""
        return self.forward_embedded(functional.embedding(ids_T, self.embedding_VD), target, attention)

    def forward_embedded(self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        """The same from the rows' embeddings on, which it may overwrite."""
        if x_TD.shape[0] <= self._ops.max_fused_rows:
            return self._forward_gemv(x_TD, target, attention)
        return self._forward_gemm(x_TD, target, attention)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """[T, V] of rows of forward()'s result, in the model's dtype."""
        weights, eps = self._weights, self.config.norm_eps
        head_VD = weights.head_DO.t()
        if hidden_TD.shape[0] <= self._ops.max_fused_rows:
            return self._ops.linear_fused(hidden_TD, head_VD, norm_K=weights.final_norm_D, eps=eps)
        return self._ops.linear(self._ops.rms_norm(hidden_TD, weights.final_norm_D, eps), head_VD)

    def _forward_gemm(self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        """GEMMs that add to the residual; the norm is deferred to the kernel that reads a GEMM's result."""
        ops = self._ops
        for index, layer in enumerate(self._weights.layers):
            weights, mlp = layer.attention, mlp_of(layer)
            qkv = self._gemm(x_TD, weights.norm_D, weights.w_qkv_DX, weights.b_qkv_X)
            o_TQ = self._attend(index, qkv, weights, target, attention)
            ops.add_linear(o_TQ, weights.w_o_QD.t(), weights.b_o_D, x_TD)
            gated_TF = self._gated(x_TD, layer.mlp_norm_D, mlp)
            ops.add_linear(gated_TF, mlp.w_down_FD.t(), mlp.b_down_D, x_TD)
        return x_TD

    def _gemm(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, w_DN: torch.Tensor, b_N: torch.Tensor | None
    ) -> DeferredNormGemm:
        """GEMM of RMSNorm(x); the norm is deferred where it is folded into the weights."""
        ops = self._ops
        if self._is_folded:
            return DeferredNormGemm(ops.linear(x_TD, w_DN.t()), b_N, norm_input_TD=x_TD)
        return DeferredNormGemm(ops.linear(ops.rms_norm(x_TD, norm_D, self.config.norm_eps), w_DN.t()), b_N)

    def _gated(self, x_TD: torch.Tensor, norm_D: torch.Tensor, mlp: MlpWeights) -> torch.Tensor:
        """silu(gate) x up of the rows normed, [T, F]."""
        if self._is_folded and mlp.b_gate_up_F2 is None:
            return self._ops.gate_up_silu_deferred_norm(x_TD, mlp.w_gate_up_DF2.t(), self.config.norm_eps)
        return self._ops.silu_mul(self._gemm(x_TD, norm_D, mlp.w_gate_up_DF2, mlp.b_gate_up_F2), self.config.norm_eps)

    def _forward_gemv(self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        """GEMV kernels at memory speed, with norms and residual additions fused."""
        ops, eps = self._ops, self.config.norm_eps
        for index, layer in enumerate(self._weights.layers):
            weights, mlp = layer.attention, mlp_of(layer)
            norm_D, mlp_norm_D = (None, None) if self._is_folded else (weights.norm_D, layer.mlp_norm_D)
            qkv_TX = ops.linear_fused(x_TD, weights.w_qkv_DX.t(), weights.b_qkv_X, norm_K=norm_D, eps=eps)
            o_TQ = self._attend(index, DeferredNormGemm(qkv_TX), weights, target, attention)
            x_TD = ops.linear_fused(o_TQ, weights.w_o_QD.t(), weights.b_o_D, add_to_TN=x_TD)
            if mlp.b_gate_up_F2 is None:
                gated_TF = ops.gate_up_silu(x_TD, mlp.w_gate_up_DF2.t(), mlp_norm_D, eps)
            else:
                gate_up_T2F = ops.linear_fused(
                    x_TD, mlp.w_gate_up_DF2.t(), mlp.b_gate_up_F2, norm_K=mlp_norm_D, eps=eps
                )
                gated_TF = ops.silu_mul(DeferredNormGemm(gate_up_T2F), eps)
            x_TD = ops.linear_fused(gated_TF, mlp.w_down_FD.t(), mlp.b_down_D, add_to_TN=x_TD)
        return x_TD

    def _attend(
        self,
        layer: int,
        qkv: DeferredNormGemm,
        weights: AttentionWeights,
        target: KvTarget,
        attention: StepAttention,
    ) -> torch.Tensor:
        keys_SKd, values_SKd = self._kv.tokens("keys", layer), self._kv.tokens("values", layer)
        norms = HeadNorms(weights.q_norm_d, weights.k_norm_d, self.config.norm_eps)
        q_THd = self._ops.rope_write_kv(qkv, self._angles, target, keys_SKd, values_SKd, self._heads, norms)
        return attention.attend(q_THd, keys_SKd, values_SKd, self.config.windows[layer]).flatten(1)


def mlp_of(layer: DecoderLayer) -> MlpWeights:
    assert isinstance(layer.mlp, MlpWeights)
    return layer.mlp


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
