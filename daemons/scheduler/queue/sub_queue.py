"""Sub-queues: the waiting sequences of one (router, tenant) and priority, in the order of a policy.

The sub-queues take turns (queue.py), so that no router or tenant gains by what it sends, and within a sub-queue higher
priorities go first whatever the policy.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from radixmesh.daemons.scheduler.cache.prefix_cache import NOTHING_KNOWN, Probe
from radixmesh.daemons.scheduler.sequence import Sequence

ProbeSequence = Callable[[Sequence], Probe]

_SHORTEST_LINE = 8
_FADING = 0.998


class PlanView:
    """The view of the cache that a sub-queue has while one plan is made: a bounded number of probes.

    `number` tells plans apart.
    """

    def __init__(self, number: int = 0, probe: ProbeSequence | None = None, num_probes: int = 0):
        self.number = number
        self._probe = probe
        self.num_probes_left = num_probes

    def probe(self, sequence: Sequence) -> Probe:
        """The cached part of a sequence's tokens; takes one of the probes that are left."""
        self.num_probes_left -= 1
        return self._probe(sequence) if self._probe is not None else NOTHING_KNOWN


class SubQueue(ABC):
    """Waiting requests in some order."""

    @abstractmethod
    def push(self, sequence: Sequence) -> None:
        """Adds a request; one that comes back (retracted, held, or after a new epoch) has its old arrival number."""

    @abstractmethod
    def head(self, view: PlanView) -> Sequence | None:
        """The next request, which stays; None = empty. Costs no more than the view's probes and a logarithm."""

    @abstractmethod
    def remove(self, sequence: Sequence) -> None:
        """Takes out a request that is in this sub-queue."""

    def admitted(self, sequence: Sequence) -> None:
        """Takes out a request because it runs now."""
        self.remove(sequence)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]: ...


class SortedSubQueue(SubQueue):
    """Orders by a key that does not change while a request waits. O(log n)."""

    def __init__(self, key: Callable[[Sequence], int]) -> None:
        self._key = key
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._num_pushed = 0
        self._members: dict[Sequence, None] = {}

    def push(self, sequence: Sequence) -> None:
        assert sequence not in self._members, sequence.key
        # One that was removed and comes back may still have an entry: it is equal, and one of them is skipped.
        self._members[sequence] = None
        self._num_pushed += 1
        heapq.heappush(self._heap, (self._key(sequence), sequence.arrival, self._num_pushed, sequence))

    def head(self, view: PlanView) -> Sequence | None:
        while self._heap and self._heap[0][3] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence]
        # Entries of the removed leave when they reach the head; rebuild where most are such.
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[3] in self._members]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)


class PrioritySubQueue(SubQueue):
    """Sub-queues of one (router, tenant), one per priority: the highest goes first."""

    def __init__(self, make_sub_queue: Callable[[], SubQueue]) -> None:
        self._make_sub_queue = make_sub_queue
        self._sub_queues: dict[int, SubQueue] = {}
        self._heap: list[int] = []
        """Negated priorities of _sub_queues, and of some that are gone; each once."""
        self._listed: set[int] = set()
        self._num = 0

    def push(self, sequence: Sequence) -> None:
        self._num += 1
        priority = sequence.submission.priority
        sub_queue = self._sub_queues.get(priority)
        if sub_queue is None:
            sub_queue = self._sub_queues[priority] = self._make_sub_queue()
            if priority not in self._listed:
                self._listed.add(priority)
                heapq.heappush(self._heap, -priority)
        sub_queue.push(sequence)

    def head(self, view: PlanView) -> Sequence | None:
        while self._heap:
            sub_queue = self._sub_queues.get(-self._heap[0])
            if sub_queue is not None:
                return sub_queue.head(view)
            self._listed.discard(-heapq.heappop(self._heap))
        return None

    def remove(self, sequence: Sequence) -> None:
        self._sub_queues[sequence.submission.priority].remove(sequence)
        self._drop_empty(sequence)

    def admitted(self, sequence: Sequence) -> None:
        self._sub_queues[sequence.submission.priority].admitted(sequence)
        self._drop_empty(sequence)

    def _drop_empty(self, sequence: Sequence) -> None:
        self._num -= 1
        if not len(self._sub_queues[sequence.submission.priority]):
            del self._sub_queues[sequence.submission.priority]

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        for sub_queue in self._sub_queues.values():
            yield from sub_queue


class AgedSubQueue(SubQueue):
    """Any order, with a bound on how often it may pass somebody over; the bound grows with the line.

    A request that arrives when n wait is due after n + max_overtake_factor * longest admissions. `longest` is the
    longest recent queue: it decays by half in 350 admissions and is at least 8. Requests that are due go first, the
    earliest due before the others. First come, first served takes n admissions, `longest` at worst, so the worst wait
    here is 1 + max_overtake_factor times as long at any load, and seldom that long, since few requests are overtaken
    as often as allowed. A bound in seconds would bound nothing at low load, and at high load it would give the order of
    arrival. A request that returns (retracted, done waiting for a prefix, new epoch) is due as if it had come first.
    """

    def __init__(self, inner: SubQueue, *, max_overtake_factor: float) -> None:
        self._inner = inner
        self._max_overtake_factor = max_overtake_factor
        self._due: dict[Sequence, int] = {}
        self._by_due = SortedSubQueue(lambda sequence: self._due[sequence])
        self._num_admitted = 0
        self._last_arrival = -1
        self._longest = 0.0

    def push(self, sequence: Sequence) -> None:
        is_new = sequence.arrival > self._last_arrival
        num_before = len(self._due) if is_new else 0
        self._last_arrival = max(self._last_arrival, sequence.arrival)
        self._longest = max(self._longest, num_before)
        line = max(self._longest if is_new else 0, _SHORTEST_LINE)
        self._due[sequence] = self._num_admitted + num_before + int(self._max_overtake_factor * line)
        self._by_due.push(sequence)
        self._inner.push(sequence)

    def head(self, view: PlanView) -> Sequence | None:
        first = self._by_due.head(view)
        if first is not None and self._due[first] <= self._num_admitted:
            return first
        return self._inner.head(view)

    def remove(self, sequence: Sequence) -> None:
        self._inner.remove(sequence)
        self._leave(sequence)

    def admitted(self, sequence: Sequence) -> None:
        self._inner.admitted(sequence)
        self._leave(sequence)
        self._num_admitted += 1
        self._longest *= _FADING

    def _leave(self, sequence: Sequence) -> None:
        self._by_due.remove(sequence)
        del self._due[sequence]

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._inner)


def first_come(sequence: Sequence) -> int:
    return sequence.arrival
