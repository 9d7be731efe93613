"""Requests that wait. Fair among (router, tenant) pairs; the order within a pair is a seam."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator

from radixmesh.daemons.scheduler.request import Request


class Lane(ABC):
    """The waiting requests of one (router, tenant) pair, in some order."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Adds a request; one that comes back (retracted, or after a new epoch) has its old arrival number."""

    @abstractmethod
    def head(self) -> Request | None:
        """The next request, which stays; None = empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Takes out a request that is in this lane."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class SortedLane(Lane):
    """Orders by a key that does not change while a request waits. O(log n)."""

    def __init__(self, key: Callable[[Request], tuple[int, int]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._num_pushed = 0
        self._members: set[Request] = set()

    def push(self, request: Request) -> None:
        assert request not in self._members, request.key
        # One that was removed and comes back may still have an entry: it is equal, and one of them is skipped.
        self._members.add(request)
        self._num_pushed += 1
        heapq.heappush(self._heap, (self._key(request), self._num_pushed, request))

    def head(self) -> Request | None:
        while self._heap and self._heap[0][2] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        self._members.remove(request)
        # Entries of the removed leave when they reach the head; rebuild where most are such.
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)


def _first_come(request: Request) -> tuple[int, int]:
    return (-request.submission.priority, request.arrival)


def _last_come(request: Request) -> tuple[int, int]:
    return (-request.submission.priority, -request.arrival)


LANES: dict[str, Callable[[], Lane]] = {
    "fcfs": lambda: SortedLane(_first_come),
    "lcfs": lambda: SortedLane(_last_come),
}


class WaitingQueue:
    """All waiting requests. The highest priority goes first; among equals the lanes take turns."""

    def __init__(self, policy: str = "fcfs") -> None:
        if policy not in LANES:
            raise ValueError(f"queue policy {policy!r} is unknown: choose one of {', '.join(sorted(LANES))}")
        self._make_lane = LANES[policy]
        self._lanes: OrderedDict[tuple[str, str], Lane] = OrderedDict()
        self.waiting_tokens = 0

    def push(self, request: Request) -> None:
        lane = self._lanes.get(_lane_key(request))
        if lane is None:
            lane = self._lanes[_lane_key(request)] = self._make_lane()
        lane.push(request)
        self.waiting_tokens += request.total_len

    def head(self) -> Request | None:
        """The request whose turn it is; it stays until removed."""
        best: Request | None = None
        for lane in self._lanes.values():
            head = lane.head()
            if head is not None and (best is None or head.submission.priority > best.submission.priority):
                best = head
        return best

    def admitted(self, request: Request) -> None:
        """Takes out a request and gives the turn to the other lanes."""
        self.remove(request)
        if _lane_key(request) in self._lanes:
            self._lanes.move_to_end(_lane_key(request))

    def remove(self, request: Request) -> None:
        lane = self._lanes[_lane_key(request)]
        lane.remove(request)
        self.waiting_tokens -= request.total_len
        if not len(lane):  # Tenants come from clients: an empty lane must not stay.
            del self._lanes[_lane_key(request)]

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Request]:
        for lane in list(self._lanes.values()):
            yield from list(lane)


def _lane_key(request: Request) -> tuple[str, str]:
    return (request.submission.router, request.submission.tenant)
