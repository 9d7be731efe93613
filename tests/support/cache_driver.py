"""Drives a prefix cache and the brute-force oracle side by side and compares whatever they answer."""

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace, PrefixCache
from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache
from support.cache_oracle import CacheOracle, TreeMirror

NAMESPACES = [Namespace("", 1), Namespace("adapter", 1), Namespace("", 2)]


class CacheDriver:
    """Pages are given out and taken back as by a pool. `locked` holds every lock taken: (match, namespace, tokens)."""

    def __init__(self, cache: PrefixCache, policy: str = "lru", mirror: TreeMirror | None = None) -> None:
        self.cache = cache
        self.oracle = CacheOracle(cache.page_size, policy)
        self.mirror = mirror
        self.locked: list[tuple[Match, Namespace, IntArray]] = []
        self._free = list(range(cache.num_pages))
        self._num_matches = 0

    def match(self, namespace: Namespace, ids: IntArray, *, locks: int = 0) -> None:
        self._num_matches += 1
        # Every second one by what a probe has found: the same.
        probe = self.cache.probe(namespace, ids) if self._num_matches % 2 else None
        found = self.cache.match(namespace, ids, probe)
        assert found.pages.dtype == np.int32
        assert found.pages.tolist() == self.oracle.match(namespace, ids)
        for _ in range(locks):
            self._lock(found, namespace, ids[: len(found.pages) * self.cache.page_size])

    def insert(self, namespace: Namespace, ids: IntArray, *, locks: int = 0, priority: int = 0) -> None:
        """Inserts `ids`, shortened to the free pages, with pages of its own throughout."""
        num = min(len(ids) // self.cache.page_size, len(self._free))
        ids = ids[: num * self.cache.page_size]
        pages = np.array([self._free.pop() for _ in range(num)], np.int32)
        scratch_ids, scratch_pages = ids.copy(), pages.copy()
        if priority:
            assert isinstance(self.cache, RadixCache)
            match, num_known = self.cache.insert(namespace, scratch_ids, scratch_pages, priority=priority)
        else:
            match, num_known = self.cache.insert(namespace, scratch_ids, scratch_pages)
        scratch_ids[:], scratch_pages[:] = -7, -7  # Whatever is kept must be a copy.
        expected, expected_known = self.oracle.insert(namespace, ids, pages, priority)
        assert (match.pages.tolist(), num_known) == (expected, expected_known)
        self._free.extend(pages[:num_known].tolist())
        for _ in range(locks):
            self._lock(match, namespace, ids)

    def extend(self, index: int, more: IntArray, *, priority: int = 0) -> None:
        """Continues a locked prefix with pages of its own."""
        held, namespace, known = self.locked.pop(index)
        size, num_held = self.cache.page_size, len(held.pages)
        num = min(len(more) // size, len(self._free))
        ids = np.concatenate([known[: num_held * size], more[: num * size]])
        added = [self._free.pop() for _ in range(num)]
        pages = np.concatenate([held.pages, np.array(added, np.int32)])
        scratch_ids, scratch_pages = ids.copy(), pages.copy()
        if priority:
            match, num_known = self.cache.extend(held, namespace, scratch_ids, scratch_pages, priority=priority)
        else:
            match, num_known = self.cache.extend(held, namespace, scratch_ids, scratch_pages)
        scratch_ids[:], scratch_pages[:] = -7, -7
        expected, expected_known = self.oracle.insert(namespace, ids, pages, priority)
        assert (match.pages.tolist(), num_known) == (expected, expected_known)
        self._free.extend(pages[num_held:num_known].tolist())
        self.oracle.lock(namespace, ids, 1)
        self.oracle.lock(namespace, known, -1)
        self.locked.append((match, namespace, ids))

    def unlock(self, index: int) -> None:
        match, namespace, ids = self.locked.pop(index)
        self.cache.unlock(match)
        self.oracle.lock(namespace, ids, -1)

    def evict(self, num: int) -> None:
        evicted = self.cache.evict(num).tolist()
        assert sorted(evicted) == sorted(self.oracle.evict(num))
        self._free.extend(evicted)

    def reset(self) -> None:
        pages = self.cache.reset().tolist()
        assert sorted(pages) == sorted(self.oracle.reset())
        self.locked.clear()
        self._free.extend(pages)

    def check(self) -> None:
        """Counts, and what the observer was told, agree with the oracle."""
        assert self.cache.num_cached == len(self.oracle.entries)
        assert self.cache.num_evictable == self.oracle.num_evictable
        assert len(self._free) + self.cache.num_cached == self.cache.num_pages
        if self.mirror is not None:
            assert self.mirror.prefixes() == set(self.oracle.entries)

    def _lock(self, match: Match, namespace: Namespace, ids: IntArray) -> None:
        self.cache.lock(match)
        self.oracle.lock(namespace, ids, 1)
        self.locked.append((match, namespace, ids.copy()))


def random_ids(rng: np.random.Generator, page_size: int, num_pages: int) -> IntArray:
    """Tokens that share prefixes often: of two values, and past the first page now and then not whole pages."""
    tokens = rng.integers(0, 2, (num_pages, page_size), dtype=np.int32)
    if page_size > 1:
        tokens[:, : page_size - 1] = 7  # Pages that differ in their last token only.
    return tokens.reshape(-1)


def run_random(driver: CacheDriver, rng: np.random.Generator, num_steps: int, max_priority: int = 0) -> None:
    """Random operations, checked one by one."""
    size = driver.cache.page_size
    for _ in range(num_steps):
        namespace = NAMESPACES[int(rng.integers(len(NAMESPACES)))]
        ids = random_ids(rng, size, int(rng.integers(0, 12)))
        locks = int(rng.integers(0, 3)) if len(driver.locked) < 8 else 0
        step = int(rng.integers(0, 100))
        if step < 35:
            driver.insert(namespace, ids, locks=locks, priority=int(rng.integers(0, max_priority + 1)))
        elif step < 60:
            tail = np.full(int(rng.integers(0, size)), 9, np.int32)
            driver.match(namespace, np.concatenate([ids, tail]), locks=locks)
        elif step < 68 and driver.locked:
            priority = int(rng.integers(0, max_priority + 1))
            driver.extend(int(rng.integers(len(driver.locked))), ids, priority=priority)
        elif step < 82 and driver.locked:
            driver.unlock(int(rng.integers(len(driver.locked))))
        elif step < 99:
            driver.evict(int(rng.integers(0, 15)))
        else:
            driver.reset()
        driver.check()
