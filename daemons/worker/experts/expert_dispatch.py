"""The seam between a layer's experts and what carries rows to the ranks that hold them.

Legend: P pairs of a row and an expert that it picked, R pairs that this rank computes, D hidden size, E experts, S
slots of experts on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.worker.experts.expert_slots import ExpertSlots


class ExpertShare(NamedTuple):
    """Experts [start, stop) of a layer, which one rank holds when its weights are loaded."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Dispatched(NamedTuple):
    """Pairs that this rank computes: row `rows_R[i]` of x_XD, any number of them, through the expert at its own slot
    `held_R[i]`, int64 in [0, slots of a rank). route: what the dispatch needs to bring results back.
    """

    x_XD: torch.Tensor
    rows_R: torch.Tensor
    held_R: torch.Tensor
    route: object = None


class ExpertDispatch(ABC):
    """Ranks that share the experts of every layer. All make the same calls in the same order, each with any number of
    rows, none too. A rank's results depend on its own rows alone, to the bit.

    Calls raise CollectiveAborted (daemons/worker/ranks/group_member.py) once the group is left or a rank of it is lost.
    """

    rank: int = 0
    size: int = 1
    num_pairs: int = 0
    """Pairs that came to this rank since it started."""

    def share(self, num_experts: int, rank: int | None = None) -> ExpertShare:
        """Experts that a rank loads, by default this one: contiguous, as many as on any other or one more."""
        rank = self.rank if rank is None else rank
        return ExpertShare(num_experts * rank // self.size, num_experts * (rank + 1) // self.size)

    def slots_per_rank(self, num_experts: int) -> int:
        """Experts of a layer that a rank has memory for."""
        return -(-num_experts // self.size)

    def first_slots(self, num_experts: int) -> ExpertSlots:
        """Those of a layer whose weights were just loaded: each rank's share, and empty ones behind it."""
        per_rank = self.slots_per_rank(num_experts)
        experts_S = torch.full((self.size * per_rank,), -1, dtype=torch.int64)
        for rank in range(self.size):
            share = self.share(num_experts, rank)
            experts_S[rank * per_rank : rank * per_rank + share.size] = torch.arange(share.start, share.stop)
        return ExpertSlots(experts_S, num_experts, self.size, self.rank)

    def set_dispatch_mode(self, mode: DispatchMode, max_tokens_per_rank: int) -> None:
        """The shape of the next forward, as the plan's header says: the same on all ranks.

        max_tokens_per_rank: most rows that any rank brings to a layer; bounds what low latency reserves.
        """
        return

    @abstractmethod
    def dispatch(self, x_XD: torch.Tensor, rows_P: torch.Tensor, experts_P: torch.Tensor, slots: ExpertSlots,
                 num_picks: int) -> Dispatched:  # fmt: skip
        """Sends pairs to ranks that hold their experts; what came here. A row is in at most num_picks pairs, each of
        another expert."""

    @abstractmethod
    def combine(self, dispatched: Dispatched, results_RD: torch.Tensor) -> torch.Tensor:
        """float32 [P, D]: results of the pairs that dispatch() was given, in their order."""


class LocalDispatch(ExpertDispatch):
    """All experts are here: nothing is sent."""

    def dispatch(self, x_XD: torch.Tensor, rows_P: torch.Tensor, experts_P: torch.Tensor, slots: ExpertSlots,
                 num_picks: int) -> Dispatched:  # fmt: skip
        return Dispatched(x_XD, rows_P, experts_P)

    def combine(self, dispatched: Dispatched, results_RD: torch.Tensor) -> torch.Tensor:
        return results_RD
