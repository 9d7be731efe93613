"""The seam between a group and what carries its collectives: gloo between CPUs.

A communicator belongs to one generation of a group. It is made connected, and is of no use once anything fails in it:
the next generation makes another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A place where the ranks that share a model, or its experts, find each other. rank: of this one, in [0, size).

    name: of the generation and of these ranks, unlike any other at that address. host: the address of this
    machine by which the others reach this rank. is_wanted: False once nobody waits for the outcome any more.
    """

    address: tuple[str, int]
    name: str
    host: str
    rank: int
    size: int
    is_wanted: Callable[[], bool] = _always


class Communicator(ABC):
    """Collectives of one generation, called on one thread; close() comes on any."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """False once a rank was lost or close() was called."""

    def check(self) -> None:
        """Raises as gather() does where the group is not whole."""
        if not self.is_whole:
            raise CollectiveAborted("the group was left")

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: every rank's x, which are of one shape and dtype, in the order of the ranks.

        Waits for a rank that is late, as long as it lives. Raises RankLost within 5 s of the death of a rank, or of the
        moment from which it does nothing any more, and CollectiveAborted soon after close().
        """

    @abstractmethod
    def all_to_all(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        """[sum(from_ranks), *x.shape[1:]]: rows of all ranks for this one, in the order of the ranks. x: rows for all
        ranks, likewise, to_ranks[i] of them for rank i.

        Rank i is told to send just from_ranks[i] rows here: another number may end the process. Waits and raises as
        gather().
        """

    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """As all_to_all(), which is begun; the result waits for it. Several may be under way: they end in their order.

        Default: nothing is under way when it returns.
        """
        came = self.all_to_all(x, to_ranks, from_ranks)
        return lambda: came

    @abstractmethod
    def close(self) -> None:
        """Ends running collectives, and those to come, with CollectiveAborted. Idempotent; does not block."""


Connect = Callable[[Meeting], Communicator]
"""Meets the other ranks: blocks until all are there, a minute at most. Raises RankLost if they do not come, and
CollectiveAborted soon after the meeting is not wanted any more."""
