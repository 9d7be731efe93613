"""The seam between a layer's experts and what carries rows to the ranks that hold them.

Legend: P pairs of a row and an expert that it picked, R pairs that this rank computes, D hidden size, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from radixmesh.daemons.runtime.steps.step import DispatchMode


class ExpertShare(NamedTuple):
    """Experts [start, stop) of a layer, which one rank holds."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Dispatched(NamedTuple):
    """Pairs that this rank computes: row `rows_R[i]` of x_XD, any number of them, through expert `experts_R[i]`.

    experts_R: int64, numbers of experts of the whole layer. route: what the dispatch needs to bring results back.
    """

    x_XD: torch.Tensor
    rows_R: torch.Tensor
    experts_R: torch.Tensor
    route: object = None


class ExpertDispatch(ABC):
    """Ranks that share the experts of every layer. All make the same calls in the same order, each with any number of
    rows, none too. A rank's results depend on its own rows alone, to the bit.

    Calls raise CollectiveAborted (daemons/worker/group_member.py) once the group is left or a rank of it is lost.
    """

    rank: int = 0
    size: int = 1
    num_pairs: int = 0
    """Pairs that came to this rank since it started."""

    def share(self, num_experts: int, rank: int | None = None) -> ExpertShare:
        """Experts that a rank holds, by default this one: contiguous, as many as on any other or one more."""
        rank = self.rank if rank is None else rank
        return ExpertShare(num_experts * rank // self.size, num_experts * (rank + 1) // self.size)

    def set_dispatch_mode(self, mode: DispatchMode, max_tokens_per_rank: int) -> None:
        """The shape of the next forward, as the plan's header says: the same on all ranks.

        max_tokens_per_rank: most rows that any rank brings to a layer; bounds what low latency reserves.
        """
        return

    @abstractmethod
    def dispatch(self, x_XD: torch.Tensor, rows_P: torch.Tensor, experts_P: torch.Tensor, num_experts: int,
                 num_picks: int) -> Dispatched:  # fmt: skip
        """Sends pairs to the ranks of their experts; what came here. A row is in at most num_picks pairs."""

    @abstractmethod
    def combine(self, dispatched: Dispatched, results_RD: torch.Tensor) -> torch.Tensor:
        """float32 [P, D]: results of the pairs that dispatch() was given, in their order."""


class LocalDispatch(ExpertDispatch):
    """All experts are here: nothing is sent."""

    def dispatch(self, x_XD: torch.Tensor, rows_P: torch.Tensor, experts_P: torch.Tensor, num_experts: int,
                 num_picks: int) -> Dispatched:  # fmt: skip
        return Dispatched(x_XD, rows_P, experts_P)

    def combine(self, dispatched: Dispatched, results_RD: torch.Tensor) -> torch.Tensor:
        return results_RD
