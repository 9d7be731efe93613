"""DeepSeek on a device: latent attention and routed experts by plain torch, with the maths of `models/deepseek`.

Right first: experts gather their rows one after the other and wait for the router's picks on the host, so nothing is
captured.

Legend: T rows, D hidden size, H heads, C cached numbers of a token, h half of the RoPE dims, S tokens of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.linear import Residual
from radixmesh.daemons.worker.cuda.model.attention import Attention
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, Kernels, LoadedModel, TunableMatrices
from radixmesh.daemons.worker.cuda.model.mlp import Mlp
from radixmesh.daemons.worker.group import LocalGroup
from radixmesh.daemons.worker.models.deepseek.attention import LatentAttention
from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig
from radixmesh.daemons.worker.models.deepseek.model import PLANE, DeepseekModel
from radixmesh.daemons.worker.models.deepseek.routing import DeepseekRouter
from radixmesh.daemons.worker.models.deepseek.weights import DeepseekLayer, MlpWeights, MoeWeights
from radixmesh.daemons.worker.models.experts import RoutedExperts
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.daemons.worker.models.row_maths import rms_norm, silu_gated
from radixmesh.daemons.worker.tiles import RowTiles
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles

# All rows at once.
_TILES = RowTiles(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention(Attention):
    """Multi-head latent attention: one KV head of what is cached, which keys and values are made of."""

    maths: LatentAttention
    angles: RopeAngles
    latents_S1C: torch.Tensor

    def run(self, residual: Residual, target: KvTarget, attention: StepAttention) -> None:
        x_TD, positions_T = residual.rows(), target.positions_T
        cos_T1h, sin_T1h = (table[positions_T].unsqueeze(1) for table in self.angles)
        q_THC, kv_T1C = self.maths.project((x_TD, cos_T1h, sin_T1h))
        pages_T = target.page_tables[target.row_slots_T.long(), positions_T // target.page_size]
        places_T = pages_T.long() * target.page_size + positions_T % target.page_size
        self.latents_S1C[places_T] = kv_T1C.to(self.latents_S1C.dtype)
        o_THC = attention.attend(q_THC, self.latents_S1C, self.latents_S1C, None)
        x_TD += self.maths.output(o_THC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp(Mlp):
    """A dense layer's MLP."""

    norm_D: torch.Tensor
    eps: float
    weights: MlpWeights

    def run(self, residual: Residual, source_TD: torch.Tensor | None = None) -> None:
        x_TD = residual.rows()
        x_TD += _mlp(rms_norm(x_TD if source_TD is None else source_TD, self.norm_D, self.eps), self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe(Mlp):
    """Routed experts, each of which gathers the rows that picked it, and those that see every row."""

    norm_D: torch.Tensor
    eps: float
    experts: RoutedExperts
    shared: MlpWeights | None

    def run(self, residual: Residual, source_TD: torch.Tensor | None = None) -> None:
        x_TD = residual.rows()
        normed_TD = rms_norm(x_TD if source_TD is None else source_TD, self.norm_D, self.eps)
        out_TD = self.experts.compute(normed_TD, len(normed_TD), _TILES)
        x_TD += out_TD if self.shared is None else out_TD + _mlp(normed_TD, self.shared)


class LoadedDeepseek(LoadedModel):
    can_capture = False
    needs_plain_attention = True

    def __init__(self, model: DeepseekModel) -> None:
        config, weights = model.config, model.weights
        self.config, self.weights = config, weights
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_total_len = config.num_layers, config.max_total_len
        self.dtype = weights.final_norm_D.dtype
        self.tasks = model.tasks
        self.kv_layout, self.attention_shape = model.kv_layout, model.attention_shape
        self.windows = (None,) * config.num_layers
        self.quantization, self.num_plain = "none", None

    def tunable_matrices(self) -> tuple[TunableMatrices, ...]:
        return ()

    def row_bytes(self) -> int:
        config = self.config
        # Queries and results over latents, gates of the picked and the shared experts in float32.
        attention = 4 * config.num_heads * config.latent_dim
        picks = 0 if config.router is None else config.router.num_picks
        experts = 3 * max(config.mlp_size, picks * config.expert_mlp_size + config.shared_mlp_size)
        return (4 * config.hidden_size + attention) * self.dtype.itemsize + 4 * (experts + picks * config.hidden_size)

    def position_bytes(self) -> int:
        return 4 * self.config.rope_dim

    def create(self, kernels: Kernels, kv: KvPlanes, max_total_len: int) -> DeviceModel:
        return DeviceDeepseek(self, kv, max_total_len)


class _Layer(NamedTuple):
    attention: Attention
    mlp: Mlp


class DeviceDeepseek(DeviceModel):
    def __init__(self, loaded: LoadedDeepseek, kv: KvPlanes, max_total_len: int) -> None:
        config, weights = loaded.config, loaded.weights
        self.vocab_size, self.hidden_size = loaded.vocab_size, loaded.hidden_size
        self.num_layers, self.dtype, self.tasks = loaded.num_layers, loaded.dtype, loaded.tasks
        self.embedding_VD = weights.embedding_VD
        self._eps = config.norm_eps
        self._final_norm_D, self._head_DV = weights.final_norm_D, weights.head_DV
        device = weights.final_norm_D.device
        placement = Placement(device=device, dtype=self.dtype, group=LocalGroup())
        angles = RopeAngles(*RopeTable(config.rope_dim, config.rope, device).all(max_total_len))
        self.parts = [
            _create_layer(config, layer, placement, angles, kv.tokens(PLANE, index))
            for index, layer in enumerate(weights.layers)
        ]

    def layers(self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention) -> torch.Tensor:
        residual = Residual(x_TD)
        for layer in self.parts:
            layer.attention.run(residual, target, attention)
            layer.mlp.run(residual)
        return residual.rows()

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_TD, self._final_norm_D, self._eps) @ self._head_DV

    def final_hidden(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_TD, self._final_norm_D, self._eps).float()


def _create_layer(
    config: DeepseekConfig,
    layer: DeepseekLayer,
    placement: Placement,
    angles: RopeAngles,
    latents_S1C: torch.Tensor,
) -> _Layer:
    maths = LatentAttention(config, layer.attention_norm_D, layer.attention, placement)
    attention = MlaAttention(maths=maths, angles=angles, latents_S1C=latents_S1C)
    if not isinstance(layer.mlp, MoeWeights):
        return _Layer(attention, PlainMlp(norm_D=layer.mlp_norm_D, eps=config.norm_eps, weights=layer.mlp))
    assert config.router is not None
    experts = RoutedExperts(layer.mlp.experts, DeepseekRouter(config.router, layer.mlp), placement)
    shared = layer.mlp.shared
    return _Layer(attention, Moe(norm_D=layer.mlp_norm_D, eps=config.norm_eps, experts=experts, shared=shared))


def _mlp(x_TD: torch.Tensor, weights: MlpWeights) -> torch.Tensor:
    return silu_gated(x_TD @ weights.w_gate_up_DF2) @ weights.w_down_FD
