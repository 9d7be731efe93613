"""Changes of the prefix cache, numbered, the latest of them kept: what those who watch the cache read from.

Noting a change is one tuple into a ring; nobody waits for a reader, and a reader costs nothing until it reads. One
that asks for what the ring has lost is told so and starts over with the content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.observer import CacheContent
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace, PrefixCache


class Inserted(NamedTuple):
    """See CacheObserver.on_insert."""

    node: int
    parent: int
    ids: IntArray
    namespace: Namespace
    rank: int = 0
    tier: int = 0
    """As `radixmesh.scheduler.v1.CacheTier`."""


class Split(NamedTuple):
    """See CacheObserver.on_split."""

    node: int
    upper: int
    num_upper: int


class Evicted(NamedTuple):
    """See CacheObserver.on_evict."""

    node: int
    num_left: int


class Reset(NamedTuple):
    """All nodes are gone."""


CacheEvent = Inserted | Split | Evicted | Reset

STORE_TIER = 2
"""Of caches of what lies in a store, behind those of the device (0) and of host memory (1)."""


class CacheFeed:
    """The changes of a cache, or of one a data-parallel rank and tier, with a memory of `max_events` events and about
    `max_tokens` tokens in them. Node n of cache c is told as n x caches + c.

    first_revision: must be higher than any that an earlier scheduler's watchers may know: its own clock will do.
    Nothing is noted before the first open().
    """

    def __init__(self, *, first_revision: int = 0, max_events: int = 65_536, max_tokens: int = 1 << 22) -> None:
        self.revision = first_revision
        """Of the cache now: one higher with every event."""
        self._ring: list[CacheEvent | None] = [None] * max_events
        self._oldest = first_revision
        """Events after this revision are kept."""
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._caches: Sequence[PrefixCache] = ()
        self.num_ranks = 1
        """Data-parallel ranks: cache c is that of rank c % ranks, in tier c // ranks."""
        self._is_open = False

    def open(self) -> list[CacheContent] | None:
        """The content of each cache at this revision, changes noted from now on. None: there is no cache now, or it
        tells nobody."""
        if not self._is_open:
            self._is_open = True
            self._watch()
            self._forget()
        contents = [cache.content() for cache in self._caches]
        known = [content for content in contents if content is not None]
        return known if known and len(known) == len(contents) else None

    def follow(self, caches: Sequence[PrefixCache], num_ranks: int | None = None) -> None:
        """Other caches from now on (a new epoch), or none: what is known of the last ones is worth nothing. num_ranks:
        of each tier; None: there is one tier."""
        self._caches = caches
        self.num_ranks = num_ranks or max(1, len(caches))
        if self._is_open:
            self._watch()
        self._forget()

    def _watch(self) -> None:
        for rank, cache in enumerate(self._caches):
            cache.watch(_RankEvents(self._note, rank, len(self._caches), self.num_ranks), replay=False)

    def events_after(self, revision: int, max_events: int, max_tokens: int) -> list[CacheEvent] | None:
        """Up to so many events, at least one if there is one; None: they are not kept any more, or never were."""
        if not self._is_open or not self._oldest <= revision <= self.revision:
            return None
        events: list[CacheEvent] = []
        for number in range(revision, min(self.revision, revision + max_events)):
            event = self._ring[number % len(self._ring)]
            assert event is not None, number
            events.append(event)
            max_tokens -= _num_tokens(event)
            if max_tokens <= 0:
                break
        return events

    def is_of_store(self, event: CacheEvent) -> bool:
        """True for a change of what lies in a store alone; events are of this feed."""
        match event:
            case Inserted():
                return event.tier >= STORE_TIER
            case Split() | Evicted():
                return event.node % len(self._caches) >= STORE_TIER * self.num_ranks
            case Reset():
                return False

    def _note(self, event: CacheEvent) -> None:
        if self.revision - self._oldest == len(self._ring):
            self._drop_oldest()
        self._ring[self.revision % len(self._ring)] = event
        self.revision += 1
        self.num_tokens += _num_tokens(event)
        while self.num_tokens > self._max_tokens and self._oldest < self.revision:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        index = self._oldest % len(self._ring)
        event, self._ring[index] = self._ring[index], None
        assert event is not None, self._oldest
        self.num_tokens -= _num_tokens(event)
        self._oldest += 1

    def _forget(self) -> None:
        """A gap: nobody can go on from where it is."""
        while self._oldest < self.revision:
            self._drop_oldest()
        self.revision += 1
        self._oldest = self.revision


class _RankEvents:
    """The CacheObserver of one cache. note: takes its events."""

    def __init__(self, note: Callable[[CacheEvent], None], index: int, num_caches: int, num_ranks: int) -> None:
        self._note = note
        self._index = index
        self._num_caches = num_caches
        self._num_ranks = num_ranks

    def on_insert(self, node: int, parent: int, ids: IntArray, namespace: Namespace) -> None:
        event = inserted_on(self._index, self._num_caches, node, parent, ids, namespace, self._num_ranks)
        self._note(event)

    def on_split(self, node: int, upper: int, num_upper: int) -> None:
        caches, index = self._num_caches, self._index
        self._note(Split(node * caches + index, upper * caches + index, num_upper))

    def on_evict(self, node: int, num_left: int) -> None:
        self._note(Evicted(node * self._num_caches + self._index, num_left))

    def on_reset(self) -> None:
        self._note(Reset())


def inserted_on(
    index: int,
    num_caches: int,
    node: int,
    parent: int,
    ids: IntArray,
    namespace: Namespace,
    num_ranks: int | None = None,
) -> Inserted:
    """The insert of a node in one of several caches. A parent below 0 is the root, of whichever cache. num_ranks: of
    each tier; None: there is one tier."""
    above = parent if parent < 0 else parent * num_caches + index
    tier, rank = divmod(index, num_ranks or num_caches)
    return Inserted(node * num_caches + index, above, ids, namespace, rank, tier)


def _num_tokens(event: CacheEvent) -> int:
    return len(event.ids) if isinstance(event, Inserted) else 0
