"""The seam of the queue's order: the waiting requests of one (router, tenant) and priority, and which of them is next.

A strategy orders what is alike: lanes take turns (queue.py), so that no router or tenant gains by what it sends, and
within a lane higher priorities go first whatever the strategy.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from radixmesh.daemons.scheduler.cache.prefix_cache import NOTHING_KNOWN, Probe
from radixmesh.daemons.scheduler.sequence import Request

ProbeRequest = Callable[[Request], Probe]

_SHORTEST_LINE = 8
_FADING = 0.998


class PlanView:
    """What a lane may look at while one plan is made: the cache, by a bounded number of probes.

    `number` tells plans apart.
    """

    def __init__(self, number: int = 0, probe: ProbeRequest | None = None, num_probes: int = 0):
        self.number = number
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


class PriorityLane(Lane):
    """Lanes of one (router, tenant), one a priority: the highest goes first, each in the order of `make_lane`."""

    def __init__(self, make_lane: Callable[[], Lane]) -> None:
        self._make_lane = make_lane
        self._lanes: dict[int, Lane] = {}
        self._heap: list[int] = []
        """Negated priorities of _lanes, and of some that are gone; each once."""
        self._listed: set[int] = set()
        self._num = 0

    def push(self, request: Request) -> None:
        self._num += 1
        priority = request.submission.priority
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = self._make_lane()
            if priority not in self._listed:
                self._listed.add(priority)
                heapq.heappush(self._heap, -priority)
        lane.push(request)

    def head(self, view: PlanView) -> Request | None:
        while self._heap:
            lane = self._lanes.get(-self._heap[0])
            if lane is not None:
                return lane.head(view)
            self._listed.discard(-heapq.heappop(self._heap))
        return None

    def remove(self, request: Request) -> None:
        self._lanes[request.submission.priority].remove(request)
        self._drop_empty(request)

    def admitted(self, request: Request) -> None:
        self._lanes[request.submission.priority].admitted(request)
        self._drop_empty(request)

    def _drop_empty(self, request: Request) -> None:
        self._num -= 1
        if not len(self._lanes[request.submission.priority]):
            del self._lanes[request.submission.priority]

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            yield from lane


class AgedLane(Lane):
    """Any order, with a bound on how often it may pass somebody over; the bound grows with the line.

    A request that arrives when n wait is due after n + max_overtake_factor * longest admissions. `longest` is the
    longest recent queue: it decays by half in 350 admissions and is at least 8. Requests that are due go first, the
    earliest due before the others. First come, first served takes n admissions, `longest` at worst, so the worst wait
    here is 1 + max_overtake_factor times as long at any load, and seldom that long, since few requests are overtaken
    as often as allowed. A bound in seconds would bound nothing at low load, and at high load it would give the order of
    arrival. A request that returns (retracted, done waiting for a prefix, new epoch) is due as if it had come first.
    """

    def __init__(self, inner: Lane, *, max_overtake_factor: float) -> None:
        self._inner = inner
        self._overtaking = max_overtake_factor
        self._due: dict[Request, int] = {}
        self._by_due = SortedLane(lambda request: self._due[request])
        self._num_admitted = 0
        self._last_arrival = -1
        self._longest = 0.0

    def push(self, request: Request) -> None:
        is_new = request.arrival > self._last_arrival
        num_before = len(self._due) if is_new else 0
        self._last_arrival = max(self._last_arrival, request.arrival)
        self._longest = max(self._longest, num_before)
        line = max(self._longest if is_new else 0, _SHORTEST_LINE)
        self._due[request] = self._num_admitted + num_before + int(self._overtaking * line)
        self._by_due.push(request)
        self._inner.push(request)

    def head(self, view: PlanView) -> Request | None:
        first = self._by_due.head(view)
        if first is not None and self._due[first] <= self._num_admitted:
            return first
        return self._inner.head(view)

    def remove(self, request: Request) -> None:
        self._inner.remove(request)
        self._leave(request)

    def admitted(self, request: Request) -> None:
        self._inner.admitted(request)
        self._leave(request)
        self._num_admitted += 1
        self._longest *= _FADING

    def _leave(self, request: Request) -> None:
        self._by_due.remove(request)
        del self._due[request]

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._inner)


def first_come(request: Request) -> int:
    return request.arrival
