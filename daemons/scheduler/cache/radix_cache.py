"""The prefix cache as a radix tree: long edges, locks along paths, eviction by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.cache.compact_edges import compress
from radixmesh.daemons.scheduler.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from radixmesh.daemons.scheduler.cache.leaf_queue import LeafQueue
from radixmesh.daemons.scheduler.cache.observer import CacheContent, CacheObserver
from radixmesh.daemons.scheduler.cache.prefix_cache import Inserted, Match, Namespace, PrefixCache, Probe
from radixmesh.daemons.scheduler.cache.radix_nodes import NO_NODE, array_of
from radixmesh.daemons.scheduler.cache.radix_tree import RadixTree
from radixmesh.daemons.scheduler.pages.page_chains import read_chains

# Of drop_end(), before the queue of leaves is made anew.
_MOST_DROPPED = 64


class RadixCache(PrefixCache):
    """Radix tree with locks, use and eviction.

    A match that ends within an edge splits it, so that use and locks always cover whole nodes: the cache then behaves
    exactly as one that knows the use of every page. `Match.node` is the node at whose end the match ends. That node
    keeps number and end through every later split above it, so a lock can be taken back by its handle at any time.

    Costs: a node about 1 us in match() and 0.3 us in lock() and unlock(), a token 8 bytes, a node about 0.5 KB.
    Evicting part of a leaf costs what it frees; see LeafQueue for the choice of the leaf.
    """

    def __init__(self, *, page_size: int, num_pages: int, policy: EvictionPolicy | None = None) -> None:
        super().__init__(page_size=page_size, num_pages=num_pages)
        self._policy = policy or LeastRecentlyUsed()
        self._observer: CacheObserver | None = None
        self._evicting: Callable[[Namespace, IntArray, IntArray, int], None] | None = None
        self._tick = 0
        self._num_cached = 0
        self._num_locked = 0
        self._clear()

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_evictable(self) -> int:
        return self._num_cached - self._num_locked

    @property
    def tree(self) -> RadixTree:
        """To look at; void after reset()."""
        return self._tree

    def watch(self, observer: CacheObserver | None, *, replay: bool = True) -> bool:
        self._observer = self._tree.observer = observer
        if replay and observer is not None:
            self._tree.replay(observer)
        return True

    def content(self) -> CacheContent:
        return self._tree.content()

    def match(self, namespace: Namespace, ids: IntArray, probe: Probe | None = None) -> Match:
        path, num = self._tree.find(namespace, ids) if probe is None else (list(probe.branch), probe.num_pages)
        self._tree.cut(path, num)
        self._touch(path)
        hits = self._tree.nodes.hits
        for node in path:
            hits[node] += 1
        return self._match_of(path)

    def probe(self, namespace: Namespace, ids: IntArray) -> Probe:
        path, num = self._tree.find(namespace, ids)
        return Probe(num, tuple(path))

    def insert(self, namespace: Namespace, ids: IntArray, pages: IntArray, *, priority: int = 0) -> Inserted:
        """See PrefixCache.insert.

        Declines, with all pages "known", where it would have to take a page that it holds already.
        """
        path, num_known, is_declined = self._add(namespace, NO_NODE, ids, pages, priority)
        self._touch(path)
        if path:
            self._queue.offer(path[-1])
        return Inserted(self._match_of(path), len(pages) if is_declined else num_known)

    def extend(
        self, held: Match, namespace: Namespace, ids: IntArray, pages: IntArray, *, priority: int = 0
    ) -> Inserted:
        """See PrefixCache.extend. Looks, and locks, only below the held node: what is above is locked already."""
        if not len(held.pages):
            return super().extend(held, namespace, ids, pages, priority=priority)
        self._check(held)
        path, num_known, is_declined = self._add(namespace, held.node, ids, pages, priority)
        nodes = self._tree.nodes
        for node in path:
            if not nodes.locks[node]:
                self._num_locked += nodes.num[node]
            nodes.locks[node] += 1
        self._touch(path)
        match = held
        if path:
            match = Match(np.concatenate([held.pages, *(nodes.pages[node] for node in path)]), path[-1])
        return Inserted(match, len(pages) if is_declined else num_known)

    def lock(self, match: Match) -> None:
        locks, num = self._tree.nodes.locks, self._tree.nodes.num
        for node in self._path_of(match):
            if not locks[node]:
                self._num_locked += num[node]
            locks[node] += 1

    def unlock(self, match: Match) -> None:
        nodes = self._tree.nodes
        locks = nodes.locks
        path = self._path_of(match)
        for node in path:
            left = locks[node] - 1
            assert left >= 0, (node, nodes.end[node])
            locks[node] = left
            if not left:
                self._num_locked -= nodes.num[node]
        self._touch(path)
        if path:
            self._queue.offer(path[0])

    def evict(self, num: int) -> IntArray:
        tree, queue = self._tree, self._queue
        evicted: list[IntArray] = []
        left = min(num, self.num_evictable)
        while left > 0:
            leaf = queue.head()
            assert leaf != NO_NODE, (left, self.num_evictable)
            if self._evicting is not None:
                path = tree.path_to(leaf)[::-1]
                ids = np.concatenate([tree.nodes.ids[node] for node in path])
                self._evicting(tree.namespace_of(leaf), ids, tree.pages_of(path), tree.nodes.priority[leaf])
            if tree.nodes.num[leaf] > left:
                evicted.append(tree.trim(leaf, left))
                break
            queue.pop()
            pages, parent = tree.remove(leaf)
            if parent != NO_NODE:
                queue.offer(parent)
            evicted.append(pages)
            left -= len(pages)
        if not evicted:
            return empty_ints()
        freed = np.concatenate(evicted)
        self._is_cached[freed] = False
        self._num_cached -= len(freed)
        return freed

    def evict_leaf(self) -> IntArray:
        """evict() of the whole node that it would begin with; no page where all are locked."""
        leaf = self._queue.head()
        return self.evict(self._tree.nodes.num[leaf]) if leaf != NO_NODE else empty_ints()

    def touch(self, probe: Probe) -> None:
        """Marks what probe() has found just now as used, whole nodes; unlike match() it splits none."""
        self._touch(probe.branch)

    def drop_end(self, namespace: Namespace, ids: IntArray, num_kept: int) -> IntArray:
        """Forgets a prefix beyond its first `num_kept` pages, with what continues it in the same edge, as far as
        nothing else continues it and nothing is locked; returns the pages, int32, which are the caller's."""
        tree, nodes = self._tree, self._tree.nodes
        path, num = tree.find(namespace, ids)
        dropped: list[IntArray] = []
        parent = NO_NODE
        while path and num > num_kept and nodes.is_free_leaf(path[-1]) and nodes.end[path[-1]] > num_kept:
            leaf = path.pop()
            if nodes.end[leaf] - nodes.num[leaf] < num_kept:
                dropped.append(tree.trim(leaf, nodes.end[leaf] - num_kept))
                break
            pages, parent = tree.remove(leaf)
            dropped.append(pages)
        if not dropped:
            return empty_ints()
        freed = np.concatenate(dropped)
        self._is_cached[freed] = False
        self._num_cached -= len(freed)
        self._num_dropped += len(dropped)
        if self._num_dropped > tree.num_nodes + _MOST_DROPPED:
            self._requeue()
        elif parent != NO_NODE:
            self._queue.offer(parent)
        return freed

    def latest_prefixes(self, most_pages: int) -> list[tuple[Namespace, IntArray]]:
        """Whole prefixes, the latest used last, of at most so many pages together, those in common counted again."""
        nodes, total = self._tree.nodes, self._tree.nodes.num_numbers
        leaves = np.flatnonzero((array_of(nodes.num, total) > 0) & (array_of(nodes.num_children, total) == 0))
        leaves = leaves[np.argsort(array_of(nodes.last_used, total)[leaves], kind="stable")]
        num = np.cumsum(array_of(nodes.end, total)[leaves][::-1]).searchsorted(most_pages, side="right")
        found = []
        for leaf in leaves[len(leaves) - num :].tolist():
            path = self._tree.path_to(leaf)[::-1]
            found.append((self._tree.namespace_of(leaf), np.concatenate([nodes.ids[node] for node in path])))
        return found

    def before_evict(self, evicting: Callable[[Namespace, IntArray, IntArray, int], None] | None) -> None:
        self._evicting = evicting

    def num_used(self, match: Match, times: int) -> int:
        nodes, num = self._tree.nodes, 0
        for node in reversed(self._path_of(match)):
            if nodes.hits[node] < times:
                break
            num = nodes.end[node]
        return num

    def adopt(self, records: PageRecords, names: Sequence[str], weights_version: int) -> IntArray:
        assert not self._num_cached, self._num_cached
        chains = read_chains(records, self.page_size, weights_version)
        if not len(chains.pages):
            return empty_ints()
        self._clear()  # Node numbers of a former life may be spread wide.
        tree, nodes = self._tree, self._tree.nodes
        adopted = tree.load(compress(chains, self.num_pages), [Namespace(name, weights_version) for name in names])
        self._tick += 1
        total = nodes.num_numbers
        array_of(nodes.last_used, total)[adopted] = self._tick
        array_of(nodes.created, total)[adopted] = self._tick
        self._queue.fill(adopted[array_of(nodes.num_children, total)[adopted] == 0].tolist())
        self._is_cached[chains.pages] = True
        self._num_cached = len(chains.pages)
        return chains.pages

    def reset(self) -> IntArray:
        pages = np.flatnonzero(self._is_cached).astype(np.int32)
        self._clear()
        if self._observer is not None:
            self._observer.on_reset()
        return pages

    def _clear(self) -> None:
        self._tree = RadixTree(page_size=self.page_size, num_pages=self.num_pages)
        self._tree.observer = self._observer
        self._queue = LeafQueue(self._policy, self._tree.nodes)
        self._is_cached = np.zeros(self.num_pages, bool)
        self._num_cached = 0
        self._num_locked = 0
        self._num_dropped = 0

    def _requeue(self) -> None:
        """Entries of nodes that were dropped would stay until an eviction comes to them."""
        nodes, total = self._tree.nodes, self._tree.nodes.num_numbers
        array_of(nodes.is_queued, total)[:] = 0
        is_free = (array_of(nodes.num, total) > 0) & (array_of(nodes.num_children, total) == 0)
        is_free &= array_of(nodes.locks, total) == 0
        self._queue = LeafQueue(self._policy, nodes)
        self._queue.fill(np.flatnonzero(is_free).tolist())
        self._num_dropped = 0

    def _touch(self, path: Sequence[int]) -> None:
        self._tick += 1
        tick, last_used = self._tick, self._tree.nodes.last_used
        for node in path:
            last_used[node] = tick

    def _match_of(self, path: Sequence[int]) -> Match:
        return Match(self._tree.pages_of(path), path[-1] if path else NO_NODE)

    def _add(
        self, namespace: Namespace, above: int, ids: IntArray, pages: IntArray, priority: int
    ) -> tuple[list[int], int, bool]:
        """Adds what is unknown of a prefix whose first part ends at the node `above`; NO_NODE = it has no such part.

        Returns the nodes below `above`, the number of pages known before, and whether the rest is declined: it has a
        page that the cache holds already.
        """
        assert len(ids) == len(pages) * self.page_size, (len(ids), len(pages), self.page_size)
        tree, nodes = self._tree, self._tree.nodes
        path, num_known = tree.find(namespace, ids, above)
        tree.cut(path, num_known)
        parent = path[-1] if path else above
        self._raise_priority(parent, priority)
        added = pages[num_known:]
        if not len(added):
            return path, num_known, False
        if self._is_cached[added].any():
            return path, num_known, True
        leaf = tree.append(namespace, parent, ids[num_known * self.page_size :], added)
        nodes.created[leaf] = self._tick + 1
        nodes.priority[leaf] = priority
        self._is_cached[added] = True
        self._num_cached += len(added)
        path.append(leaf)
        return path, num_known, False

    def _raise_priority(self, node: int, priority: int) -> None:
        """From a node upwards. No node has a lower priority than one below it."""
        nodes = self._tree.nodes
        while node != NO_NODE and nodes.num[node] and nodes.priority[node] < priority:
            nodes.priority[node] = priority
            node = nodes.parent[node]

    def _path_of(self, match: Match) -> list[int]:
        """Nodes of a match, its last first."""
        if not len(match.pages):
            return []
        self._check(match)
        return self._tree.path_to(match.node)

    def _check(self, match: Match) -> None:
        num, node, nodes = len(match.pages), match.node, self._tree.nodes
        is_valid = 0 <= node < nodes.num_numbers and nodes.end[node] == num and nodes.num[node] > 0
        assert is_valid and nodes.pages[node].item(-1) == match.pages.item(-1), (
            f"no such match any more: node {node}, {num} pages"
        )
