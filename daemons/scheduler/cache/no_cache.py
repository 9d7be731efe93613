"""The prefix cache that holds nothing: a baseline, and a second implementation that keeps the interface honest."""

from __future__ import annotations

from collections.abc import Sequence

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.cache.prefix_cache import NOTHING_KNOWN, Inserted, Match, Namespace, PrefixCache, Probe


class NoCache(PrefixCache):
    """Finds nothing and takes nothing."""

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_evictable(self) -> int:
        return 0

    def match(self, namespace: Namespace, ids: IntArray, probe: Probe | None = None) -> Match:
        return Match(empty_ints(), 0)

    def probe(self, namespace: Namespace, ids: IntArray) -> Probe:
        return NOTHING_KNOWN

    def insert(self, namespace: Namespace, ids: IntArray, pages: IntArray, *, priority: int = 0) -> Inserted:
        # "All known" is how a cache declines: the caller keeps every page.
        return Inserted(Match(empty_ints(), 0), len(pages))

    def lock(self, match: Match) -> None:
        pass

    def unlock(self, match: Match) -> None:
        pass

    def evict(self, num: int) -> IntArray:
        return empty_ints()

    def adopt(self, records: PageRecords, names: Sequence[str], weights_version: int) -> IntArray:
        return empty_ints()

    def reset(self) -> IntArray:
        return empty_ints()
