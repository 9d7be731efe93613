"""A smaller model of the same vocabulary that drafts (Leviathan et al. 2023)."""

from __future__ import annotations

from dataclasses import replace

import torch

from radixmesh.daemons.worker.models.model import Model, ModelBatch
from radixmesh.daemons.worker.speculation.models.draft_model import DraftModel, in_vocabulary
from radixmesh.daemons.worker.tiles import RowTiles


class StandaloneModel(DraftModel):
    """vocab_size: the target's; models of one family are often padded to different sizes."""

    hidden_layers = ()
    num_features = 0

    def __init__(self, model: Model, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self.max_total_len = model.max_total_len
        self.kv_layout, self.attention_shape = model.kv_layout, model.attention_shape
        # Drafts change no output, so their bits may depend on the batch.
        self._tiles = RowTiles(None)

    def features(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        raise AssertionError("a model of its own is fed tokens alone")

    def forward(self, batch: ModelBatch, features_TF: torch.Tensor | None) -> torch.Tensor:
        # The target may have ids that this model has no embedding for, and a prompt may name them.
        known_T = torch.where(batch.ids_T < self._model.vocab_size, batch.ids_T, 0)
        return self._model.forward(replace(batch, ids_T=known_T))

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return in_vocabulary(self._model.logits(output, self._tiles), self._vocab_size)
