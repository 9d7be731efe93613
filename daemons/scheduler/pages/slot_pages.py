"""Moves pages between pool, slots and prefix cache: the only place where page ownership changes, but for quarantine."""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, as_ints, empty_ints
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace, PrefixCache, Probe
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot
from radixmesh.daemons.scheduler.pages.leases import Leases
from radixmesh.daemons.scheduler.pages.page_chains import without_pages
from radixmesh.daemons.scheduler.pages.page_pool import PagePool
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable
from radixmesh.daemons.scheduler.sequence import Sequence
from radixmesh.daemons.scheduler.tiers.host_cache import HostCache, WritePolicy

_OWNED, _LEASED, _QUARANTINED = int(PageState.OWNED), int(PageState.LEASED), int(PageState.QUARANTINED)


class SlotPages:
    """Pages of slots. A slot's page table, by token ranges, from admission to the end:

    0            cached_len     computed_len      planned_len      granted
    |--------------|----------------|-----------------|----------------|
    | cache's,     | own; by share()| own; in-flight  | own; granted   |
    | locked       | full pages may | plans write here| ahead of need  |
    |              | become cache's |                 |                |

    share()  (prompt computed)  [0, full)  -> cache where unknown there, locked; duplicates stay own
    leave()  (any end)          [0, full)  -> cache where unknown there;  duplicates and the rest -> free
    planned_len is what plans in flight compute at most: surplus pages stay with the slot until its end.
    full = computed_len rounded down to whole pages: only results that were processed count, so the KV of the last
    sampled token, and whatever in-flight plans still write, is never cached.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        table: SequenceTable,
        weights_version: int,
        host: HostCache | None = None,
    ) -> None:
        """host: prefixes in host memory; None: there is no such tier."""
        self.host = host
        self._policy = host.settings.policy if host is not None else None
        if host is not None and self._policy is WritePolicy.WRITE_BACK:
            cache.before_evict(host.keep)
        self.pool = pool
        self.cache = cache
        self._table = table
        self._weights_version = weights_version
        self._common = Namespace("", weights_version)
        self.num_evicted = 0
        self.leases = Leases({})

    @property
    def num_available(self) -> int:
        """Pages that could be granted now: free ones, and cached ones that nobody uses."""
        return self.pool.num_free + self.cache.num_evictable

    def namespace_of(self, sequence: Sequence) -> Namespace:
        return self.namespace_named(sequence.cache_name)

    def namespace_named(self, cache_name: str) -> Namespace:
        """That of requests with this cache name."""
        return Namespace(cache_name, self._weights_version) if cache_name else self._common

    def probe(self, sequence: Sequence) -> Probe:
        """The result that match() would have for a sequence's tokens; changes nothing."""
        return self.cache.probe(self.namespace_of(sequence), sequence.token_ids()[: sequence.max_cached_len()])

    def found(self, sequence: Sequence) -> tuple[int, int, int]:
        """Pages of a sequence that the device has, that it or the host has, and that any tier has, the store probably;
        changes nothing."""
        num = self.probe(sequence).num_pages
        if self.host is None:
            return num, num, num
        ids = sequence.token_ids()[: sequence.max_cached_len()]
        namespace, stored = self.namespace_of(sequence), self.host.stored
        nearer = max(num, self.host.num_known(namespace, ids))
        return num, nearer, nearer if stored is None else max(nearer, stored.num_known(namespace, ids))

    def match(self, sequence: Sequence, probe: Probe | None = None) -> Match:
        """The usable cached prefix of a request's tokens, locked: attach() or unlock it.

        probe: what probe() said of it just now.
        """
        ids = sequence.token_ids()[: sequence.max_cached_len()]
        match = self.cache.match(self.namespace_of(sequence), ids, probe)
        self.cache.lock(match)
        if self._policy is WritePolicy.SELECTIVE and self.host is not None:
            num = self.cache.num_used(match, self.host.settings.min_hits)
            if num:
                ids, priority = ids[: num * self.cache.page_size], sequence.submission.priority
                self.host.keep(self.namespace_of(sequence), ids, match.pages[:num], priority)
        return match

    def attach(self, slot: int, match: Match) -> None:
        """Starts a slot's page table with a locked match."""
        if len(match.pages):
            self._table.append_pages(as_ints([slot]), as_ints([len(match.pages)]), match.pages)
        self._table.locks[slot] = match

    def grant(self, slots: IntArray, counts: IntArray) -> IntArray:
        """Appends counts[i] own pages to slots[i] and returns them all in order. num_available must suffice."""
        num = int(counts.sum())
        missing = num - self.pool.num_free
        if missing > 0:
            self.num_evicted += self._evict(self.cache.evict(missing))
        pages = self.pool.take(num)
        self._table.append_pages(slots, counts, pages)
        self._table.num_owned[slots] += counts
        return pages

    def share(self, sequence: Sequence) -> None:
        """Gives the computed full pages of a request that runs on to the cache, so that others find them."""
        self._insert(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes a request out of its slot: computed full pages go to the cache, all else is free at once.

        Free at once is right though plans in flight still write there: the worker runs in order, and these pages can
        be granted no earlier than in the plan that releases the slot.
        """
        slot = sequence.slot
        self._insert(sequence)
        if self._table.num_owned.item(slot):
            pages = self._table.pages_of(slot)
            self.pool.give_back(pages[self.pool.states_of(pages) == _OWNED])
        self._unlock(slot)
        self._table.free(slot)

    def lend(self, sequence: Sequence) -> IntArray:
        """Pages of a request that is about to leave, int32, which a transfer still reads: what would be free then is
        leased until end_lease(). What the cache gets is not among them."""
        self._insert(sequence)
        pages = self._table.pages_of(sequence.slot)
        lent: IntArray = pages[self.pool.states_of(pages) == _OWNED].copy()
        self.pool.lease(lent)
        self._table.num_owned[sequence.slot] -= len(lent)
        return lent

    def flush(self) -> int:
        """Empties the cache, whose pages nobody uses; returns how many there were."""
        num = self._evict(self.cache.reset())
        if self.host is not None:
            self.host.flush()
        self.pool.bump_generations()
        return num

    def adopt(self, snapshot: CacheSnapshot) -> int:
        """Takes over, once, the KV that a former scheduler left in the worker; returns the pages that are cached now.

        Pages that a transfer pins become leased, neither found nor granted nor evicted until end_lease(): the transfer
        may still write there. What the records have below them is not found either.
        """
        pinned = np.unique(as_ints(snapshot.pinned_pages))
        pinned = pinned[(pinned >= 0) & (pinned < self.pool.num_pages)]
        records = without_pages(snapshot.records, pinned, self._weights_version)
        adopted = self.cache.adopt(records, snapshot.names, self._weights_version)
        self.pool.adopt(adopted)
        self.pool.lease_pinned(pinned)
        self.leases = Leases(snapshot.pinned_transfers)
        if self.host is not None and snapshot.host is not None:
            self.host.adopt(snapshot.host, self._weights_version)
        return len(adopted)

    def end_lease(self, pages: IntArray) -> int:
        """The worker says that transfers no longer use these pages; returns how many were leased and are free now.

        Pages that are not leased are left alone: the event may be of a transfer that a former epoch knew of.
        """
        leased = np.unique(pages[(pages >= 0) & (pages < self.pool.num_pages)])
        leased = leased[self.pool.states_of(leased) == _LEASED]
        self.pool.end_lease(leased)
        return len(leased)

    def begin_load(self, num: int) -> IntArray:
        """Pages that KV is written to from elsewhere; num_available must suffice."""
        missing = num - self.pool.num_free
        if missing > 0:
            self.num_evicted += self._evict(self.cache.evict(missing))
        return self.pool.load(num)

    def end_load(self, held: Match, namespace: Namespace, ids: IntArray, pages: IntArray) -> Match:
        """The KV of `ids` behind a locked match is in these pages: they become the cache's, and the lock moves to all.

        Those that the cache has got from somewhere else meanwhile are free.
        """
        all_pages = np.concatenate([held.pages, pages])
        num_held = len(held.pages)
        match, num_known = self.cache.extend(held, namespace, ids, all_pages)
        self.drop_load(all_pages[num_held:num_known])
        self.pool.end_load(all_pages[max(num_held, num_known) :])
        return match

    def drop_load(self, pages: IntArray, *, was_granted: bool = True) -> None:
        """No KV is in these pages that anybody may read. was_granted: the worker has counted the grant too."""
        self.pool.drop_load(pages, was_granted=was_granted)

    def _evict(self, pages: IntArray) -> int:
        """Pages that the cache has just given up are free."""
        self.pool.evict(pages)
        return len(pages)

    def _insert(self, sequence: Sequence) -> None:
        """Gives full computed pages to the cache, and keeps locked what the slot holds of it."""
        slot, table, cache = sequence.slot, self._table, self.cache
        num_full = cache.longest_full(table.computed_len.item(slot))
        held = table.locks[slot]
        num_held = len(held.pages) if held is not None else 0
        if num_full <= num_held:
            return
        pages = table.pages_of(slot)[:num_full]
        # A quarantined page must not become findable: cut before it.
        unsound = np.flatnonzero(self.pool.states_of(pages[num_held:]) == _QUARANTINED)
        if len(unsound):
            pages = pages[: num_held + unsound[0]]
        table.settle(slot)
        ids = sequence.token_ids()[: len(pages) * cache.page_size]
        namespace = self.namespace_of(sequence)
        match, num_known = cache.extend(
            held or empty_match(), namespace, ids, pages, priority=sequence.submission.priority
        )
        table.locks[slot] = match
        taken = pages[num_known:]
        if len(taken):
            self.pool.cache(taken)
            table.num_owned[slot] -= len(taken)
        if self._policy is WritePolicy.WRITE_THROUGH and self.host is not None:
            ids = ids[: len(match.pages) * cache.page_size]
            self.host.keep(namespace, ids, match.pages, sequence.submission.priority)

    def _unlock(self, slot: int) -> None:
        match = self._table.locks[slot]
        if match is not None:
            self.cache.unlock(match)
            self._table.locks[slot] = None


def empty_match() -> Match:
    """A match of nothing."""
    return Match(empty_ints(), -1)
