"""Embedding and logits of a vocabulary that the ranks of a group divide among them (Shoeybi et al. 2019).

Legend: T rows, D hidden size, V vocabulary, W the rank's share of it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from radixmesh.daemons.worker.models.sharding import share_of
from radixmesh.daemons.worker.ranks.group import Group


class ShardedVocabulary:
    """Each rank holds the rows of its own tokens, `share`; of a group of one, all of them."""

    def __init__(self, vocab_size: int, group: Group) -> None:
        self.share = share_of(vocab_size, group.size, group.rank)
        self._widths = tuple(share_of(vocab_size, group.size, rank).size for rank in range(group.size))
        self._group = group

    def embed(self, ids_T: torch.Tensor, embedding_WD: torch.Tensor) -> torch.Tensor:
        """[T, D], on every rank the rows of all ids."""
        if self._group.size == 1:
            return functional.embedding(ids_T, embedding_WD)
        local_T = ids_T - self.share.start
        is_other_T = (local_T < 0) | (local_T >= self.share.size)
        x_TD = functional.embedding(local_T.masked_fill(is_other_T, 0), embedding_WD)
        return self._group.all_reduce(x_TD.masked_fill(is_other_T[:, None], 0))

    def gather(self, logits_TW: torch.Tensor) -> torch.Tensor:
        """[T, V]: on every rank the logits of all tokens."""
        return self._group.all_gather(logits_TW, self._widths)
