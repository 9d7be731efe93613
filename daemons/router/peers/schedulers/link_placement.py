"""Placement over scheduler links: a row for each, its loads, its cache's watch, and what was sent there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radixmesh.daemons.router.peers.schedulers.link_table import LinkTable
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.placement.cache_follower import CacheFollower, OpenWatch
from radixmesh.daemons.router.placement.move_gain import ReplicaState
from radixmesh.daemons.router.placement.placement import Decision, PlacedRequest, Placement
from radixmesh.daemons.router.placement.replicas import NO_BOUND, IntColumn
from radixmesh.daemons.router.placement.tree_summary import TreeSummary
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.runtime.cache_namespace import cache_name

_TICK_S = 1.0
# Beside those in slots a scheduler has about as many that wait: it chooses among them by what is cached, and its next
# batch is never short of them. Those that wait here can still go anywhere.
_LEAST_QUEUED = 64
# Outputs of a priority above 0 find room where others do not: a scheduler may let them run in place of others.
_URGENT_SURPLUS = 0.25


@dataclass(slots=True)
class Routed:
    """Decisions for one scheduler. num_tokens: of prompts and outputs; cached_tokens: of these, known to be there."""

    num_decisions: int = 0
    num_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class _Row:
    number: int
    follower: CacheFollower | None
    num_connects: int = 0
    routed: Routed = field(default_factory=Routed)


class LinkPlacement:
    """Rows by link, not by address: an address that is removed and added again is another row from then on.

    open_watch: follows a scheduler's prefix cache; None = caches are guessed at. on_decision: told of every decision
    that an output was submitted by. max_outputs: a scheduler with so many is full; 0 = by the slots that it has. clock:
    monotonic seconds.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        open_watch: OpenWatch | None = None,
        max_outputs: int = 0,
        on_decision: Callable[[Decision], None] = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement = placement
        self.table = LinkTable(placement.replicas, clock)
        self._open_watch = open_watch if placement.policy.needs_matches else None
        self._max_outputs = max_outputs
        self._on_decision = on_decision
        self._rows: dict[SchedulerLink, _Row] = {}
        self._ticked = 0.0
        self.num_credits = 0
        """Outputs sent to schedulers whose loads do not include them yet; like imbalance of the last tick()."""
        self.imbalance = 0.0
        """Tokens that wait for prefill at the scheduler that has most of them, to the mean of all; 0 = none wait."""

    def add(self, link: SchedulerLink) -> None:
        """A new link; its cache is followed from now on."""
        number = self.placement.add(link.address)
        self.table.add(number, link)
        link.on_facts = self.table.update
        follower = None
        if self._open_watch is not None:
            follower = CacheFollower(number, link.address, self._open_watch, self.placement)
            follower.start()
        self._rows[link] = _Row(number, follower)

    async def remove(self, link: SchedulerLink) -> None:
        """The link is closed."""
        self.table.remove(link)
        row = self._rows.pop(link)
        if row.follower is not None:
            await row.follower.close()
        self.placement.remove(row.number)

    async def close(self) -> None:
        """Ends all watches."""
        await asyncio.gather(*(row.follower.close() for row in self._rows.values() if row.follower is not None))

    def choose(self, output: Output, rows: IntColumn, *, counts_full: bool = False) -> Decision | None:
        """Chooses the link that gets the output, of those in `rows` of the table; there is at least one.

        None if all are full, unless counts_full.
        """
        surplus = None if counts_full else _surplus_of(output)
        return self.placement.choose(self._wanted(output, self.table.link(int(rows[0]))), rows, surplus=surplus)

    def is_full(self, link: SchedulerLink) -> bool:
        """True if outputs wait in the router rather than go there."""
        return not self.placement.has_room([self._rows[link].number])[0]

    def has_room_for(self, output: Output, rows: IntColumn) -> bool:
        """True if one of those, in `rows` of the table, is not full for the output."""
        return bool(self.placement.has_room(rows, _surplus_of(output)).any())

    def has_room(self) -> bool:
        """True if some scheduler is not full, for urgent outputs at least."""
        rows = [row.number for row in self._rows.values()]
        return bool(self.placement.has_room(rows, _URGENT_SURPLUS).any())

    def max_outputs(self, link: SchedulerLink) -> int:
        """With so many outputs the scheduler is full; 0 = never."""
        most = int(self.placement.replicas.max_outputs[self._rows[link].number])
        return 0 if most == NO_BOUND else most

    def state_of(self, link: SchedulerLink) -> ReplicaState:
        """Outputs that run or wait there by now."""
        row, table = self._rows[link].number, self.placement.replicas
        slowness = table.slowness(np.array([row]))
        return ReplicaState(
            num_outputs=int(table.num_outputs[row]),
            queued_tokens=int(table.queued_tokens[row]),
            slowness=1.0 if slowness is None else float(slowness[0]),
        )

    def routed(self, link: SchedulerLink) -> Routed:
        """Decisions for the scheduler since it was added."""
        return self._rows[link].routed

    def matched_tokens(self, output: Output, link: SchedulerLink) -> int:
        """Tokens of prompt and output that the scheduler has cached, as far as is known; 0 if no cache is followed."""
        return self.placement.matched_tokens(self._wanted(output, link), self._rows[link].number)

    def take_sent(self, link: SchedulerLink, decision: Decision | None) -> None:
        """An output was submitted there, by a decision or beside a sibling, whose prompt it has."""
        if decision is None:
            self.placement.replicas.take_sent(self._rows[link].number, link.last_sequence, 0, 0)
            return
        self.placement.take_sent(decision, link.last_sequence)
        routed = self._rows[link].routed
        routed.num_decisions += 1
        routed.num_tokens += decision.num_tokens
        routed.cached_tokens += decision.matched_tokens
        self._on_decision(decision)

    def on_load(self, link: SchedulerLink) -> None:
        """A link has a new load, or was connected."""
        row = self._rows.get(link)
        if row is None:
            return
        if row.num_connects != link.num_connects:
            row.num_connects = link.num_connects
            self.placement.restart(row.number, link.kv_tokens)
        self.placement.take_load(row.number, link.replica_load())
        self.placement.replicas.max_outputs[row.number] = self._bound_of(link)

    def on_first_token(self, link: SchedulerLink, sequence: int) -> None:
        """The prefill of that submit is done."""
        row = self._rows.get(link)
        if row is not None:
            self.placement.replicas.take_first_token(row.number, sequence)

    def on_left(self, link: SchedulerLink, sequence: int) -> None:
        """The output of that submit has ended, or gone elsewhere."""
        row = self._rows.get(link)
        if row is not None:
            self.placement.replicas.take_left(row.number, sequence)

    def tree(self, link: SchedulerLink, *, max_nodes: int, max_visited: int) -> TreeSummary | None:
        """A picture of the scheduler's prefix tree; None where it is not known."""
        row = self._rows.get(link)
        return None if row is None else self.placement.tree(row.number, max_nodes=max_nodes, max_visited=max_visited)

    def _bound_of(self, link: SchedulerLink) -> int:
        if self._max_outputs:
            return self._max_outputs
        num_slots = link.load.num_slots
        return num_slots + max(num_slots, _LEAST_QUEUED) if num_slots else NO_BOUND

    def _wanted(self, output: Output, link: SchedulerLink) -> PlacedRequest:
        resolved, identity = output.request.resolved, link.identity
        adapter = resolved.model if identity is None or resolved.model != identity.name else ""
        return PlacedRequest(
            prompt_ids=resolved.prompt_ids + output.ids.tobytes(),
            namespace=cache_name(adapter, resolved.cache_salt),
            # A session is a name within its tenant. Python's hash is keyed anew by each process: nobody can aim at it.
            session=hash((resolved.tenant, resolved.session)) if resolved.session else 0,
        )

    def tick(self, now: float) -> None:
        """Call every 0.1 s or so, with monotonic seconds."""
        if now - self._ticked > _TICK_S:
            self._ticked = now
            self.placement.tick()
            self._take_stock()

    def _take_stock(self) -> None:
        table, rows = self.placement.replicas, [row.number for row in self._rows.values()]
        queued = table.queued_tokens[rows]
        total = int(queued.sum())
        self.imbalance = float(queued.max()) * len(rows) / total if total > 0 else 0.0
        self.num_credits = sum(map(table.num_credits, rows))


def _surplus_of(output: Output) -> float:
    return _URGENT_SURPLUS if output.request.resolved.priority > 0 else 0.0
