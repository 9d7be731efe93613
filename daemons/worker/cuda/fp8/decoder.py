"""The maths of a dense decoder whose projections are FP8.

Legend: T rows, D hidden size, X = (H + 2 K) d of queries, keys and values, Q = H d, F mlp size.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.decoder import DeviceDecoder, mlp_of
from radixmesh.daemons.worker.cuda.fp8.ops import Fp8Ops, add_gemm
from radixmesh.daemons.worker.cuda.fp8.weights import LayerMatrices
from radixmesh.daemons.worker.cuda.ops import DeferredNormGemm, KvTarget, Ops
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.weights import DecoderWeights
from radixmesh.daemons.worker.models.kv_layout import KvPlanes


class Fp8Decoder(DeviceDecoder):
    """Norms stay apart from the projections, whose numbers are those of the checkpoint. Up to max_fused_rows rows
    stay in the model's dtype; more are quantised to FP8 by the kernel that norms them or computes the gate.

    weights: all but the projections of the layers, which are in `matrices`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        matrices: tuple[LayerMatrices, ...],
        kv: KvPlanes,
        ops: Ops,
        fp8_ops: Fp8Ops,
        *,
        max_total_len: int,
    ) -> None:
        super().__init__(config, weights, kv, ops, max_total_len=max_total_len, folds_norms=False)
        assert len(matrices) == config.num_layers, (len(matrices), config.num_layers)
        self._matrices = matrices
        self._fp8_ops = fp8_ops

    def _forward_gemm(self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        """The kernel that norms the residual first adds the previous GEMM's result to it."""
        ops, eps = self._fp8_ops, self.config.norm_eps
        added: DeferredNormGemm | None = None
        for index, (layer, matrices) in enumerate(zip(self._weights.layers, self._matrices, strict=True)):
            weights, mlp = layer.attention, mlp_of(layer)
            rows = ops.normed(x_TD, added, weights.norm_D, eps, matrices.qkv)
            qkv = DeferredNormGemm(ops.linear(rows, matrices.qkv, x_TD.dtype), weights.b_qkv_X)
            o_TQ = self._attend(index, qkv, weights, target, attention)
            rows = ops.rows(o_TQ, matrices.o)
            added = DeferredNormGemm(ops.linear(rows, matrices.o, x_TD.dtype), weights.b_o_D)
            rows = ops.normed(x_TD, added, layer.mlp_norm_D, eps, matrices.gate_up)
            gate_up = DeferredNormGemm(ops.linear(rows, matrices.gate_up, x_TD.dtype), mlp.b_gate_up_F2)
            rows = ops.gated(gate_up, eps, matrices.down)
            added = DeferredNormGemm(ops.linear(rows, matrices.down, x_TD.dtype), mlp.b_down_D)
        if added is not None:
            add_gemm(x_TD, added)
        return x_TD

    def _forward_gemv(self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        ops, eps = self._fp8_ops, self.config.norm_eps
        for index, (layer, matrices) in enumerate(zip(self._weights.layers, self._matrices, strict=True)):
            weights, mlp, norm_D = layer.attention, mlp_of(layer), layer.mlp_norm_D
            qkv_TX = ops.linear_fused(x_TD, matrices.qkv, weights.b_qkv_X, norm_K=weights.norm_D, eps=eps)
            o_TQ = self._attend(index, DeferredNormGemm(qkv_TX), weights, target, attention)
            x_TD = ops.linear_fused(o_TQ, matrices.o, weights.b_o_D, add_to_TN=x_TD)
            if mlp.b_gate_up_F2 is None:
                gated_TF = ops.gate_up_silu(x_TD, matrices.gate_up, norm_D, eps)
            else:
                gate_up_T2F = ops.linear_fused(x_TD, matrices.gate_up, mlp.b_gate_up_F2, norm_K=norm_D, eps=eps)
                gated_TF = self._ops.silu_mul(DeferredNormGemm(gate_up_T2F), eps)
            x_TD = ops.linear_fused(gated_TF, matrices.down, mlp.b_down_D, add_to_TN=x_TD)
        return x_TD
