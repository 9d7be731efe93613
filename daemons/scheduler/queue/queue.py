"""Requests that wait. Turns among (router, tenant) pairs, then priorities, then the strategy's order (lane.py); or
priorities before the turns, if the operator wants it so."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from radixmesh.daemons.scheduler.queue.policies import LaneFactory, QueueSettings, make_lanes
from radixmesh.daemons.scheduler.queue.sub_queue import Lane, PlanView, PriorityLane, ProbeRequest
from radixmesh.daemons.scheduler.sequence import Request

# Probes of the cache a plan: about 0.1 ms.
_PROBES_A_PLAN = 16

_LaneKey = tuple[str, str]


class WaitingQueue:
    """All waiting requests. Lanes, a (router, tenant) pair each, take turns; within a lane the highest priority goes
    first, then the strategy chooses. So a strategy's or a priority's gain is that of its lane, and no lane starves
    another. With `priority_across_tenants` the highest priority of all goes first, and lanes of it take turns.

    A request that waits for what another is about to compute is held: it keeps its place but has no turn.
    """

    def __init__(self, settings: QueueSettings | None = None) -> None:
        settings = settings or QueueSettings()
        make_lane = make_lanes(settings)
        self._is_priority_first = settings.priority_across_tenants
        self._make_lane: LaneFactory = make_lane if self._is_priority_first else lambda: PriorityLane(make_lane)
        self._classes: dict[int, OrderedDict[_LaneKey, Lane]] = {}
        self._priorities: list[int] = []
        """Heap of the negated priorities in _classes, and of some that are gone; each once."""
        self._listed: set[int] = set()
        self._held: dict[Request, None] = {}
        self._view = PlanView()
        self._num = 0
        self.waiting_tokens = 0

    @property
    def num_waiting_for_prefix(self) -> int:
        return len(self._held)

    def begin_plan(self, probe: ProbeRequest | None = None) -> None:
        """A plan is about to be made, and the cache may be asked again."""
        self._view = PlanView(self._view.number + 1, probe, _PROBES_A_PLAN if probe is not None else 0)

    def push(self, request: Request) -> None:
        self._enter(request)
        self._num += 1
        self.waiting_tokens += request.total_len

    def head(self) -> Request | None:
        """The request whose turn it is; it stays until removed."""
        while self._priorities:
            lanes = self._classes.get(-self._priorities[0])
            if lanes is None:
                self._listed.discard(-heapq.heappop(self._priorities))
                continue
            return next(iter(lanes.values())).head(self._view)
        return None

    def admitted(self, request: Request) -> None:
        """Takes out a request that has its turn, and gives the turn to the other lanes."""
        lanes, key = self._classes[self._class_of(request)], lane_key(request)
        lanes[key].admitted(request)
        lanes.move_to_end(key)
        self._count_out(request)
        self._drop_empty(request)

    def remove(self, request: Request) -> None:
        self._count_out(request)
        if request in self._held:
            del self._held[request]
        else:
            self._leave(request)

    def hold(self, request: Request) -> None:
        """Has no turn until unhold(), or remove()."""
        self._leave(request)
        self._held[request] = None

    def unhold(self, request: Request) -> None:
        """Has turns again; nothing happens to one that is not held (any more)."""
        if request in self._held:
            del self._held[request]
            self._enter(request)

    def unhold_all(self) -> None:
        for request in list(self._held):
            self.unhold(request)

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        for lanes in list(self._classes.values()):
            for lane in list(lanes.values()):
                yield from list(lane)
        yield from list(self._held)

    def _enter(self, request: Request) -> None:
        priority, key = self._class_of(request), lane_key(request)
        lanes = self._classes.get(priority)
        if lanes is None:
            lanes = self._classes[priority] = OrderedDict()
            if priority not in self._listed:
                self._listed.add(priority)
                heapq.heappush(self._priorities, -priority)
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = self._make_lane()
        lane.push(request)

    def _leave(self, request: Request) -> None:
        self._classes[self._class_of(request)][lane_key(request)].remove(request)
        self._drop_empty(request)

    def _drop_empty(self, request: Request) -> None:
        # Tenants and priorities come from clients: what is empty must not stay.
        priority, key = self._class_of(request), lane_key(request)
        lanes = self._classes[priority]
        if not len(lanes[key]):
            del lanes[key]
        if not lanes:
            del self._classes[priority]

    def _class_of(self, request: Request) -> int:
        return request.submission.priority if self._is_priority_first else 0

    def _count_out(self, request: Request) -> None:
        self._num -= 1
        self.waiting_tokens -= request.total_len


def lane_key(request: Request) -> _LaneKey:
    return (request.submission.router, request.submission.tenant)
