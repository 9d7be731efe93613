"""In-flight prefix deduplication: sequences wait for a prefix that another is computing, and then find it cached.

n > 1 outputs of one prompt, or a burst behind one system prompt: the first one admitted is the leader. The followers
are parked in the queue until the common part is computed and shared, or the leader is gone. A follower would have
computed the same tokens in the same time, so it loses no more than the plans in flight.

It cannot deadlock: a leader is in a slot and prefills, oldest first, or gives up its slot. Whether it still leads is
read from the slots before every plan. It is bounded: `max_waiting` at a time, `_MAX_WAITS` times a sequence.
"""

from __future__ import annotations

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


class InflightPrefixes:
    """Leaders of one epoch and their followers. min_tokens: shortest common part to wait for, beyond the cache."""

    def __init__(self, queue: WaitingQueue, counters: PlannerCounters, *, min_tokens: int, max_waiting: int) -> None:
        self._queue = queue
        self._counters = counters
        self._min_tokens = min_tokens
        self._max_waiting = max_waiting
        self._leaders: dict[Sequence, _Leader] = {}
        self._by_front: dict[_Front, Sequence] = {}
        self._num_parked_in_plan = 0

    def lead(self, state: EpochState, sequence: Sequence, num_cached: int) -> None:
        """A request was admitted with so many tokens from the cache: others may wait for what it computes."""
        ids = sequence.token_ids()
        if len(ids) - num_cached < self._min_tokens:
            return
        front = self._front_of(state, sequence, ids, num_cached)
        if front not in self._by_front:
            self._by_front[front] = sequence
            self._leaders[sequence] = _Leader(sequence.generation, ids, front)

    def ahead_of(self, state: EpochState, sequence: Sequence, num_cached: int) -> Ahead | None:
        """The leader for a waiting sequence with so many tokens in the cache; None = there is none, or it has waited
        often enough."""
        if not self._by_front:
            return None
        ids = sequence.token_ids()[: sequence.max_cached_len()]
        if sequence.num_prefix_waits >= _MAX_WAITS or len(ids) - num_cached < self._min_tokens:
            return None
        other = self._by_front.get(self._front_of(state, sequence, ids, num_cached))
        if other is None:
            return None
        leader = self._leaders[other]
        num = min(len(ids), len(leader.ids))
        page_size = state.group.page_size
        until = (num_cached + _num_equal(ids[num_cached:num], leader.ids[num_cached:num])) // page_size * page_size
        if until - num_cached < self._min_tokens or not _leads(state, other, leader):
            return None
        return Ahead(other, until)

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
        del self._by_front[leader.front]
        leader.front = self._front_of(state, sequence, leader.ids, shared)
        if len(leader.ids) - shared < self._min_tokens or leader.front in self._by_front:
            self._drop(sequence, leader)
        else:
            self._by_front[leader.front] = sequence

    def _drop(self, sequence: Sequence, leader: _Leader) -> None:
        del self._leaders[sequence]
        if self._by_front.get(leader.front) is sequence:
            del self._by_front[leader.front]
        for follower in leader.followers:
            self._queue.unpark(follower.sequence)

    def _front_of(self, state: EpochState, sequence: Sequence, ids: IntArray, num_cached: int) -> _Front:
        following = ids[num_cached : num_cached + self._min_tokens]
        return state.pages.namespace_of(sequence), num_cached, following.tobytes()


def _leads(state: EpochState, sequence: Sequence, leader: _Leader) -> bool:
    """True while the leader is in the slot it had and its prefill is not complete."""
    slot, table = sequence.slot, state.table
    return (
        slot >= 0
        and bool(table.live[slot] == leader.generation)
        and table.sequences[slot] is sequence
        and bool(table.computed_len[slot] < table.target_len[slot])
    )


def _num_equal(first: IntArray, second: IntArray) -> int:
    """Number of leading items that are equal in two arrays of one length."""
    differs = np.flatnonzero(first != second)
    return int(differs[0]) if len(differs) else len(first)
