"""A queue that is fair among tenants by weight, and goes by priority within each.

Start-time fair queueing (P. Goyal, H. Vin and H. Cheng, 1996): a tenant's start tag rises by cost / weight with every
entry that is taken, and the tenant with the lowest tag is served next. A tenant that comes begins at the tag that is
being served, so nobody saves up shares while away; one that leaves and comes back keeps the tag that it had earned.

Within a tenant entries that had begun come first, then higher priorities, then earlier ones. The oldest entry is
overtaken at most MAX_OVERTAKEN times in a row: so every entry is served, whatever comes after it.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Generic, TypeVar

MAX_OVERTAKEN = 64
# Entries of a tenant that are tried before another tenant's turn: the first may need a replica that is full.
_LOOK_AHEAD = 8
# Tenants that have left, whose tags are kept.
_MAX_LEFT = 4_096
# Lines without entries are kept up to so many, for the tags of tenants that have left.
_MAX_LINES = 256

T = TypeVar("T")


class Turn(Enum):
    """Outcome of a turn. PASSED: the entry cannot be served now, others may. FULL: nor can any other one of its line
    that has no higher priority."""

    SERVED = auto()
    PASSED = auto()
    FULL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The position of one entry. line: entries of other lines are served apart. cost: at least 1, in any unit.

    is_begun: goes before all that have not. since: seconds.
    """

    line: str
    tenant: str
    cost: float
    priority: int = 0
    is_begun: bool = False
    num_bytes: int = 0
    since: float = 0.0

    @property
    def rank(self) -> tuple[bool, int]:
        """Lower ones go first."""
        return (not self.is_begun, -self.priority)


class _Flow(Generic[T]):
    """The entries of one tenant in one line."""

    def __init__(self, tenant: str, tag: float) -> None:
        self.tenant = tenant
        self.tag = tag
        self._ranks: list[tuple[bool, int]] = []
        self._by_rank: dict[tuple[bool, int], OrderedDict[T, None]] = {}
        self._by_age: OrderedDict[T, None] = OrderedDict()
        self._num_overtaken = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, item: T, rank: tuple[bool, int]) -> None:
        if rank not in self._by_rank:
            bisect.insort(self._ranks, rank)
            self._by_rank[rank] = OrderedDict()
        self._by_rank[rank][item] = None
        self._by_age[item] = None

    def remove(self, item: T, rank: tuple[bool, int], *, is_served: bool) -> None:
        if item is next(iter(self._by_age)):
            self._num_overtaken = 0
        elif is_served:
            self._num_overtaken += 1
        del self._by_age[item]
        entries = self._by_rank[rank]
        del entries[item]
        if not entries:
            del self._by_rank[rank]
            self._ranks.remove(rank)

    def first(self) -> list[T]:
        """The entries to be tried, in order."""
        found: list[T] = list(islice(self._by_age, 1)) if self._num_overtaken >= MAX_OVERTAKEN else []
        for rank in self._ranks:
            found += islice(self._by_rank[rank], _LOOK_AHEAD - len(found))
            if len(found) >= _LOOK_AHEAD:
                break
        return found


class _Line(Generic[T]):
    """The tenants that compete for the same replicas."""

    def __init__(self) -> None:
        self.virtual = 0.0
        self.flows: dict[str, _Flow[T]] = {}
        self.heap: list[tuple[float, int, str]] = []
        self.set_aside: dict[str, None] = {}
        # Tenants set aside only because all is full.
        self.lacking_room: dict[str, None] = {}
        self.left: OrderedDict[str, float] = OrderedDict()
        self._serial = 0

    def push(self, flow: _Flow[T]) -> None:
        if len(self.heap) > 2 * len(self.flows) + 64:
            # Places of tenants that came and went, or were set aside: a client that cancels adds one each time.
            self.heap = [(flow.tag, n, name) for n, (name, flow) in enumerate(self.flows.items()) if self.waits(flow)]
            heapq.heapify(self.heap)
            self._serial = len(self.heap) + self._serial
            return
        self._serial += 1
        heapq.heappush(self.heap, (flow.tag, self._serial, flow.tenant))

    def waits(self, flow: _Flow[T]) -> bool:
        """True unless the tenant is set aside."""
        return flow.tenant not in self.set_aside and flow.tenant not in self.lacking_room

    def bring_back(self, tenants: Iterable[str]) -> None:
        """Those of the tenants that were set aside have turns again."""
        for tenant in tenants:
            if tenant in self.set_aside or tenant in self.lacking_room:
                self.set_aside.pop(tenant, None)
                self.lacking_room.pop(tenant, None)
                self.push(self.flows[tenant])

    def flow_of(self, tenant: str) -> _Flow[T]:
        flow = self.flows.get(tenant)
        if flow is None:
            flow = self.flows[tenant] = _Flow(tenant, max(self.virtual, self.left.pop(tenant, 0.0)))
            self.push(flow)
        return flow

    def drop(self, flow: _Flow[T]) -> None:
        """The tenant has no entries any more. Its entry in the heap is passed over when its turn comes."""
        del self.flows[flow.tenant]
        self.set_aside.pop(flow.tenant, None)
        self.lacking_room.pop(flow.tenant, None)
        if flow.tag > self.virtual:
            self.left[flow.tenant] = flow.tag
            self.left.move_to_end(flow.tenant)
            if len(self.left) > _MAX_LEFT:
                self.left.popitem(last=False)

    def pop(self) -> _Flow[T] | None:
        """The tenant whose turn it is, out of the heap."""
        while self.heap:
            tag, _, tenant = heapq.heappop(self.heap)
            flow = self.flows.get(tenant)
            if flow is not None and flow.tag == tag and self.waits(flow):
                return flow
        return None


