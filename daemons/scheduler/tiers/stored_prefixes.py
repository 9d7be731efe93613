"""Prefixes that a rank's workers probably have in their store, below host memory: a hint for whoever places requests.

What leaves the host cache was saved to the store before; whoever asks for it again finds out whether it is still there.
The store evicts by itself and tells nobody, so a prefix that is known here may be gone, and one that is not known may
be there: either costs a computation, and never a token, since fetches verify what they bring. This outlives epochs and
workers, which a disk does as well, and ends with the scheduler.
"""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache
from radixmesh.daemons.scheduler.tiers.host_pages import HostPages

# A node of the tree costs about as much memory as so many tokens, here and in every router.
_TOKENS_A_NODE = 64


class StoredPrefixes:
    """Of one data-parallel rank: a tree like the other tiers', whose pages are numbers alone.

    max_tokens: of all prefixes, and 64 for each node of the tree; the least recently used are forgotten first.
    """

    def __init__(self, page_size: int, max_tokens: int) -> None:
        num_pages = max(1, max_tokens // page_size)
        self.cache = RadixCache(page_size=page_size, num_pages=num_pages)
        self._numbers = HostPages(num_pages)
        self._max_nodes = max(1, max_tokens // _TOKENS_A_NODE)

    def num_known(self, namespace: Namespace, ids: IntArray) -> int:
        """Pages of the longest prefix that the store probably has."""
        return self.cache.probe(namespace, ids).num_pages

    def add(self, namespace: Namespace, ids: IntArray, pages: IntArray | None = None, priority: int = 0) -> None:
        """The store has been given this prefix, whole pages. Signature as of PrefixCache.before_evict()."""
        cache, size = self.cache, self.cache.page_size
        ids = ids[: cache.num_pages * size]
        probe = cache.probe(namespace, ids)
        missing = len(ids) // size - probe.num_pages
        if not missing:
            # An end that is given up page by page must not leave a node for each.
            cache.touch(probe)
            return
        held = cache.match(namespace, ids[: probe.num_pages * size], probe)
        cache.lock(held)
        if missing > self._numbers.num_free:
            self._numbers.give_back(cache.evict(missing - self._numbers.num_free))
        # Only what is held is left, if anything: the prefix fits.
        taken = self._numbers.take(missing)
        held, _ = cache.extend(held, namespace, ids, np.concatenate((held.pages, taken)))
        cache.unlock(held)
        while cache.tree.num_nodes > self._max_nodes:
            self._numbers.give_back(cache.evict_leaf())

    def forget(self, namespace: Namespace, ids: IntArray, num_there: int) -> None:
        """The store has brought the first `num_there` pages of a prefix, and not the next one."""
        self._numbers.give_back(self.cache.drop_end(namespace, ids, num_there))

    def find_violation(self) -> str:
        """Describes a violation of the counts or of the bounds; empty = none."""
        num, cache = self._numbers.num_used, self.cache
        if num == cache.num_cached == cache.num_evictable and cache.tree.num_nodes <= self._max_nodes:
            return ""
        return (
            f"of stored prefixes {num} pages are used, the tree has {cache.num_cached}, in {cache.tree.num_nodes} nodes"
        )

    def clear(self) -> None:
        """Nothing is known."""
        self._numbers.give_back(self.cache.reset())
