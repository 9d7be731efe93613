"""The seam between the layers of a model on a device and what carries its sums to the other ranks.

ALONE --form, once the ranks have met--> TOGETHER --a rank is lost, or the group was left--> LOST --form--> TOGETHER

Steps are launched ahead of their results, so a lost rank shows when a result is asked for: `check` raises then, and
whatever the step computed is dropped. Legend: T rows, N features, W this rank's share of the vocabulary, V all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from radixmesh.daemons.worker.collectives.rank_group import RankGroup


class DeviceGroup(ABC):
    """Collectives between the ranks of one batch on the current stream; all ranks launch the same ones in the same
    order. Until `form` a rank is alone: parts of others are zeros, so that steps can be warmed up and captured.

    can_capture: they may be recorded in graphs. is_captured_anew: graphs hold the group's connections, so that each
    generation needs graphs of its own.
    """

    can_capture: bool = True
    is_captured_anew: bool = False

    def __init__(self, ranks: RankGroup) -> None:
        """ranks: the same ones on the host, by which they meet, and notice that one is lost."""
        self.ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    @property
    def kind(self) -> str:
        """Of the transport: ranks with another one form no group."""
        return type(self).__name__

    @abstractmethod
    def form(self) -> None:
        """Connects with the others, who do so too; on the thread of the steps, of which none runs.

        Raises CollectiveAborted, or MeshError UNSUPPORTED where these ranks cannot reach each other this way.
        """

    def leave(self) -> None:
        """Drops what belongs to one generation of the group: no graph that holds it is left. Default: nothing does."""
        return

    def check(self) -> None:
        """Raises CollectiveAborted or RankLost unless all collectives that are over were computed by all ranks."""
        self.ranks.check()

    @abstractmethod
    def add_reduced(self, x_TN: torch.Tensor, residual_TN: torch.Tensor) -> None:
        """residual += the sum of x over the ranks, in place; the same bits on all ranks. May overwrite x."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, the same bits on all; may be in the memory of x."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The ranks' x_TW side by side, [T, V]; widths: those of `share_of` the vocabulary."""

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


class HostGroup(DeviceGroup):
    """Collectives by the host, for CPUs and where nothing else reaches the other ranks: the device is waited for, and
    nothing is captured."""

    can_capture = False

    def __init__(self, ranks: RankGroup) -> None:
        super().__init__(ranks)
        self._is_formed = False

    def form(self) -> None:
        self._is_formed = True

    def add_reduced(self, x_TN: torch.Tensor, residual_TN: torch.Tensor) -> None:
        residual_TN += self.all_reduce(x_TN)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(x.cpu()).to(x.device) if self._is_formed else x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        if self._is_formed:
            return self.ranks.all_gather(x.cpu(), widths).to(x.device)
        with self.ranks.alone():
            return self.ranks.all_gather(x, widths)
