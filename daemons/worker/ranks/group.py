"""The ranks that hold one model together (tensor parallelism), as the maths of a model sees them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Group(Protocol):
    """Collectives of a tensor-parallel group. Every rank calls the same ones in the same order, with the same shapes.

    Each raises CollectiveAborted (daemons/worker/ranks/group_member.py) once the group is left or a rank of it is lost.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x over the ranks, to the bit the same on all of them and at every repetition; may reuse the memory
        of x."""
        ...

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The ranks' x side by side along the last dim, in the order of the ranks; widths: size of each there."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Within it collectives give back what this rank put in, of the shape that they always have: for trying row
        functions before there is a group."""
        ...


class LocalGroup:
    """The group of one rank: every collective gives back what it got."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()
