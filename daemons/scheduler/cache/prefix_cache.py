"""The seam of the prefix cache: which KV pages hold which token prefixes. Knows nothing of requests, slots or workers.

A cache indexes *full* pages only. Prefixes are shared within one namespace and never between two. Page ids are the
worker's; who holds a page (cache, slot, nobody) is the page pool's business: whoever calls moves the pages there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageRecords

if TYPE_CHECKING:
    from radixmesh.daemons.scheduler.cache.observer import CacheContent, CacheObserver

DEFAULT_EVICTION = "lru"


class Namespace(NamedTuple):
    """KV is equal for equal tokens only within one of these. `name` stands for (adapter, salt)."""

    name: str
    weights_version: int


class Match(NamedTuple):
    """A cached prefix: its pages from the first token on, int32, and the implementation's own node (opaque)."""

    pages: IntArray
    node: int


class Inserted(NamedTuple):
    """Result of an insert. `match` covers the inserted tokens that are cached now; the cache took the caller's pages
    from `num_known` on (all are "known" where it declines), those before stay the caller's unless they were cached."""

    match: Match
    num_known: int


class Probe(NamedTuple):
    """The cached part of a prefix at the moment: whole pages, and where they lie. `branch` names nodes from the top
    down to the prefix's end, opaque: of two prefixes with a long part in common, so have their branches."""

    num_pages: int
    branch: tuple[int, ...]


NOTHING_KNOWN = Probe(0, ())


