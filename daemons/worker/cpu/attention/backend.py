"""The seam between a model and the way that attention over paged KV is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

SlotArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Shape shared by all layers and steps. `num_heads` is a multiple of `num_kv_heads` (this rank's share).

    softcap: scaled scores become cap x tanh(score / cap), before keys are hidden; None = they stay.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSegment:
    """`length` consecutive tokens of one sequence from position `start` on.

    kv_slots int64 [start + length]: where the KV of each position lies, as an index into the pool's tokens.
    """

    start: int
    length: int
    kv_slots: SlotArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The segments of a step, whose rows follow one another; `num_rows` >= their sum counts padding rows too.

    zero_slot: index of a token of the pool that is never granted and holds zeros.
    """

    segments: Sequence[AttentionSegment]
    num_rows: int
    zero_slot: int


class BatchAttention(ABC):
    """Attention of one step, for any of its layers."""

    @abstractmethod
    def attend(
        self,
        query_THD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        """Softmax attention of every row over its own sequence up to itself.

        window, the layer's: a token sees itself and the `window - 1` before it; None = all before it.
        sinks_H, the layer's: a score per head that joins each row's softmax and has no value (Xiao et al. 2023).
        chunk, the layer's: a token sees only those from the last multiple of `chunk` on; None = no chunks.
        query_THD: [rows with padding, heads, head_dim], with RoPE, not scaled. keys_SKD, values_SKD: the layer's whole
        pool, [tokens of the pool, kv heads, head_dim], where the step's own tokens are already written. Returns
        [rows with padding, heads, head_dim] in the dtype of the query; padding rows hold finite numbers of no meaning.
        Modifies nothing. Pool tokens outside a row's own sequence may hold anything, NaN too.
        """


class AttentionBackend(ABC):
    """An implementation of attention. `is_batch_invariant`: a row's bits depend on its own sequence alone."""

    is_batch_invariant: bool

    @abstractmethod
    def begin(self, batch: AttentionBatch) -> BatchAttention:
        """Prepares a step: whatever does not depend on the layer. The result is valid while the pages are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlacement:
    """Settings of a backend; `is_deterministic` asks for batch invariance where the backend can give it."""

    device: torch.device
    dtype: torch.dtype
    is_deterministic: bool
