"""The ranks that share a model, or its experts, as maths sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from radixmesh.daemons.worker.collectives.communicator import Communicator
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted


class RankGroup:
    """The ranks of a group as maths sees them, whatever generation they are in."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.communicator: Communicator | None = None
        self._is_alone = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_alone or self.size == 1:
            return x
        # In the order of the ranks, whoever comes first, and on all ranks alike. Half precision adds in float32.
        gathered = self.stack(x)
        total = gathered[0].float() if x.is_floating_point() else gathered[0]
        for rank in range(1, self.size):
            total = total + gathered[rank]
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        assert len(widths) == self.size and x.shape[-1] == widths[self.rank], (x.shape, widths, self.rank)
        if self.size == 1:
            return x
        if self._is_alone:
            parts = [x if rank == self.rank else x.new_zeros(*x.shape[:-1], width) for rank, width in enumerate(widths)]
            return torch.cat(parts, dim=-1)
        widest = max(widths)
        if x.shape[-1] < widest:
            x = torch.cat((x, x.new_zeros(*x.shape[:-1], widest - x.shape[-1])), dim=-1)
        parts = [part[..., :width] for part, width in zip(self.stack(x), widths, strict=True)]
        return torch.cat(parts, dim=-1)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: every rank's x, in the order of the ranks."""
        return self._communicator().gather(x)

    def check(self) -> None:
        """Raises CollectiveAborted or RankLost unless the group is whole."""
        self._communicator().check()

    def all_to_all(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        """As Communicator.all_to_all."""
        return self._communicator().all_to_all(x, to_ranks, from_ranks)

    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """As Communicator.start_all_to_all."""
        return self._communicator().start_all_to_all(x, to_ranks, from_ranks)

    def _communicator(self) -> Communicator:
        if self.communicator is None:
            raise CollectiveAborted("the worker is in no group")
        return self.communicator
