"""The seam of the queue's order: the waiting requests of one (priority, router, tenant), and which of them is next.

A strategy orders what is alike: priorities go first whatever the strategy, and lanes of one priority take turns
(queue.py), so that no router or tenant gains by what it sends.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from radixmesh.daemons.scheduler.prefix_cache import NOTHING_KNOWN, Probe
from radixmesh.daemons.scheduler.request import Request

ProbeRequest = Callable[[Request], Probe]


class PlanView:
    """What a lane may look at while one plan is made: the time, and the cache by a bounded number of probes.

    `number` tells plans apart.
    """

    def __init__(self, number: int = 0, now: float = 0.0, probe: ProbeRequest | None = None, num_probes: int = 0):
        self.number = number
        self.now = now
        self._probe = probe
        self.num_probes_left = num_probes

    def probe(self, request: Request) -> Probe:
        """What the cache knows of a request; takes one of the probes that are left."""
        self.num_probes_left -= 1
        return self._probe(request) if self._probe is not None else NOTHING_KNOWN


class Lane(ABC):
    """Waiting requests in some order."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Adds a request; one that comes back (retracted, held, or after a new epoch) has its old arrival number."""

    @abstractmethod
    def head(self, view: PlanView) -> Request | None:
        """The next request, which stays; None = empty. Costs no more than the view's probes and a logarithm."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Takes out a request that is in this lane."""

    def admitted(self, request: Request) -> None:
        """Takes out a request because it runs now."""
        self.remove(request)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class SortedLane(Lane):
    """Orders by a key that does not change while a request waits. O(log n)."""

    def __init__(self, key: Callable[[Request], int]) -> None:
        self._key = key
        self._heap: list[tuple[int, int, int, Request]] = []
        self._num_pushed = 0
        self._members: dict[Request, None] = {}

    def push(self, request: Request) -> None:
        assert request not in self._members, request.key
        # One that was removed and comes back may still have an entry: it is equal, and one of them is skipped.
        self._members[request] = None
        self._num_pushed += 1
        heapq.heappush(self._heap, (self._key(request), request.arrival, self._num_pushed, request))

    def head(self, view: PlanView) -> Request | None:
        while self._heap and self._heap[0][3] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def remove(self, request: Request) -> None:
        del self._members[request]
        # Entries of the removed leave when they reach the head; rebuild where most are such.
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[3] in self._members]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)


class AgedLane(Lane):
    """Any order, with a bound on how long it may pass somebody over.

    Once the oldest has waited max_wait_s it gets every turns-th admission until nobody old is left. So a request waits
    at most max_wait_s, and from then on `turns` times what first-come order would take.
    """

    def __init__(self, inner: Lane, *, max_wait_s: float, turns: int) -> None:
        self._inner = inner
        self._by_arrival = SortedLane(first_come)
        self._max_wait_s = max_wait_s
        self._turns = turns
        self._num_since_old = 0
        self._old: Request | None = None

    def push(self, request: Request) -> None:
        self._inner.push(request)
        self._by_arrival.push(request)

    def head(self, view: PlanView) -> Request | None:
        self._old = None
        if self._num_since_old + 1 >= self._turns:
            oldest = self._by_arrival.head(view)
            if oldest is not None and view.now - oldest.waits_since_s >= self._max_wait_s:
                self._old = oldest
                return oldest
        return self._inner.head(view)

    def remove(self, request: Request) -> None:
        self._inner.remove(request)
        self._by_arrival.remove(request)

    def admitted(self, request: Request) -> None:
        self._num_since_old = 0 if request is self._old else self._num_since_old + 1
        self._inner.admitted(request)
        self._by_arrival.remove(request)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._inner)


def first_come(request: Request) -> int:
    return request.arrival
