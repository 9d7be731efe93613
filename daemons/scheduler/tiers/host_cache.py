"""Prefixes in the host memory of a rank's workers: an index of its own beside the device's, with pages of its own.

The two trees share nothing: a prefix is in either, both or none, and each tier evicts for itself. A host tree always
holds whole prefixes, so one that the device evicts page by page can still be found from its first token on. Workers
save in the order of plans: what one plan saves can be loaded by the same plan, and by any later one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageMove
from radixmesh.daemons.scheduler.cache.eviction import make_eviction_policy
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace
from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot
from radixmesh.daemons.scheduler.tiers.host_pages import HostPages
from radixmesh.daemons.scheduler.tiers.stored_prefixes import StoredPrefixes

MAX_SAVED_PAGES = 1 << 18
"""Pages that one plan saves at most: their ids take 2 MiB of its message."""


class WritePolicy(StrEnum):
    """When KV is saved to the host."""

    WRITE_THROUGH = "write_through"
    """As soon as a prefix is cached on the device."""
    SELECTIVE = "selective"
    """Once a cached prefix has been used again some times."""
    WRITE_BACK = "write_back"
    """When the device evicts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """min_hits: uses of a cached prefix before `selective` saves it. eviction: from the host; empty: as on the device.
    load_min_tokens: fewer are computed and not waited for. load_timeout_s: a request that waits for a load longer than
    that computes its prompt."""

    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    min_hits: int = 2
    eviction: str = ""
    load_min_tokens: int = 32
    load_timeout_s: float = 2.0
    load_window_tokens: int = 32768
    """Workers are given loads until they have two, and so many tokens of them; others are queued."""
    fetch_min_tokens: int = 64
    """Fewer that the host lacks are computed rather than asked of the workers' store."""
    stored_tokens: int = 1 << 20
    """Prefixes in the store that are remembered, of all data-parallel ranks; 0 = none are."""


@dataclass(slots=True)
class TierCounters:
    """Pages. skipped: not saved, for want of room."""

    saved: int = 0
    loaded: int = 0
    fetched: int = 0
    evicted: int = 0
    skipped: int = 0

    def add(self, other: TierCounters) -> None:
        self.saved += other.saved
        self.loaded += other.loaded
        self.fetched += other.fetched
        self.evicted += other.evicted
        self.skipped += other.skipped