class FairQueue(Generic[T]):
    """Entries by line. weight_of: a tenant's share relative to others', > 0."""

    def __init__(self, weight_of: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self._weight_of = weight_of
        self._tickets: OrderedDict[T, Ticket] = OrderedDict()
        self._lines: dict[str, _Line[T]] = {}
        self._num_of: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: object) -> bool:
        return item in self._tickets

    def __iter__(self) -> Iterator[T]:
        return iter(self._tickets)

    @property
    def lines(self) -> Iterable[str]:
        return self._lines.keys()

    @property
    def num_tenants(self) -> int:
        return len(self._num_of)

    @property
    def oldest(self) -> Ticket | None:
        """Ticket of the entry that came first."""
        return next(iter(self._tickets.values()), None)

    def num_of(self, tenant: str) -> int:
        """Entries of a tenant, in all lines."""
        return self._num_of.get(tenant, 0)

    def add(self, item: T, ticket: Ticket) -> None:
        """Takes in an entry that is not there."""
        assert item not in self._tickets, "the entry is in the queue"
        self._tickets[item] = ticket
        self.num_bytes += ticket.num_bytes
        self._num_of[ticket.tenant] = self.num_of(ticket.tenant) + 1
        if ticket.line not in self._lines:
            if len(self._lines) >= _MAX_LINES:
                self._lines = {name: line for name, line in self._lines.items() if line.flows}
            self._lines[ticket.line] = _Line()
        self._lines[ticket.line].flow_of(ticket.tenant).add(item, ticket.rank)

    def remove(self, item: T) -> Ticket | None:
        """Drops an entry that was cancelled; its ticket, None if it was not there."""
        return self._remove(item, is_served=False)

    def served(self, item: T) -> Ticket | None:
        """Drops an entry that got what it waited for: its tenant pays."""
        return self._remove(item, is_served=True)

    def clear(self) -> None:
        for item in tuple(self._tickets):
            self.remove(item)

    def take(self, line: str, serve: Callable[[T], Turn], most_tries: int = 16) -> bool:
        """Serves the next entry that can be served; False if there is none, or none of so many.

        serve: SERVED if the entry got what it waits for: it has called served() then, also for others that go along. A
        tenant none of whose first entries is served is set aside: see retry() and retry_lacking_room().
        """
        found = self._lines.get(line)
        full: int | None = None
        while found is not None and most_tries > 0 and (flow := found.pop()) is not None:
            most_tries -= 1
            tag, lacks_room = flow.tag, False
            for item in flow.first():
                priority = self._tickets[item].priority
                if full is not None and priority <= full:
                    lacks_room = True
                    continue
                most_tries -= 1
                turn = serve(item)
                if turn is Turn.SERVED:
                    found.virtual = max(found.virtual, tag)
                    return True
                if turn is Turn.FULL:
                    full, lacks_room = priority, True
            (found.lacking_room if lacks_room else found.set_aside)[flow.tenant] = None
        return False

    def retry(self, line: str, tenant: str | None = None) -> None:
        """Something has changed for those that were set aside, or for one of them: they have turns again."""
        found = self._lines.get(line)
        if found is not None:
            found.bring_back((*found.set_aside, *found.lacking_room) if tenant is None else (tenant,))

    def retry_lacking_room(self) -> None:
        """There is room somewhere: tenants that were set aside for want of it have turns again."""
        for line in self._lines.values():
            line.bring_back(tuple(line.lacking_room))

    def is_contended(self, line: str) -> bool:
        """True if a newcomer to the line would overtake somebody."""
        return line in self._lines and bool(self._lines[line].flows)

    def _remove(self, item: T, *, is_served: bool) -> Ticket | None:
        ticket = self._tickets.pop(item, None)
        if ticket is None:
            return None
        self.num_bytes -= ticket.num_bytes
        self._num_of[ticket.tenant] -= 1
        if not self._num_of[ticket.tenant]:
            del self._num_of[ticket.tenant]
        line = self._lines[ticket.line]
        flow = line.flows[ticket.tenant]
        flow.remove(item, ticket.rank, is_served=is_served)
        if is_served:
            flow.tag += ticket.cost / self._weight_of(ticket.tenant)
            if len(flow) and line.waits(flow):
                line.push(flow)
        if not len(flow):
            line.drop(flow)
        return ticket
