"""Ranks of a tensor-parallel group as threads of this process, with collectives that meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from radixmesh.daemons.worker.collectives.communicator import Communicator
from radixmesh.daemons.worker.collectives.rank_group import RankGroup

T = TypeVar("T")
_STUCK_S = 60.0


class ThreadCommunicator(Communicator):
    """One rank's end; `tensors` are those of all ranks."""

    is_whole = True

    def __init__(self, rank: int, barrier: threading.Barrier, tensors: list[torch.Tensor | None]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._tensors = tensors
        self.num_calls = 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self._tensors[self._rank] = x
        self._barrier.wait(_STUCK_S)
        shapes = {(tensor.shape, tensor.dtype) for tensor in self._tensors if tensor is not None}
        assert len(shapes) == 1, f"ranks are in different collectives: {shapes}"
        gathered = torch.stack([tensor for tensor in self._tensors if tensor is not None])
        # Nobody brings the next tensor while others read this one.
        self._barrier.wait(_STUCK_S)
        return gathered

    def all_to_all(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        self.num_calls += 1
        assert len(x) == sum(to_ranks), (x.shape, to_ranks)
        self._tensors[self._rank] = x.split(list(to_ranks))  # type: ignore[assignment, call-overload]
        self._barrier.wait(_STUCK_S)
        parts = [parts[self._rank] for parts in self._tensors if parts is not None]
        assert [len(part) for part in parts] == list(from_ranks), "ranks disagree on what they send each other"
        came = torch.cat(parts)
        self._barrier.wait(_STUCK_S)
        return came

    def close(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    """`size` ranks; each has its own Group, and its own thread in run()."""

    def __init__(self, size: int) -> None:
        barrier, tensors = threading.Barrier(size), [None] * size
        self.groups = [RankGroup(rank, size) for rank in range(size)]
        for rank, group in enumerate(self.groups):
            group.communicator = ThreadCommunicator(rank, barrier, tensors)  # type: ignore[arg-type]
        self._barrier = barrier
        self._threads = ThreadPoolExecutor(size)

    def run(self, call: Callable[[int], T]) -> list[T]:
        """The results of call(rank) on all ranks at once; the first error ends all."""

        def one(rank: int) -> T:
            try:
                return call(rank)
            except BaseException:
                self._barrier.abort()
                raise

        return self.results([self._threads.submit(one, rank) for rank in range(len(self.groups))])

    @staticmethod
    def results(futures: Sequence[Future[T]]) -> list[T]:
        """Raises the first error; those of others are what came of it."""
        errors = [future.exception() for future in futures]
        raised = [error for error in errors if error is not None]
        for error in sorted(raised, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        self._threads.shutdown()
