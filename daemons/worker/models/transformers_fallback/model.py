"""A causal language model of transformers behind our seam: all rows of a step as one sequence of its modules.

The modules see no cache: attention goes to the pool, and everything else is a function of a row and its position. The
check at the end of loading shows it (`loading.py`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.models.cached_attention import attend_cached
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.models.model import Model, ModelBatch, RowProbe
from radixmesh.daemons.worker.models.transformers_fallback.attention import (
    Attend,
    AttentionLayer,
    AttentionStep,
    Rows,
)
from radixmesh.daemons.worker.tiles import RowTiles


class _GivenHidden(nn.Module):
    """Stands where the layers were, so that the head, with all that it does to logits, runs on rows that are given."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersModel(Model):
    """`step` has one layer after the other, all of one shape. A row's last bits may depend on its batch."""

    is_batch_invariant = False

    def __init__(
        self, model: PreTrainedModel, step: AttentionStep, *, vocab_size: int, hidden_size: int, max_total_len: int
    ) -> None:
        shape = step.layers[0].shape
        row_shape = (shape.num_kv_heads, shape.head_dim)
        self.tasks = frozenset({Task.GENERATE, Task.EMBED})
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.windows = tuple(step.layers[index].window for index in range(len(step.layers)))
        self.has_sinks = any(layer.has_sinks for layer in step.layers.values())
        self.max_total_len = max_total_len
        self.attention_shape = shape
        self.kv_layout = KvLayout(
            num_layers=len(step.layers),
            planes=(KvPlane(name="keys", row_shape=row_shape), KvPlane(name="values", row_shape=row_shape)),
        )
        self._layers = model.base_model
        self._head = model
        setattr(model, model.base_model_prefix, _GivenHidden())
        self._step = step

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, hidden] behind the final norm, of rows of any sequences: `attend` alone knows which. ids and positions
        int64."""
        self._step.attend = attend
        try:
            output = self._layers(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
        finally:
            self._step.attend = None
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD

    def head(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """[T, vocabulary] of rows of `hidden`, in their dtype."""
        logits_TV: torch.Tensor = self._head(inputs_embeds=hidden_TD[None], use_cache=False).logits[0]
        return logits_TV

    def forward(self, batch: ModelBatch) -> torch.Tensor:
        """As every model's, but after the final norm, which is part of the modules."""
        return self.hidden(batch.ids_T, batch.positions_T, partial(_attend, batch))

    def logits(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        return self.head(hidden_TD).float()

    def final_hidden(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        return hidden_TD.float()

    def row_probes(self) -> tuple[RowProbe, ...]:
        return ()


def _attend(batch: ModelBatch, index: int, layer: AttentionLayer, rows: Rows) -> torch.Tensor:
    q_THd, k_TKd, v_TKd, sinks_H = rows
    return attend_cached(batch, index, q_THd, k_TKd, v_TKd, window=layer.window, sinks_H=sinks_H)
