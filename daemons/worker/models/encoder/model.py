"""The maths and the weights of an encoder (BERT: Devlin et al. 2018; RoBERTa: Liu et al. 2019).

Legend: T tokens of one prompt, D hidden size, F mlp size, H heads, d head_dim, V vocabulary, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from radixmesh.daemons.worker.checkpoint.loader import OtherTarget, TensorTargets
from radixmesh.daemons.worker.models.activations import ACTIVATIONS
from radixmesh.daemons.worker.models.encoder.config import EncoderConfig
from radixmesh.daemons.worker.models.model import Placement


@dataclass(frozen=True, slots=True)
class _Affine:
    """A projection [out, in] with a bias, or the weight and bias of a LayerNorm."""

    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def empty(cls, placement: Placement, *shape: int) -> _Affine:
        weight = torch.empty(*shape, dtype=placement.dtype, device=placement.device)
        return cls(weight, weight.new_empty(shape[0]))

    def targets(self, name: str, first: int = 0, size: int | None = None) -> dict[str, torch.Tensor]:
        """By names in a checkpoint, of `size` rows from `first` on."""
        size = size or self.weight.shape[0]
        return {
            f"{name}.weight": self.weight.narrow(0, first, size),
            f"{name}.bias": self.bias.narrow(0, first, size),
        }


class _Layer:
    def __init__(self, config: EncoderConfig, placement: Placement) -> None:
        hidden = config.hidden_size
        self.qkv = _Affine.empty(placement, 3 * hidden, hidden)
        self.output = _Affine.empty(placement, hidden, hidden)
        self.attention_norm = _Affine.empty(placement, hidden)
        self.up = _Affine.empty(placement, config.mlp_size, hidden)
        self.down = _Affine.empty(placement, hidden, config.mlp_size)
        self.mlp_norm = _Affine.empty(placement, hidden)

    def targets(self, prefix: str, hidden: int) -> dict[str, torch.Tensor]:
        parts = {
            f"{prefix}attention.self.{name}": self.qkv.targets(f"{prefix}attention.self.{name}", index * hidden, hidden)
            for index, name in enumerate(("query", "key", "value"))
        }
        return {name: tensor for part in parts.values() for name, tensor in part.items()} | {
            **self.output.targets(f"{prefix}attention.output.dense"),
            **self.attention_norm.targets(f"{prefix}attention.output.LayerNorm"),
            **self.up.targets(f"{prefix}intermediate.dense"),
            **self.down.targets(f"{prefix}output.dense"),
            **self.mlp_norm.targets(f"{prefix}output.LayerNorm"),
        }


class EncoderModel:
    """Every token sees all others of its prompt. Prompts are computed one by one, so neighbours change no bits."""

    def __init__(self, config: EncoderConfig, placement: Placement) -> None:
        self.config = config
        new = _Affine.empty
        self._words_VD, self._positions_PD, self._types_D = (
            new(placement, size, config.hidden_size).weight
            for size in (config.vocab_size, config.num_positions, config.num_token_types)
        )
        self._norm = new(placement, config.hidden_size)
        self._layers = [_Layer(config, placement) for _ in range(config.num_layers)]

    def targets(self) -> TensorTargets:
        """Targets of a checkpoint's tensors. Its pooler and heads have none: embeddings have no use for them."""
        tensors = {
            "embeddings.word_embeddings.weight": self._words_VD,
            "embeddings.position_embeddings.weight": self._positions_PD,
            "embeddings.token_type_embeddings.weight": self._types_D,
            **self._norm.targets("embeddings.LayerNorm"),
        }
        for index, layer in enumerate(self._layers):
            tensors |= layer.targets(f"encoder.layer.{index}.", self.config.hidden_size)
        prefix = self.config.prefix
        others = {prefix + name: OtherTarget(tensor=x, replaces=(name,)) for name, x in tensors.items()}
        unused = ("pooler.", f"{prefix}pooler.", "cls.", "lm_head.")
        return TensorTargets(
            tensors=tensors,
            is_ignored=lambda name: name.startswith(unused) or name.endswith("embeddings.position_ids"),
            others=others,
        )

    def encode(self, ids_T: torch.Tensor) -> torch.Tensor:
        """float32 [T, D], the last layer's output for an int64 prompt of at most `max_total_len` tokens."""
        x_TD = functional.embedding(ids_T, self._words_VD) + self._types_D[0]
        x_TD = self._normed(x_TD + functional.embedding(self._positions(ids_T), self._positions_PD), self._norm)
        act = ACTIVATIONS[self.config.activation]
        for layer in self._layers:
            attended_TD = functional.linear(self._attend(x_TD, layer), layer.output.weight, layer.output.bias)
            x_TD = self._normed(x_TD + attended_TD, layer.attention_norm)
            up_TF = act(functional.linear(x_TD, layer.up.weight, layer.up.bias))
            x_TD = self._normed(x_TD + functional.linear(up_TF, layer.down.weight, layer.down.bias), layer.mlp_norm)
        return x_TD.float()

    def _positions(self, ids_T: torch.Tensor) -> torch.Tensor:
        pad_id = self.config.pad_id
        if pad_id is None:
            return torch.arange(len(ids_T), device=ids_T.device)
        is_counted_T = (ids_T != pad_id).long()
        return is_counted_T.cumsum(0) * is_counted_T + pad_id

    def _attend(self, x_TD: torch.Tensor, layer: _Layer) -> torch.Tensor:
        num_heads = self.config.num_heads
        qkv_TX = functional.linear(x_TD, layer.qkv.weight, layer.qkv.bias)
        q_HTd, k_HTd, v_HTd = qkv_TX.view(len(x_TD), 3, num_heads, -1).permute(1, 2, 0, 3).unbind(0)
        # Without a matrix of T x T scores in memory.
        out_HTd = functional.scaled_dot_product_attention(q_HTd[None], k_HTd[None], v_HTd[None])[0]
        return out_HTd.transpose(0, 1).flatten(1)

    def _normed(self, x_TD: torch.Tensor, norm: _Affine) -> torch.Tensor:
        return functional.layer_norm(x_TD, norm.weight.shape, norm.weight, norm.bias, self.config.norm_eps)
