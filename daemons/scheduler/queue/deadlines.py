"""Requests with a deadline, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from radixmesh.daemons.scheduler.sequence import Lifecycle, Request


class Deadlines:
    """Heap of deadlines; entries of requests that ended leave when they come up, or when most are such."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_live = 0

    def add(self, request: Request) -> None:
        """A request that goes live, whether it has a deadline or not."""
        deadline_s = request.submission.deadline_s
        if deadline_s is None:
            return
        self._num_live += 1
        heapq.heappush(self._heap, (deadline_s, request.arrival, request))

    def ended(self, request: Request) -> None:
        """A request that was added is over."""
        if request.submission.deadline_s is None:
            return
        self._num_live -= 1
        # Deadlines may be hours away: what ended must not stay until then.
        if len(self._heap) > 64 + 2 * self._num_live:
            self._heap = [entry for entry in self._heap if entry[2].lifecycle is not Lifecycle.FINISHED]
            heapq.heapify(self._heap)

    def due(self, now: float) -> Iterator[Request]:
        """Live requests whose deadline has passed; end each before the next is asked for."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.lifecycle is not Lifecycle.FINISHED:
                yield request

    def __len__(self) -> int:
        return len(self._heap)
