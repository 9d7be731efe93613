"""The seam of networks that draft: what one is fed, what it keeps of a token, and what it predicts.

    tokens      t0    t1    t2    t3                 position p of the drafter's KV lies beside position p of the
    features    f0    f1    f2                       target's, in the page of the same number of a pool of its own
    rows              t1,f0 t2,f1 t3,f2 -> t4        with features: from position 1 on
    rows        t0    t1    t2    t3    -> t4        without (a model of its own): from position 0 on

Features are made of the target's hidden states of a position. A row takes its own token and the features of the
position before, so what is kept at position p depends on the tokens [0, p] alone, as the target's KV does: a prefix
that requests share is a prefix for the drafter too. Behind the last token rows go on with the drafts, and with the
network's own outputs for features, which the target has not made yet.

Legend: T rows, F numbers of a position's features, H hidden size of the target, V vocabulary of the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.models.kv_layout import KvLayout
from radixmesh.daemons.worker.models.model import ModelBatch


class DraftModel(ABC):
    """A causal network over paged KV. Weights are filled once, before the first forward.

    hidden_layers: layers of the target whose outputs `features` takes, from 0, in that order; empty with num_features
    0, which is for a network that is fed tokens alone. max_total_len: most tokens that it takes.
    """

    hidden_layers: tuple[int, ...]
    num_features: int
    max_total_len: int
    kv_layout: KvLayout
    """Without the features."""
    attention_shape: AttentionShape

    @property
    def first_position(self) -> int:
        """That of the first row of a sequence: rows with features begin behind the first token."""
        return 1 if self.num_features else 0

    @abstractmethod
    def features(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[T, F] from the outputs of `hidden_layers`, each [T, H]: what is kept of these positions for later rows."""

    @abstractmethod
    def forward(self, batch: ModelBatch, features_TF: torch.Tensor | None) -> torch.Tensor:
        """Writes the KV of all rows. [T, *] for `logits`; [T, F] where there are features, and then those of a row
        that follows with the draft.

        batch: positions count from `first_position`, rows are not padded. features_TF: those of the position before
        each row; None: the network takes none.
        """

    @abstractmethod
    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """float32 [T, V] of rows of `forward`'s output; -inf for what the network cannot predict."""


def in_vocabulary(logits_TV: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32 [T, vocab_size]: without the ids that the target does not have, -inf for those that it has alone."""
    logits_TV = logits_TV.float()
    num_missing = vocab_size - logits_TV.shape[1]
    if num_missing <= 0:
        return logits_TV[:, :vocab_size]
    return torch.nn.functional.pad(logits_TV, (0, num_missing), value=float("-inf"))
