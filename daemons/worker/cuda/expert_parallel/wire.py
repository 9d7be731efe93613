"""The seam between rows that travel to other ranks' experts and the collectives that carry them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.ranks.nccl_ranks import NcclRanks


class Wire(ABC):
    """Collectives of bytes on a device. Until `form` a rank is alone: parts of others are zeros, or do not come."""

    can_capture: bool = True
    is_captured_anew: bool = False

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    @abstractmethod
    def form(self) -> None:
        """As DeviceDispatch.form."""

    def leave(self) -> None:
        """As DeviceDispatch.leave."""
        return

    @abstractmethod
    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """[ranks, *x.shape]: every rank's x, of one shape, in their order. Called once, the result has the stream wait:
        until then the collective runs beside what the stream is given. Several may be under way."""

    @abstractmethod
    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """[sum(from_ranks), *x.shape[1:]]: to_ranks[i] rows of x go to rank i, in their order; as many as from_ranks[i]
        come from it. As start_gather()."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.start_gather(x)()

    def all_to_all(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        return self.start_all_to_all(x, to_ranks, from_ranks)()

    def _alone(self, x: torch.Tensor) -> torch.Tensor:
        """The result of gather() for a rank that is alone."""
        stacked = x.new_zeros(self.ranks.size, *x.shape)
        stacked[self.ranks.rank] = x
        return stacked

    def _own_alone(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        """The result of all_to_all() for a rank that is alone: others send zeros."""
        came = x.new_zeros(sum(from_ranks), *x.shape[1:])
        rank = self.ranks.rank
        start, first = sum(to_ranks[:rank]), sum(from_ranks[:rank])
        assert to_ranks[rank] == from_ranks[rank], (to_ranks, from_ranks)
        came[first : first + from_ranks[rank]] = x[start : start + to_ranks[rank]]
        return came


class HostWire(Wire):
    """By the hosts (gloo), for CPUs and where nothing else reaches the other ranks: the device is waited for."""

    can_capture = False

    def __init__(self, ranks: RankGroup) -> None:
        super().__init__(ranks)
        self._is_formed = False

    def form(self) -> None:
        self._is_formed = True

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        gathered = self.ranks.stack(x.cpu()).to(x.device) if self._is_formed else self._alone(x)
        return lambda: gathered

    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        if not self._is_formed:
            alone = self._own_alone(x, to_ranks, from_ranks)
            return lambda: alone
        came = self.ranks.start_all_to_all(x.cpu(), to_ranks, from_ranks)
        return lambda: came().to(x.device)


class NcclWire(Wire):
    """By NCCL, in CUDA graphs where rows are as many as on any other rank."""

    is_captured_anew = True

    def __init__(self, ranks: RankGroup, device: Device) -> None:
        """Raises MeshError UNSUPPORTED where this torch has no NCCL."""
        super().__init__(ranks)
        self._nccl = NcclRanks(ranks, device, "nccl-experts", "--ep-transport host")

    def form(self) -> None:
        self._nccl.form()

    def leave(self) -> None:
        self._nccl.leave()

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self._nccl.is_formed:
            alone = self._alone(x)
            return lambda: alone
        return self._nccl.start_gather(x)

    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        if not self._nccl.is_formed:
            alone = self._own_alone(x, to_ranks, from_ranks)
            return lambda: alone
        return self._nccl.start_all_to_all(x, to_ranks, from_ranks)
