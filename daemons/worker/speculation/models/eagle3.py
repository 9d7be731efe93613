"""EAGLE-3: one decoder layer that reads hidden states of three layers of the target (Li et al. 2025).

Checkpoints are those of SpecForge and SGLang. A row joins the embedding of its token with the features of the position
before, each behind a norm of its own; the layer's residual is the features alone.

Legend: T rows, D hidden size of the head, H hidden size of the target, G = 3H, d head_dim, X = queries, keys and
values, Q = heads x d, F mlp size, V vocabulary of the target, W ids that the head can draft.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader, bad_checkpoint
from radixmesh.daemons.worker.checkpoint.loader import TensorTargets
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.models.cached_attention import attend_cached
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.models.llama.config import read_llama_config
from radixmesh.daemons.worker.models.model import Model, ModelBatch, Placement
from radixmesh.daemons.worker.models.rope import RopeTable, apply_rope
from radixmesh.daemons.worker.models.row_maths import rms_norm, silu_gated
from radixmesh.daemons.worker.speculation.models.draft_model import DraftModel

_NUM_STATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Weights:
    """Projections are [in, out]. embedding_VD: None where it is the target's. offsets_W: int64, by which an id of the
    head and that of the target differ."""

    w_join_GD: torch.Tensor
    embedding_VD: torch.Tensor | None
    embedding_norm_D: torch.Tensor
    feature_norm_D: torch.Tensor
    w_qkv_2DX: torch.Tensor
    w_out_QD: torch.Tensor
    mlp_norm_D: torch.Tensor
    w_gate_up_DF2: torch.Tensor
    w_down_FD: torch.Tensor
    final_norm_D: torch.Tensor
    head_DW: torch.Tensor
    offsets_W: torch.Tensor

    @property
    def ids_W(self) -> torch.Tensor:
        """int64: the target's ids of what the head can draft."""
        return torch.arange(len(self.offsets_W), device=self.offsets_W.device) + self.offsets_W


