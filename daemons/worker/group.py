"""The ranks that hold one model together (tensor parallelism), as the maths of a model sees them."""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """Collectives of a tensor-parallel group. Every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x over the ranks, equal on all of them; may reuse the memory of x."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x side by side along the last dim, in the order of the ranks."""
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

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x
