"""In-flight prefix deduplication: sequences wait for a prefix that another is computing, and then find it cached.

n > 1 outputs of one prompt, or a burst behind one system prompt: the first one admitted is the leader. The followers
are parked in the queue until the common part is computed and shared, or the leader is gone. A follower would have
computed the same tokens in the same time, so it loses no more than the plans in flight. What followers leave of a
step's tokens their leader gets, beyond its chunk.

Leaders are found by their front: the tokens that follow what the cache had when they were admitted. A follower may
find more there: another prompt that begins alike was cached meanwhile, be it by its first token. So fronts are looked
for at all positions up to what it finds.

It cannot deadlock: a leader is in a slot and prefills, oldest first, or gives up its slot. Whether it still leads is
read from the slots before every plan. It is bounded: `max_waiting` at a time, `_MAX_WAITS` times a sequence.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.planning.counters import PlannerCounters
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.sequence import Sequence

_MAX_WAITS = 4
# Finding out that somebody has to wait costs about 10 us.
_MAX_WAITS_PER_PLAN = 32
# Positions of fronts that are tried for one sequence, the last ones before the end of what it finds cached: 1 us each.
_MAX_POSITIONS = 64

# Tokens that are compared with those of leaders to find one for a sequence, as a multiple of its own.
_MAX_COMPARED = 4
# Tokens that are compared first: most prompts that differ do so soon.
_FIRST_COMPARED = 1024

# Namespace, position, and the tokens that come next there.
_Front = tuple[Namespace, int, bytes]


class Ahead(NamedTuple):
    """The leader that computes a common prefix, and where that prefix ends (tokens, whole pages)."""

    leader: Sequence
    until: int


class _Follower(NamedTuple):
    sequence: Sequence
    until: int
    """Tokens of the leader that it waits for; whole pages."""


class _Leader:
    """A request that prefills, seen from what the cache knows of it."""

    def __init__(self, generation: int, ids: IntArray, front: _Front) -> None:
        self.generation = generation
        self.ids = ids
        self.front = front
        self.followers: list[_Follower] = []


class _Fronts:
    """Leaders by front; one each."""

    def __init__(self) -> None:
        self._by_front: dict[_Front, Sequence] = {}
        self._positions: list[int] = []
        """Positions of all fronts, sorted; each once."""
        self._num_at: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._by_front)

    def __contains__(self, front: _Front) -> bool:
        return front in self._by_front

    def add(self, front: _Front, leader: Sequence) -> None:
        """front: one that is not in."""
        self._by_front[front] = leader
        position = front[1]
        if position not in self._num_at:
            bisect.insort(self._positions, position)
        self._num_at[position] = self._num_at.get(position, 0) + 1

    def remove(self, front: _Front) -> None:
        del self._by_front[front]
        position = front[1]
        self._num_at[position] -= 1
        if not self._num_at[position]:
            del self._num_at[position]
            del self._positions[bisect.bisect_left(self._positions, position)]

    def get(self, front: _Front) -> Sequence | None:
        return self._by_front.get(front)

    def positions_up_to(self, position: int) -> list[int]:
        """The highest first, at most _MAX_POSITIONS."""
        end = bisect.bisect_right(self._positions, position)
        return self._positions[max(0, end - _MAX_POSITIONS) : end][::-1]


class _Comparison:
    """A prompt, compared with others as long as that pays: many leaders may begin, or go on, as it does."""

    def __init__(self, ids: IntArray) -> None:
        self._ids = ids
        self.num_compared = 0

    def end_of_equal(self, other: IntArray, start: int, end: int) -> int:
        """The position up to which both are equal from start on, at most end: as far as is known."""
        end, size = min(end, len(self._ids), len(other)), _FIRST_COMPARED
        while start < end:
            until = min(end, start + size, start + _MAX_COMPARED * len(self._ids) - self.num_compared)
            if until == start:
                break
            self.num_compared += until - start
            differs = np.flatnonzero(self._ids[start:until] != other[start:until])
            if len(differs):
                return start + int(differs[0])
            start, size = until, 4 * size
        return start


class InflightPrefixes:
    """Leaders of one epoch and their followers. min_tokens: shortest common part to wait for, beyond the cache."""

    def __init__(self, queue: WaitingQueue, counters: PlannerCounters, *, min_tokens: int, max_waiting: int) -> None:
        self._queue = queue
        self._counters = counters
        self._min_tokens = min_tokens
        self._max_waiting = max_waiting
        self._leaders: dict[Sequence, _Leader] = {}
        self._fronts = _Fronts()
        self._num_parked_in_plan = 0

    def lead(self, state: EpochState, sequence: Sequence, num_cached: int) -> None:
        """A request was admitted with so many tokens from the cache: others may wait for what it computes."""
        ids = sequence.token_ids()
        if len(ids) - num_cached < self._min_tokens:
            return
        front = self._front_at(state.pages.namespace_of(sequence), ids, num_cached)
        if front not in self._fronts:
            self._fronts.add(front, sequence)
            self._leaders[sequence] = _Leader(sequence.generation, ids, front)

    def ahead_of(self, state: EpochState, sequence: Sequence, num_cached: int) -> Ahead | None:
        """The leader for a waiting sequence with so many tokens in the cache; None = there is none, or it has waited
        often enough."""
        if not self._fronts:
            return None
        ids = sequence.token_ids()[: sequence.max_cached_len()]
        if sequence.num_prefix_waits >= _MAX_WAITS or len(ids) - num_cached < self._min_tokens:
            return None
        namespace = state.pages.namespace_of(sequence)
        comparison = _Comparison(ids)
        until, leader = 0, None
        for position in self._fronts.positions_up_to(num_cached):
            leader = self._fronts.get(self._front_at(namespace, ids, position))
            if leader is not None and (until := self._common_end(state, leader, comparison, num_cached)):
                break
        self._counters.num_compared_tokens += comparison.num_compared
        return Ahead(leader, until) if leader is not None and until else None

    def _common_end(self, state: EpochState, other: Sequence, comparison: _Comparison, num_cached: int) -> int:
        """The end of what tokens have in common with a leader, in whole pages; 0: it is not worth a wait."""
        leader, page_size = self._leaders[other], state.group.page_size
        if not _leads(state, other, leader):
            return 0
        until = comparison.end_of_equal(leader.ids, num_cached, len(leader.ids)) // page_size * page_size
        if until - num_cached < self._min_tokens:
            return 0
        # Equal tokens at equal positions, behind others, are another prefix.
        return until if comparison.end_of_equal(leader.ids, 0, num_cached) == num_cached else 0

    def park(self, sequence: Sequence, ahead: Ahead) -> bool:
        """Parks a waiting sequence behind its leader; False at the bounds of parked ones: it is admitted."""
        if self._queue.num_waiting_for_prefix >= self._max_waiting or self._num_parked_in_plan >= _MAX_WAITS_PER_PLAN:
            return False
        self._num_parked_in_plan += 1
        sequence.num_prefix_waits += 1
        self._counters.num_prefix_deduplications += 1
        self._leaders[ahead.leader].followers.append(_Follower(sequence, ahead.until))
        self._queue.park(sequence)
        return True

    def release(self, state: EpochState) -> None:
        """Before a plan: unparks followers whose prefix is cached or whose leader is gone."""
        self._num_parked_in_plan = 0
        for sequence, leader in list(self._leaders.items()):
            if not _leads(state, sequence, leader):
                self._drop(sequence, leader)
            elif leader.followers:
                self._advance(state, sequence, leader)

    def awaited(self) -> Iterator[tuple[Sequence, int]]:
        """Leaders with followers, and the end of what the furthest of these waits for."""
        for sequence, leader in self._leaders.items():
            if until := max((follower.until for follower in self._followers_of(leader)), default=0):
                yield sequence, until

    def num_followers(self, sequence: Sequence) -> int:
        """Requests that wait for what a request computes."""
        leader = self._leaders.get(sequence)
        return 0 if leader is None else sum(1 for _ in self._followers_of(leader))

    def num_due(self, state: EpochState) -> int:
        """Followers whose prefix the plans in flight compute to its end: those whose prefix is there already are in
        the next plan without any wait."""
        table = state.table
        return sum(
            table.computed_len.item(sequence.slot) < follower.until <= table.planned_len.item(sequence.slot)
            for sequence, leader in self._leaders.items()
            if leader.followers and sequence.slot >= 0
            for follower in self._followers_of(leader)
        )

    def _followers_of(self, leader: _Leader) -> Iterator[_Follower]:
        """Without those that were aborted while they waited."""
        return (follower for follower in leader.followers if self._queue.is_parked(follower.sequence))

    def _advance(self, state: EpochState, sequence: Sequence, leader: _Leader) -> None:
        """Shares the pages that a leader has computed so far, if a follower waits for no more than those."""
        computed = int(state.table.computed_len[sequence.slot])
        due = [follower for follower in leader.followers if follower.until <= computed]
        if not due:
            return
        state.pages_of(sequence.slot).share(sequence)
        for follower in due:
            self._queue.unpark(follower.sequence)
        leader.followers = [follower for follower in leader.followers if follower.until > computed]
        # Requests that are admitted from now on find that much in the cache.
        shared = computed // state.group.page_size * state.group.page_size
        self._fronts.remove(leader.front)
        leader.front = self._front_at(state.pages.namespace_of(sequence), leader.ids, shared)
        if len(leader.ids) - shared < self._min_tokens or leader.front in self._fronts:
            self._drop(sequence, leader)
        else:
            self._fronts.add(leader.front, sequence)

    def _drop(self, sequence: Sequence, leader: _Leader) -> None:
        del self._leaders[sequence]
        if self._fronts.get(leader.front) is sequence:
            self._fronts.remove(leader.front)
        for follower in leader.followers:
            self._queue.unpark(follower.sequence)

    def _front_at(self, namespace: Namespace, ids: IntArray, position: int) -> _Front:
        return namespace, position, ids[position : position + self._min_tokens].tobytes()


def _leads(state: EpochState, sequence: Sequence, leader: _Leader) -> bool:
    """True while the leader is in the slot it had and its prefill is not complete."""
    slot, table = sequence.slot, state.table
    return (
        slot >= 0
        and bool(table.live[slot] == leader.generation)
        and table.sequences[slot] is sequence
        and bool(table.computed_len[slot] < table.target_len[slot])
    )
