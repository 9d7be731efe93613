"""The weights of a DeepSeek model whose projections and experts are FP8 in blocks of 128 x 128.

The expansions of latents stay in the model's dtype: absorbed attention multiplies by them head by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.checkpoint.loader import TensorTargets
from radixmesh.daemons.worker.checkpoint.quantization import Fp8Form
from radixmesh.daemons.worker.cuda.fp8.expert_weights import ExpertMaker, ExpertMatrices, PlainExpertWeights
from radixmesh.daemons.worker.cuda.fp8.weights import Matrix, MatrixMaker
from radixmesh.daemons.worker.cuda.weights.source import FolderSource, WeightSource
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch, ExpertShare
from radixmesh.daemons.worker.experts.expert_moves import Wanted
from radixmesh.daemons.worker.models.deepseek.checkpoint import layer_prefix
from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig
from radixmesh.daemons.worker.models.deepseek.weights import DeepseekLayer, MlpWeights
from radixmesh.daemons.worker.models.expert_checkpoint import placed_expert_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekMatrices:
    """The projections of a layer. w_in: query, or its first projection, latent and RoPE key. gate_up, down: of a dense
    MLP, or of the experts that see every row; None where there are none."""

    w_in: Matrix
    w_query: Matrix | None
    w_out: Matrix
    gate_up: Matrix | None
    down: Matrix | None
    experts: ExpertMatrices | None

    def all(self) -> tuple[Matrix, ...]:
        """Without experts."""
        matrices = (self.w_in, self.w_query, self.w_out, self.gate_up, self.down)
        return tuple(matrix for matrix in matrices if matrix is not None)

    @classmethod
    def of(cls, layer: DeepseekLayer) -> DeepseekMatrices:
        """In the model's dtype, as they were loaded."""
        attention = layer.attention
        mlp = layer.mlp if isinstance(layer.mlp, MlpWeights) else layer.mlp.shared
        experts = None
        if not isinstance(layer.mlp, MlpWeights):
            weights = layer.mlp.experts
            experts = PlainExpertWeights(weights.w_gate_up_EDF2.transpose(1, 2), weights.w_down_EFD.transpose(1, 2))
        return cls(
            w_in=attention.w_in_DX.t(),
            w_query=None if attention.w_query_QY is None else attention.w_query_QY.t(),
            w_out=attention.w_out_OD.t(),
            gate_up=None if mlp is None else mlp.w_gate_up_DF2.t(),
            down=None if mlp is None else mlp.w_down_FD.t(),
            experts=experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedDeepseek:
    """num_plain: how many matrices of the layers stayed in the model's dtype; experts of a layer count as one."""

    form: Fp8Form
    layers: tuple[DeepseekMatrices, ...]

    @property
    def num_plain(self) -> int:
        plain = (torch.Tensor, PlainExpertWeights)
        return sum(isinstance(each, plain) for layer in self.layers for each in (*layer.all(), layer.experts))


def load_deepseek(
    config: DeepseekConfig,
    targets: TensorTargets,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_online: bool,
    experts: ExpertDispatch,
) -> QuantizedDeepseek:
    """As `load_layers`; targets are in the layout of the source. Projections of MTP layers, which nothing runs yet, are
    left out. experts: places those of a layer on the ranks that share them."""
    for name, tensor in targets.tensors.items():
        if not tensor.is_meta:
            tensor.copy_(source.take(name).full().reshape(tensor.shape))
    matrices = MatrixMaker(source, Fp8Form.BLOCK, dtype, device, is_online)
    maker = None
    if config.router is not None:
        maker = ExpertMaker(
            source=source,
            share=experts.share(config.router.num_experts),
            num_slots=experts.slots_per_rank(config.router.num_experts),
            hidden=config.hidden_size,
            mlp=config.expert_mlp_size,
            dtype=dtype,
            device=device,
            is_online=is_online,
        )
    layers = tuple(_load_layer(config, index, targets, matrices, maker) for index in range(config.num_layers))
    return QuantizedDeepseek(form=Fp8Form.BLOCK, layers=layers)


def refill_experts(
    config: DeepseekConfig,
    quantized: QuantizedDeepseek,
    targets: TensorTargets,
    source: FolderSource,
    wanted: Sequence[Wanted],
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_online: bool,
) -> None:
    """Fills slots with experts of the source. Raises MeshError BAD_CHECKPOINT."""
    assert config.router is not None
    routed = [index for index in range(config.num_layers) if config.is_moe(index)]
    for layer, slot, expert in wanted:
        prefix = f"{layer_prefix(routed[layer])}mlp.experts"
        made, share = quantized.layers[routed[layer]].experts, ExpertShare(expert, expert + 1)
        assert made is not None
        slices = dict(placed_expert_slices(prefix, share, config.router.num_experts))
        maker = ExpertMaker(
            source=source.cut_to(slices),
            share=share,
            num_slots=1,
            hidden=config.hidden_size,
            mlp=config.expert_mlp_size,
            dtype=dtype,
            device=device,
            is_online=is_online,
        )
        maker.refill(made, slot, prefix, is_fused=f"{prefix}.gate_up_proj" in targets.tensors)


def _load_layer(
    config: DeepseekConfig, index: int, targets: TensorTargets, matrices: MatrixMaker, experts: ExpertMaker | None
) -> DeepseekMatrices:
    prefix = layer_prefix(index)
    attention, mlp = f"{prefix}self_attn", f"{prefix}mlp"
    has_rank, is_moe = config.q_lora_rank is not None, config.is_moe(index)
    made = None
    if is_moe:
        assert experts is not None
        made = experts.make(f"{mlp}.experts", is_fused=f"{mlp}.experts.gate_up_proj" in targets.tensors)
        mlp = f"{mlp}.shared_experts"
    has_mlp = not is_moe or bool(config.shared_mlp_size)
    return DeepseekMatrices(
        w_in=matrices.make(f"{attention}.{'q_a_proj' if has_rank else 'q_proj'}", f"{attention}.kv_a_proj_with_mqa"),
        w_query=matrices.make(f"{attention}.q_b_proj") if has_rank else None,
        w_out=matrices.make(f"{attention}.o_proj"),
        gate_up=matrices.make(f"{mlp}.gate_proj", f"{mlp}.up_proj") if has_mlp else None,
        down=matrices.make(f"{mlp}.down_proj") if has_mlp else None,
        experts=made,
    )