class Eagle3Model(DraftModel):
    def __init__(
        self,
        config: DecoderConfig,
        weights: Eagle3Weights,
        target: Model,
        hidden_layers: tuple[int, ...],
        placement: Placement,
    ) -> None:
        self.hidden_layers, self.num_features = hidden_layers, config.hidden_size
        self.max_total_len = config.max_total_len
        row_shape = (config.num_kv_heads, config.head_dim)
        planes = (KvPlane(name="keys", row_shape=row_shape), KvPlane(name="values", row_shape=row_shape))
        self.kv_layout = KvLayout(num_layers=1, planes=planes)
        self.attention_shape = AttentionShape(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, scale=config.scale
        )
        assert config.rope is not None
        self._config, self._weights, self._target = config, weights, target
        self._rope = RopeTable(config.head_dim, config.rope, placement.device)

    def features(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        w_join_GD = self._weights.w_join_GD
        return torch.cat(hidden, dim=-1).to(w_join_GD.dtype) @ w_join_GD

    def forward(self, batch: ModelBatch, features_TF: torch.Tensor | None) -> torch.Tensor:
        assert features_TF is not None
        config, weights, eps = self._config, self._weights, self._config.norm_eps
        embedded_TD = rms_norm(self._embed(batch.ids_T), weights.embedding_norm_D, eps)
        joined_T2D = torch.cat((embedded_TD, rms_norm(features_TF, weights.feature_norm_D, eps)), dim=-1)
        qkv = (joined_T2D @ weights.w_qkv_2DX).view(len(joined_T2D), -1, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        turned = apply_rope(qkv[:, :num_turned], *self._rope.at(batch.positions_T))
        q_THd, k_TKd = turned[:, : config.num_heads], turned[:, config.num_heads :]
        o_THd = attend_cached(batch, 0, q_THd, k_TKd, qkv[:, num_turned:])
        x_TD = features_TF + o_THd.flatten(1) @ weights.w_out_QD
        normed_TD = rms_norm(x_TD, weights.mlp_norm_D, eps)
        return x_TD + silu_gated(normed_TD @ weights.w_gate_up_DF2) @ weights.w_down_FD

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        logits_TW = rms_norm(output, weights.final_norm_D, self._config.norm_eps) @ weights.head_DW
        logits_TV = torch.full((len(output), self._target.vocab_size), float("-inf"))
        logits_TV[:, weights.ids_W] = logits_TW.float()
        return logits_TV

    def _embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        table_VD = self._weights.embedding_VD
        return self._target.embed(ids_T) if table_VD is None else table_VD[ids_T]


class BuiltEagle3(NamedTuple):
    """A head with unfilled weights, the layers of the target that it reads, and which tensor of a checkpoint goes
    where."""

    config: DecoderConfig
    weights: Eagle3Weights
    hidden_layers: tuple[int, ...]
    targets: TensorTargets

    def check(self, folder: Path) -> None:
        """Raises MeshError BAD_CHECKPOINT for a head whose ids are not the target's. To be called when it is filled."""
        ids_W = self.weights.ids_W
        if int(ids_W.min()) < 0 or int(ids_W.max()) >= self.config.vocab_size:
            raise bad_checkpoint(
                folder, f"drafts ids outside the target's vocabulary of {self.config.vocab_size} (d2t)", "d2t"
            )


class TargetSizes(NamedTuple):
    """Sizes of the model that a head drafts for."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def build_eagle3(
    reader: ConfigReader, names: Collection[str], target: TargetSizes, placement: Placement
) -> BuiltEagle3:
    """names: of the checkpoint's tensors. Raises MeshError BAD_CHECKPOINT or UNSUPPORTED naming the key."""
    config = read_llama_config(reader)
    if config.num_layers != 1:
        raise reader.unsupported("num_hidden_layers", "1, an EAGLE-3 head of one layer")
    if config.has_qkv_bias or config.has_mlp_bias:
        raise reader.unsupported("attention_bias", "false, an EAGLE-3 head without biases")
    if config.activation != "silu":
        raise reader.unsupported("hidden_act", "silu")
    if reader.integer("target_hidden_size", target.hidden_size) != target.hidden_size:
        raise reader.error("target_hidden_size", f"the hidden_size of the target ({target.hidden_size})")
    has_embedding = "embed_tokens.weight" in names
    if not has_embedding and config.hidden_size != target.hidden_size:
        raise reader.error("hidden_size", f"that of the target ({target.hidden_size}), whose embedding the head shares")
    if config.vocab_size != target.vocab_size:
        raise reader.error("vocab_size", f"that of the target ({target.vocab_size})")
    num_ids = reader.integer("draft_vocab_size", config.vocab_size)
    weights = _empty(config, target, num_ids, has_embedding, placement)
    layers = _hidden_layers(reader, target.num_layers)
    return BuiltEagle3(config, weights, layers, _targets(config, weights, "d2t" in names))


def _hidden_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Those of the config, or an early, a middle and a late one, as SGLang takes them."""
    section = reader.section("eagle_config")
    layers = () if section is None else section.integers("eagle_aux_hidden_state_layer_ids", low=0)
    if not layers:
        layers = (1, num_layers // 2 - 1, num_layers - 4)
    if len(layers) != _NUM_STATES or not all(0 <= layer < num_layers for layer in layers):
        raise reader.error("eagle_config", f"eagle_aux_hidden_state_layer_ids, {_NUM_STATES} layers below {num_layers}")
    return layers


def _empty(
    config: DecoderConfig, target: TargetSizes, num_ids: int, has_embedding: bool, placement: Placement
) -> Eagle3Weights:
    def rows(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=placement.dtype, device=placement.device)

    def new(*shape: int) -> torch.Tensor:
        return rows(*shape[::-1]).t() if len(shape) == 2 and placement.is_out_first else rows(*shape)

    size = config.hidden_size
    return Eagle3Weights(
        w_join_GD=new(_NUM_STATES * target.hidden_size, size),
        embedding_VD=rows(config.vocab_size, size) if has_embedding else None,
        embedding_norm_D=new(size),
        feature_norm_D=new(size),
        w_qkv_2DX=new(2 * size, config.query_size + 2 * config.kv_size),
        w_out_QD=new(config.query_size, size),
        mlp_norm_D=new(size),
        w_gate_up_DF2=new(size, 2 * config.mlp_size),
        w_down_FD=new(config.mlp_size, size),
        final_norm_D=new(size),
        head_DW=new(size, num_ids),
        offsets_W=torch.zeros(num_ids, dtype=torch.int64, device=placement.device),
    )


def _targets(config: DecoderConfig, weights: Eagle3Weights, has_offsets: bool) -> TensorTargets:
    sizes = (config.query_size, config.kv_size, config.kv_size)
    q_DX, k_DX, v_DX = torch.split(weights.w_qkv_2DX, list(sizes), dim=1)
    gate_DF, up_DF = weights.w_gate_up_DF2.chunk(2, dim=1)
    layer = {
        "input_layernorm": weights.embedding_norm_D,
        "hidden_norm": weights.feature_norm_D,
        "self_attn.q_proj": q_DX.t(),
        "self_attn.k_proj": k_DX.t(),
        "self_attn.v_proj": v_DX.t(),
        "self_attn.o_proj": weights.w_out_QD.t(),
        "post_attention_layernorm": weights.mlp_norm_D,
        "mlp.gate_proj": gate_DF.t(),
        "mlp.up_proj": up_DF.t(),
        "mlp.down_proj": weights.w_down_FD.t(),
    }
    tensors = {
        "fc.weight": weights.w_join_GD.t(),
        "norm.weight": weights.final_norm_D,
        "lm_head.weight": weights.head_DW.t(),
        **{f"midlayer.{name}.weight": tensor for name, tensor in layer.items()},
    }
    if weights.embedding_VD is not None:
        tensors["embed_tokens.weight"] = weights.embedding_VD
    if has_offsets:
        tensors["d2t"] = weights.offsets_W
    # t2d tells the same as d2t, for training.
    return TensorTargets(tensors=tensors, is_ignored=lambda name: name == "t2d" or name.endswith("rotary_emb.inv_freq"))