class PrefixCache(ABC):
    """Index from token prefixes to pages, with locks and eviction. One thread calls it.

    page_size: tokens per page. num_pages: pages of the pool, ids [0, num_pages).
    """

    def __init__(self, *, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Pages that the cache holds."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Of them, those that evict() could free now: unlocked, and so is everything below them."""

    @abstractmethod
    def match(self, namespace: Namespace, ids: IntArray, probe: Probe | None = None) -> Match:
        """The longest cached prefix of `ids` (int32 [any length]) in whole pages; possibly of no page.

        probe: what probe() said of just these ids, if nothing has changed since: saves looking again.

        Modifies neither the content nor locks; marks what it found as used. The pages stay where they are until the
        next evict() or reset(), so lock() what is kept beyond that. `ids` is not kept.
        """

    @abstractmethod
    def probe(self, namespace: Namespace, ids: IntArray) -> Probe:
        """The part of `ids` that match() finds; changes nothing, marks nothing as used. Cheap: queues ask often."""

    @abstractmethod
    def insert(self, namespace: Namespace, ids: IntArray, pages: IntArray, *, priority: int = 0) -> Inserted:
        """Makes the pages of `ids` findable; len(ids) = page_size * len(pages).

        priority: what the prefix is worth to an eviction by priority; higher stays longer. Others ignore it.

        Where a prefix is cached already its page stays and the caller keeps its own (a duplicate, or the very same
        page); from the first unknown page on the cache takes the caller's pages, which must not be in the cache.
        Locks nothing and changes no lock. Copies what it keeps of `ids` and `pages`.
        """

    def extend(
        self, held: Match, namespace: Namespace, ids: IntArray, pages: IntArray, *, priority: int = 0
    ) -> Inserted:
        """insert() of a prefix that begins with a locked match's tokens; the lock moves to the returned match, which
        is never shorter than `held`."""
        inserted = self.insert(namespace, ids, pages, priority=priority)
        self.lock(inserted.match)
        self.unlock(held)
        return inserted

    @abstractmethod
    def lock(self, match: Match) -> None:
        """Keeps the pages of a match (just returned, or locked already) from eviction. Locks count."""

    @abstractmethod
    def unlock(self, match: Match) -> None:
        """Takes back one lock() of this match; marks its pages as used. The match may be dropped afterwards."""

    @abstractmethod
    def evict(self, num: int) -> IntArray:
        """Forgets up to `num` unlocked pages, ends of prefixes first, and returns them, int32.

        Returns fewer only if num_evictable is smaller. Locked pages, and what lies above kept ones, stay. The returned
        pages are the caller's.
        """

    def before_evict(self, evicting: Callable[[Namespace, IntArray, IntArray, int], None] | None) -> None:
        """Has evict() tell, before it forgets the end of a prefix, the whole of it: namespace, tokens, pages, priority.
        `evicting` must leave the cache as it is. None = nobody is told. Raises NotImplementedError where a cache cannot
        (EVICTING_CACHES can)."""
        raise NotImplementedError

    def num_used(self, match: Match, times: int) -> int:
        """Pages of a match, from the first on, that match() has found at least so many times. Raises as above."""
        raise NotImplementedError

    @abstractmethod
    def adopt(self, records: PageRecords, names: Sequence[str], weights_version: int) -> IntArray:
        """Takes over the KV that page records describe; the cache must be empty. Returns the pages taken, int32.

        `records` covers all pages (first_page 0); `names` are what its namespace_indexes name. Taken are full pages of
        that weights version whose chain leads back to a root with every generation matching. Of pages with equal
        prefixes one is taken and the chains below the others are joined to it. Modifies no argument.
        """

    @abstractmethod
    def reset(self) -> IntArray:
        """Forgets everything, locked pages too, and returns the pages that were cached. Matches are void."""

    def watch(self, observer: CacheObserver | None, *, replay: bool = True) -> bool:
        """Tells an observer of all there is, as inserts, unless replay is False, and from now on of what changes; None
        = nobody any more. False: this cache tells nobody."""
        return False

    def content(self) -> CacheContent | None:
        """The current content, for a watcher that begins; None: this cache tells nobody. Cheap, and stays as it is
        whatever the cache does meanwhile."""
        return None

    def longest_full(self, length: int) -> int:
        """Pages that `length` tokens fill whole."""
        return length // self.page_size


CacheFactory = Callable[..., PrefixCache]


def _make_trie(*, page_size: int, num_pages: int, eviction: str) -> PrefixCache:
    from radixmesh.daemons.scheduler.cache.trie_cache import TrieCache

    return TrieCache(page_size=page_size, num_pages=num_pages)


def _make_none(*, page_size: int, num_pages: int, eviction: str) -> PrefixCache:
    from radixmesh.daemons.scheduler.cache.no_cache import NoCache

    return NoCache(page_size=page_size, num_pages=num_pages)


def _make_radix(*, page_size: int, num_pages: int, eviction: str) -> PrefixCache:
    from radixmesh.daemons.scheduler.cache.eviction import make_eviction_policy
    from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache

    return RadixCache(page_size=page_size, num_pages=num_pages, policy=make_eviction_policy(eviction))


PREFIX_CACHES: dict[str, CacheFactory] = {"radix": _make_radix, "trie": _make_trie, "none": _make_none}
# Caches that can do more than evict what was used longest ago.
EVICTING_CACHES = frozenset({"radix"})


def check_cache_choice(name: str, eviction: str) -> None:
    """Raises ValueError, naming the choices, for a cache that does not exist or cannot evict in that order."""
    if name not in PREFIX_CACHES:
        raise ValueError(f"prefix cache {name!r} is unknown: choose one of {', '.join(sorted(PREFIX_CACHES))}")
    if eviction != DEFAULT_EVICTION and name not in EVICTING_CACHES:
        choices = ", ".join(sorted(EVICTING_CACHES))
        raise ValueError(f"prefix cache {name!r} evicts by {DEFAULT_EVICTION} alone: for {eviction!r} choose {choices}")


def make_prefix_cache(name: str, *, page_size: int, num_pages: int, eviction: str = DEFAULT_EVICTION) -> PrefixCache:
    """A new, empty cache. Raises ValueError naming the choices."""
    check_cache_choice(name, eviction)
    return PREFIX_CACHES[name](page_size=page_size, num_pages=num_pages, eviction=eviction)
