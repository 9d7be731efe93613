"""The seam of networks that draft on a device: what one is fed, what it keeps of a token, and what it predicts.

    LoadedNetwork   the weights and what follows from them         made once
    DraftNetwork    the network over a KV pool, with its kernels   made anew for every pool

What rows, features and positions are, `daemons/worker/speculation/models/draft_model.py` says: the CPU's networks are
fed the same. The pool is read by token: page tables of pages of one token.

Legend: T rows, F numbers of a position's features, D hidden size of the target, V vocabulary of the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, Kernels
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlanes
from radixmesh.kernels.rope_kv import KvTarget


class DraftNetwork(ABC):
    """A causal network over a paged KV pool. Work goes to the current stream and may be captured."""

    def features(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[T, F] from the outputs of `hidden_layers`, each [T, D]: what is kept of these positions for later rows."""
        raise AssertionError(f"{type(self).__name__} is fed tokens alone")

    @abstractmethod
    def forward(
        self, ids_T: torch.Tensor, features_TF: torch.Tensor | None, target: KvTarget, attention: StepAttention
    ) -> torch.Tensor:
        """Writes the KV of all rows. [T, *] for `logits`; [T, F] where there are features, and then those of a row
        that follows with the draft.

        ids int32. features_TF: those of the position before each row, not modified; None: the network takes none.
        """

    @abstractmethod
    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """[T, V] of rows of `forward`'s output; -inf for what the network cannot predict. Valid until the next call."""


class LoadedNetwork(ABC):
    """The weights of a network on a device, for one target.

    hidden_layers: layers of the target whose outputs its features are made of, from 0; empty with num_features 0. The
    others as of `LoadedModel`. kv_layout is without the features.
    """

    hidden_layers: tuple[int, ...] = ()
    num_features: int = 0
    max_total_len: int
    dtype: torch.dtype
    kv_layout: KvLayout
    attention_shape: AttentionShape
    windows: tuple[int | None, ...] = (None,)
    attention_chunks: tuple[int, ...] = ()
    has_sinks: bool = False
    latent_rank: int | None = None
    can_capture: bool = True

    @abstractmethod
    def create(self, kernels: Kernels, kv: KvPlanes, target: DeviceModel, max_total_len: int) -> DraftNetwork:
        """The network over a pool. kernels: those of the target. max_total_len: of a request."""

    def row_bytes(self) -> int:
        """Memory of the activations of a row, beside those of the target's."""
        return 8 * self.num_features * self.dtype.itemsize
