"""Requests with a deadline, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence


class Deadlines:
    """Heap of deadlines; entries of requests that ended leave when they come up, or when most are such."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_live = 0

    def add(self, sequence: Sequence) -> None:
        """A request that goes live, whether it has a deadline or not."""
        deadline_s = sequence.submission.deadline_s
        if deadline_s is None:
            return
        self._num_live += 1
        heapq.heappush(self._heap, (deadline_s, sequence.arrival, sequence))

    def ended(self, sequence: Sequence) -> None:
        """A request that was added is over."""
        if sequence.submission.deadline_s is None:
            return
        self._num_live -= 1
        # Deadlines may be hours away: what ended must not stay until then.
        if len(self._heap) > 64 + 2 * self._num_live:
            self._heap = [entry for entry in self._heap if entry[2].lifecycle is not Lifecycle.FINISHED]
            heapq.heapify(self._heap)

    def due(self, now: float) -> Iterator[Sequence]:
        """Live requests whose deadline has passed; end each before the next is asked for."""
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.lifecycle is not Lifecycle.FINISHED:
                yield sequence

    def __len__(self) -> int:
        return len(self._heap)


def deadline_error() -> MeshError:
    """The error of a request that was due."""
    message = "the request's deadline passed: allow more time, or fewer tokens"
    return MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message)
