"""The waiting queue: one sub-queue per (router, tenant), served round robin.

Within a sub-queue the highest priority goes first, then the policy's order (sub_queue.py) applies. With
priority_across_tenants the highest priority of all sub-queues goes first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from radixmesh.daemons.scheduler.queue.policies import QueueSettings, SubQueueFactory, make_sub_queue_factory
from radixmesh.daemons.scheduler.queue.sub_queue import PlanView, PrioritySubQueue, ProbeSequence, SubQueue
from radixmesh.daemons.scheduler.sequence import Sequence

# Probes of the cache a plan: about 0.1 ms.
_PROBES_A_PLAN = 16

_SubQueueKey = tuple[str, str]


class WaitingQueue:
    """All waiting sequences. The sub-queues take turns, so a policy or a priority favours only sequences of its own
    sub-queue, and no sub-queue starves another. With `priority_across_tenants` the highest priority of all goes first,
    and the sub-queues that have it take turns.

    A sequence that waits for a prefix in flight is parked: it keeps its position but is not admitted.
    """

    def __init__(self, settings: QueueSettings | None = None) -> None:
        settings = settings or QueueSettings()
        make_sub_queue = make_sub_queue_factory(settings)
        self._is_priority_first = settings.priority_across_tenants
        self._make_sub_queue: SubQueueFactory = (
            make_sub_queue if self._is_priority_first else lambda: PrioritySubQueue(make_sub_queue)
        )
        self._classes: dict[int, OrderedDict[_SubQueueKey, SubQueue]] = {}
        self._priorities: list[int] = []
        """Heap of the negated priorities in _classes, and of some that are gone; each once."""
        self._listed: set[int] = set()
        self._parked: dict[Sequence, None] = {}
        self._view = PlanView()
        self._num = 0
        self.waiting_tokens = 0

    @property
    def num_kept(self) -> int:
        """Entries of all tables: 0 while nothing waits, however many classes and tenants have come and gone."""
        return len(self._classes) + len(self._listed) + len(self._priorities)

    @property
    def num_waiting_for_prefix(self) -> int:
        return len(self._parked)

    def begin_plan(self, probe: ProbeSequence | None = None) -> None:
        """A plan is about to be made, and the cache may be asked again."""
        self._view = PlanView(self._view.number + 1, probe, _PROBES_A_PLAN if probe is not None else 0)

    def push(self, sequence: Sequence) -> None:
        self._enter(sequence)
        self._num += 1
        self.waiting_tokens += sequence.total_len

    def head(self) -> Sequence | None:
        """The request to be admitted next; it stays until removed."""
        while self._priorities:
            sub_queues = self._classes.get(-self._priorities[0])
            if sub_queues is None:
                self._listed.discard(-heapq.heappop(self._priorities))
                continue
            return next(iter(sub_queues.values())).head(self._view)
        return None

    def admitted(self, sequence: Sequence) -> None:
        """Takes out the request at the head; the other sub-queues come next."""
        sub_queues, key = self._classes[self._class_of(sequence)], sub_queue_key(sequence)
        sub_queues[key].admitted(sequence)
        sub_queues.move_to_end(key)
        self._count_out(sequence)
        self._drop_empty(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._count_out(sequence)
        if sequence in self._parked:
            del self._parked[sequence]
        else:
            self._leave(sequence)

    def park(self, sequence: Sequence) -> None:
        """Excludes a sequence from admission until unpark(), or remove()."""
        self._leave(sequence)
        self._parked[sequence] = None

    def is_parked(self, sequence: Sequence) -> bool:
        """True from park() to unpark()."""
        return sequence in self._parked

    def unpark(self, sequence: Sequence) -> None:
        """Makes a parked sequence wait for admission again; does nothing for any other."""
        if sequence in self._parked:
            del self._parked[sequence]
            self._enter(sequence)

    def unpark_all(self) -> None:
        for sequence in list(self._parked):
            self.unpark(sequence)

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        for sub_queues in list(self._classes.values()):
            for sub_queue in list(sub_queues.values()):
                yield from list(sub_queue)
        yield from list(self._parked)

    def _enter(self, sequence: Sequence) -> None:
        priority, key = self._class_of(sequence), sub_queue_key(sequence)
        sub_queues = self._classes.get(priority)
        if sub_queues is None:
            sub_queues = self._classes[priority] = OrderedDict()
            if priority not in self._listed:
                self._listed.add(priority)
                heapq.heappush(self._priorities, -priority)
        sub_queue = sub_queues.get(key)
        if sub_queue is None:
            sub_queue = sub_queues[key] = self._make_sub_queue()
        sub_queue.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._classes[self._class_of(sequence)][sub_queue_key(sequence)].remove(sequence)
        self._drop_empty(sequence)

    def _drop_empty(self, sequence: Sequence) -> None:
        # Tenants and priorities come from clients: what is empty must not stay.
        priority, key = self._class_of(sequence), sub_queue_key(sequence)
        sub_queues = self._classes[priority]
        if not len(sub_queues[key]):
            del sub_queues[key]
        if not sub_queues:
            del self._classes[priority]

    def _class_of(self, sequence: Sequence) -> int:
        return sequence.submission.priority if self._is_priority_first else 0

    def _count_out(self, sequence: Sequence) -> None:
        self._num -= 1
        self.waiting_tokens -= sequence.total_len


def sub_queue_key(sequence: Sequence) -> _SubQueueKey:
    return (sequence.submission.router, sequence.submission.tenant)
