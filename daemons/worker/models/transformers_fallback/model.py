"""A causal language model of transformers behind our seam: all rows of a step as one sequence of its modules.

The modules see no cache: attention goes to the pool, and everything else is a function of a row and its position. The
check at the end of loading shows it (`loading.py`).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.models.model import Model, ModelBatch, RowProbe
from radixmesh.daemons.worker.models.transformers_fallback.attention import AttentionStep
from radixmesh.daemons.worker.tiles import RowTiles


class _GivenHidden(nn.Module):
    """Stands where the layers were, so that the head, with all that it does to logits, runs on rows that are given."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersModel(Model):
    """`step` has one layer after the other, all of one shape. A row's last bits may depend on its batch."""

    is_batch_invariant = False

    def __init__(self, model: PreTrainedModel, step: AttentionStep, *, vocab_size: int, max_total_len: int) -> None:
        shape = step.layers[0].shape
        row_shape = (shape.num_kv_heads, shape.head_dim)
        self.tasks = frozenset({Task.GENERATE, Task.EMBED})
        self.vocab_size = vocab_size
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

    def forward(self, batch: ModelBatch) -> torch.Tensor:
        """As every model's, but after the final norm, which is part of the modules."""
        self._step.batch = batch
        try:
            output = self._layers(input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False)
        finally:
            self._step.batch = None
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD

    def logits(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        logits_TV: torch.Tensor = self._head(inputs_embeds=hidden_TD[None], use_cache=False).logits[0]
        return logits_TV.float()

    def final_hidden(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        return hidden_TD.float()

    def row_probes(self) -> tuple[RowProbe, ...]:
        return ()