class HostCache:
    """Of one data-parallel rank."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        settings: TierSettings,
        eviction: str,
        rank: int = 0,
        stored: StoredPrefixes | None = None,
    ) -> None:
        """stored: is told of all that leaves; None: there is no store."""
        self.settings, self.stored = settings, stored
        self.pages = HostPages(num_pages)
        self.cache = RadixCache(page_size=page_size, num_pages=num_pages, policy=make_eviction_policy(eviction))
        self._rank = rank
        self._saves: list[PageMove] = []
        self._num_unsent = self._num_fetching = 0
        self.counters = TierCounters()
        if stored is not None:
            self.cache.before_evict(stored.add)

    @property
    def has_saves(self) -> bool:
        """Saves wait for the next plan, which must carry them."""
        return bool(self._saves)

    def take_saves(self) -> list[PageMove]:
        """Saves for the plan that is being made: in front of all that it does."""
        saves, self._saves, self._num_unsent = self._saves, [], 0
        return saves

    def num_known(self, namespace: Namespace, ids: IntArray) -> int:
        """Pages of the longest prefix that is here."""
        return self.cache.probe(namespace, ids).num_pages

    def hold(self, namespace: Namespace, ids: IntArray) -> Match:
        """The longest prefix that is here, locked: release() it."""
        match = self.cache.match(namespace, ids)
        self.cache.lock(match)
        return match

    def release(self, held: Match) -> None:
        self.cache.unlock(held)

    def keep(self, namespace: Namespace, ids: IntArray, pages: IntArray, priority: int = 0) -> None:
        """Saves what is missing here of a prefix whose KV lies in these device pages, as far as there is room.

        len(ids) = page_size * len(pages). What is here already counts as used now. priority: as in PrefixCache.insert.
        """
        size = self.cache.page_size
        held = self.hold(namespace, ids)
        known = len(held.pages)
        missing = len(pages) - known
        room = min(self.pages.num_free + self.cache.num_evictable, MAX_SAVED_PAGES - self._num_unsent)
        num = min(missing, room)
        self.counters.skipped += missing - num
        if num > 0:
            host_pages = self._take(num)
            all_pages = np.concatenate([held.pages, host_pages])
            ids = ids[: size * (known + num)]
            held, _ = self.cache.extend(held, namespace, ids, all_pages, priority=priority)
            self._saves.append(
                PageMove(
                    device_pages=pages[known : known + num].copy(),
                    host_pages=host_pages,
                    previous_page=int(all_pages[known - 1]) if known else -1,
                    rank=self._rank,
                )
            )
            self._num_unsent += num
            self.counters.saved += num
        self.release(held)

    def begin_fetch(self, namespace: Namespace, ids: IntArray, num_pages: int) -> tuple[Match, IntArray]:
        """The prefix that is here, locked, and pages for what `num_pages` of these tokens have beyond it, as far as
        there is room: end_fetch() or, where there is no page, release() them."""
        held = self.hold(namespace, ids)
        room = self.pages.num_free + self.cache.num_evictable
        taken = self._take(max(0, min(num_pages - len(held.pages), room)))
        self._num_fetching += len(taken)
        return held, taken

    def end_fetch(self, held: Match, namespace: Namespace, ids: IntArray, pages: IntArray, num_fetched: int) -> None:
        """The first pages of a fetch have the KV of `ids` behind what was held; the others are free."""
        num_held = len(held.pages)
        self._num_fetching -= len(pages)
        self.counters.fetched += num_fetched
        all_pages = np.concatenate([held.pages, pages[:num_fetched]])
        held, num_known = self.cache.extend(held, namespace, ids[: len(all_pages) * self.cache.page_size], all_pages)
        # Some may have been saved meanwhile: those are here already.
        self.pages.give_back(np.concatenate([all_pages[num_held : max(num_held, num_known)], pages[num_fetched:]]))
        self.release(held)

    def _drop_saves(self, evicted: IntArray) -> None:
        """Saves that are not sent and whose host pages are others' now: one plan saves to a page once."""
        saves, self._saves = self._saves, []
        for move in saves:
            # The ends of prefixes go first: of a run, its last pages.
            num = int(np.count_nonzero(~np.isin(move.host_pages, evicted)))
            self._num_unsent -= len(move.host_pages) - num
            self.counters.saved -= len(move.host_pages) - num
            if num == len(move.host_pages):
                self._saves.append(move)
            elif num:
                device_pages, host_pages = move.device_pages[:num], move.host_pages[:num]
                self._saves.append(replace(move, device_pages=device_pages, host_pages=host_pages))

    def flush(self) -> None:
        """Empties the cache; nothing of it is held. What the store has is forgotten, too: those who watch the trees are
        told that all nodes are gone."""
        self.pages.give_back(self.cache.reset())
        self.take_saves()
        if self.stored is not None:
            self.stored.clear()

    def end_epoch(self) -> None:
        """Workers may come back without their memory: what is here is then in the store alone."""
        if self.stored is not None:
            for namespace, ids in self.cache.latest_prefixes(self.stored.cache.num_pages):
                self.stored.add(namespace, ids)

    def adopt(self, snapshot: CacheSnapshot, weights_version: int) -> int:
        """Takes over, once, what a former scheduler saved; returns its pages."""
        adopted = self.cache.adopt(snapshot.records, snapshot.names, weights_version)
        self.pages.adopt(adopted)
        return len(adopted)

    def find_violation(self) -> str:
        """Describes a violation of the counts; empty = none."""
        if self.pages.num_used != self.cache.num_cached + self._num_fetching:
            fetching = f" and fetches have {self._num_fetching}" if self._num_fetching else ""
            return f"{self.pages.num_used} host pages are used, the host cache has {self.cache.num_cached}{fetching}"
        return "" if self.stored is None else self.stored.find_violation()

    def _take(self, num: int) -> IntArray:
        """Free pages; those that the cache evicts first, where there are too few."""
        if num > self.pages.num_free:
            evicted = self.cache.evict(num - self.pages.num_free)
            self.pages.give_back(evicted)
            self.counters.evicted += len(evicted)
            self._drop_saves(evicted)
        return self.pages.take(num)
