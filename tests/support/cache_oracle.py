"""A prefix cache by brute force, to compare real ones with: one entry per cached page, found by its whole prefix."""

from dataclasses import dataclass

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace

Prefix = tuple[Namespace, bytes]


@dataclass(slots=True)
class Entry:
    page: int
    created: int
    last_used: int = 0
    hits: int = 0
    priority: int = 0
    locks: int = 0


SCORES = {
    "lru": lambda entry: (entry.last_used,),
    "lfu": lambda entry: (entry.hits, entry.last_used),
    "fifo": lambda entry: (entry.created,),
    "priority": lambda entry: (entry.priority, entry.last_used),
}


class CacheOracle:
    """Every operation costs as much as it likes; eviction takes one page at a time, the last of some prefix."""

    def __init__(self, page_size: int, policy: str = "lru") -> None:
        self.page_size = page_size
        self.entries: dict[Prefix, Entry] = {}
        self._score = SCORES[policy]
        self._tick = 0

    def prefixes_of(self, namespace: Namespace, ids: IntArray) -> list[Prefix]:
        """Of each whole page of `ids` its prefix."""
        size = self.page_size
        return [(namespace, ids[:stop].tobytes()) for stop in range(size, len(ids) + 1, size)]

    def match(self, namespace: Namespace, ids: IntArray) -> list[int]:
        found = self._found(namespace, ids)
        self._touch(found)
        for entry in found:
            entry.hits += 1
        return [entry.page for entry in found]

    def insert(self, namespace: Namespace, ids: IntArray, pages: IntArray, priority: int = 0) -> tuple[list[int], int]:
        """Pages that are cached of `ids` now, and how many were before."""
        num_known = len(self._found(namespace, ids))
        prefixes = self.prefixes_of(namespace, ids)
        for prefix, page in zip(prefixes[num_known:], pages[num_known:].tolist(), strict=True):
            self.entries[prefix] = Entry(page, self._tick + 1, priority=priority)
        path = [self.entries[prefix] for prefix in prefixes]
        self._touch(path)
        for entry in path:
            entry.priority = max(entry.priority, priority)
        return [entry.page for entry in path], num_known

    def lock(self, namespace: Namespace, ids: IntArray, change: int) -> None:
        """Locks (1) or unlocks (-1) the pages of `ids`, all of which are cached."""
        path = [self.entries[prefix] for prefix in self.prefixes_of(namespace, ids)]
        for entry in path:
            entry.locks += change
            assert entry.locks >= 0
        if change < 0:
            self._touch(path)

    def evict(self, num: int) -> list[int]:
        pages = []
        for _ in range(min(num, self.num_evictable)):
            parents = {self._above(prefix) for prefix in self.entries}
            ends = [prefix for prefix, entry in self.entries.items() if not entry.locks and prefix not in parents]
            victim = min(ends, key=lambda prefix: self._score(self.entries[prefix]))
            pages.append(self.entries.pop(victim).page)
        return pages

    def reset(self) -> list[int]:
        pages = [entry.page for entry in self.entries.values()]
        self.entries.clear()
        return pages

    @property
    def num_evictable(self) -> int:
        return sum(not entry.locks for entry in self.entries.values())

    def _found(self, namespace: Namespace, ids: IntArray) -> list[Entry]:
        found = []
        for prefix in self.prefixes_of(namespace, ids):
            if prefix not in self.entries:
                break
            found.append(self.entries[prefix])
        return found

    def _above(self, prefix: Prefix) -> Prefix:
        return prefix[0], prefix[1][: -4 * self.page_size]

    def _touch(self, entries: list[Entry]) -> None:
        self._tick += 1
        for entry in entries:
            entry.last_used = self._tick


class TreeMirror:
    """A watcher that knows only what it was told: a CacheObserver that rebuilds the set of cached prefixes."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._edges: dict[int, tuple[int, IntArray, Namespace]] = {}
        self.num_events = 0

    def on_insert(self, node: int, parent: int, ids: IntArray, namespace: Namespace) -> None:
        assert node not in self._edges and (parent == -1 or self._edges[parent][2] == namespace)
        assert len(ids) and len(ids) % self._page_size == 0
        self._edges[node] = (parent, np.array(ids), namespace)
        self.num_events += 1

    def on_split(self, node: int, upper: int, num_upper: int) -> None:
        parent, ids, namespace = self._edges[node]
        assert 0 < num_upper < len(ids) and upper not in self._edges
        self._edges[upper] = (parent, ids[:num_upper], namespace)
        self._edges[node] = (upper, ids[num_upper:], namespace)
        self.num_events += 1

    def on_evict(self, node: int, num_left: int) -> None:
        parent, ids, namespace = self._edges[node]
        assert num_left < len(ids) and all(above != node for above, _, _ in self._edges.values())
        if num_left:
            self._edges[node] = (parent, ids[:num_left], namespace)
        else:
            del self._edges[node]
        self.num_events += 1

    def on_reset(self) -> None:
        self._edges.clear()
        self.num_events += 1

    def edges(self) -> dict[int, tuple[int, bytes, Namespace]]:
        """By node: parent, tokens, namespace."""
        return {node: (parent, ids.tobytes(), name) for node, (parent, ids, name) in self._edges.items()}

    def prefixes(self) -> set[Prefix]:
        """The prefix of every cached page."""
        found = set()
        for node, (_, ids, namespace) in self._edges.items():
            above, parent = b"", self._edges[node][0]
            while parent != -1:
                above = self._edges[parent][1].tobytes() + above
                parent = self._edges[parent][0]
            for stop in range(self._page_size, len(ids) + 1, self._page_size):
                found.add((namespace, above + ids[:stop].tobytes()))
        return found
