"""A smaller model of the same vocabulary that drafts on a device (Leviathan et al. 2023)."""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.drafting.network import DraftNetwork, LoadedNetwork
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, Kernels, LoadedModel
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.kernels.rope_kv import KvTarget


class LoadedStandalone(LoadedNetwork):
    """own_kernels: for the model's own matrices. max_rows: rows whose logits are computed at once."""

    def __init__(self, model: LoadedModel, own_kernels: Kernels, max_rows: int) -> None:
        self.model, self._kernels, self._max_rows = model, own_kernels, max_rows
        self.max_total_len, self.dtype = model.max_total_len, model.dtype
        self.kv_layout, self.attention_shape = model.kv_layout, model.attention_shape
        self.windows, self.attention_chunks = model.windows, model.attention_chunks
        self.has_sinks, self.latent_rank = model.has_sinks, model.latent_rank
        self.can_capture = model.can_capture

    def create(self, kernels: Kernels, kv: KvPlanes, target: DeviceModel, max_total_len: int) -> DraftNetwork:
        model = self.model.create(self._kernels, kv, min(max_total_len, self.max_total_len))
        return StandaloneNetwork(model, target.vocab_size, self._max_rows)

    def row_bytes(self) -> int:
        return self.model.row_bytes()


class StandaloneNetwork(DraftNetwork):
    """vocab_size: the target's; models of one family are often padded to different sizes."""

    def __init__(self, model: DeviceModel, vocab_size: int, max_rows: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._padded_TV: torch.Tensor | None = None
        if vocab_size > model.vocab_size:
            shape = (max_rows, vocab_size)
            self._padded_TV = model.embedding_VD.new_full(shape, float("-inf"), dtype=model.dtype)

    def forward(
        self, ids_T: torch.Tensor, features_TF: torch.Tensor | None, target: KvTarget, attention: StepAttention
    ) -> torch.Tensor:
        # The target may have ids that this model has no embedding for, and a prompt may name them.
        if self._padded_TV is not None:
            ids_T = torch.where(ids_T < self._model.vocab_size, ids_T, 0)
        return self._model.layers(self._model.embed(ids_T), target, attention)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        logits_TV = self._model.logits(output)
        if self._padded_TV is None:
            return logits_TV[:, : self._vocab_size]
        padded_TV = self._padded_TV[: len(output)]
        padded_TV[:, : logits_TV.shape[1]] = logits_TV
        return padded_TV
