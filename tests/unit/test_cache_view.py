"""A router's view of a replica's cache equals the scheduler's tree, after any changes, gaps and restarts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.peers.grpc_peers import cache_change
from radixmesh.daemons.router.placement.cache_view import (
    CacheChange,
    CacheView,
    Insert,
    Split,
    Tier,
    Trim,
    ViewError,
    ViewTooLargeError,
)
from radixmesh.daemons.router.placement.prefix_index import PrefixIndex, matched_tokens
from radixmesh.daemons.router.placement.prompt_keys import BLOCK, PromptKeys
from radixmesh.daemons.router.placement.sent_prompts import SentPrompts
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.feed import CacheFeed, inserted_on
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache
from radixmesh.daemons.scheduler.cache.watch import change_messages
from radixmesh.scheduler.v1 import scheduler_pb2

NAMES = (Namespace("", 1), Namespace("0:salt", 1), Namespace("", 2))


class Replica:
    """A scheduler's caches, one a data-parallel rank and tier, that prompts are inserted into and evicted from, and the
    router's view of them."""

    def __init__(
        self,
        row: int,
        index: PrefixIndex,
        keys: PromptKeys,
        *,
        page_size: int = 1,
        num_pages: int = 600,
        num_ranks: int = 1,
        lower: Sequence[PrefixIndex] = (),
    ):
        num = num_ranks * (1 + len(lower))
        self.num_ranks = num_ranks
        self.caches = [RadixCache(page_size=page_size, num_pages=num_pages) for _ in range(num)]
        self.feed = CacheFeed(max_events=50)
        self.feed.follow(self.caches, num_ranks)
        self.view = CacheView(row, index, keys, max_bytes=1 << 30, lower=lower)
        self.free = [list(range(num_pages)) for _ in self.caches]
        self.watch()

    def watch(self) -> None:
        """Begins anew, with what is there."""
        self.view.clear()
        for _ in self.view.clear_index():
            pass
        contents = self.feed.open()
        assert contents is not None
        self.revision = self.feed.revision
        for rank, content in enumerate(contents):
            content.order()
            for node in content.nodes():
                event = inserted_on(rank, len(contents), *node, num_ranks=self.num_ranks)
                insert = Insert(
                    node=event.node + 1,
                    parent=event.parent + 1,
                    ids=event.ids.astype("<i4").tobytes(),
                    namespace=event.namespace.name,
                    weights_version=event.namespace.weights_version,
                    tier=Tier(event.tier),
                )
                self.view.apply(CacheChange(revision=self.revision, inserts=[insert]))

    def insert(self, rank: int, name: Namespace, ids: IntArray) -> None:
        cache, free = self.caches[rank], self.free[rank]
        num_pages = len(ids) // cache.page_size
        ids = ids[: num_pages * cache.page_size]
        missing = num_pages - len(free)
        if missing > 0:
            free.extend(cache.evict(missing).tolist())
        if len(free) < num_pages:
            return
        pages = np.array([free.pop() for _ in range(num_pages)], np.int32)
        done = cache.insert(name, ids, pages)
        free.extend(pages[: done.num_known].tolist())

    def evict(self, rank: int, num_pages: int) -> None:
        self.free[rank].extend(self.caches[rank].evict(num_pages).tolist())

    def reset(self) -> None:
        """The caches are flushed."""
        for cache in self.caches:
            cache.reset()
        self.free = [list(range(cache.num_pages)) for cache in self.caches]

    def read(self) -> None:
        """Applies the events that the feed kept, or the content where it kept too few."""
        events = self.feed.events_after(self.revision, 1 << 30, 1 << 30)
        if events is None:
            return self.watch()
        for message in change_messages(events, self.revision):
            self.view.apply(cache_change(message))
            self.revision = message.revision

    def cached(self, name: Namespace, ids: IntArray, tier: int = 0) -> int:
        """Tokens of the prompt in that one of the scheduler's trees of a tier that has most."""
        caches = self.caches[tier * self.num_ranks : (tier + 1) * self.num_ranks]
        return max(cache.probe(name, ids).num_pages * cache.page_size for cache in caches)


def _prompts(rng: np.random.Generator) -> list[IntArray]:
    """Prompts that share prefixes of any length."""
    prompts: list[IntArray] = []
    for _ in range(12):
        length = int(rng.integers(1, 200))
        ids = rng.integers(0, int(rng.choice([2, 1000])), length).astype(np.int32)
        if prompts and rng.random() < 0.7:
            other = prompts[int(rng.integers(len(prompts)))]
            shared = int(rng.integers(0, len(other) + 1))
            ids = np.concatenate([other[:shared], ids[: max(1, length - shared)]])
        prompts.append(ids)
    return prompts


@pytest.mark.parametrize(
    ("page_size", "num_ranks", "num_tiers"), [(1, 1, 1), (16, 1, 2), (1, 3, 1), (1, 2, 3), (4, 1, 3)]
)
@given(seed=st.integers(0, 10_000))
def test_the_view_equals_the_trees_whatever_happens(page_size: int, num_ranks: int, num_tiers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys, indexes = PromptKeys(seed), [PrefixIndex() for _ in range(num_tiers)]
    sizes = {"page_size": page_size, "num_pages": 600 // page_size, "num_ranks": num_ranks}
    replicas = [Replica(row, indexes[0], keys, **sizes, lower=indexes[1:]) for row in range(3)]
    prompts = _prompts(rng)
    for _ in range(60):
        replica, rank = replicas[int(rng.integers(3))], int(rng.integers(num_ranks * num_tiers))
        match int(rng.integers(10)):
            case 0:
                replica.read()
            case 1:
                replica.watch()
            case 2 if rng.random() < 0.3:
                replica.reset()
            case 2:
                replica.evict(rank, int(rng.integers(1, 40)))
            case _:
                name = NAMES[int(rng.integers(3))]
                replica.insert(rank, name, prompts[int(rng.integers(len(prompts)))])
    for replica in replicas:
        replica.read()
    for name in NAMES:
        root = keys.root(*name)
        for ids in prompts:
            of_prompt = keys.of_prompt(ids.astype("<i4").tobytes(), root)
            for tier, index in enumerate(indexes):
                found = matched_tokens(index.match(of_prompt), 3)
                assert found.tolist() == [replica.cached(name, ids, tier) // BLOCK * BLOCK for replica in replicas]
    for replica in replicas:
        replica.view.clear()
        for _ in replica.view.clear_index():
            pass
    assert not any(map(len, indexes)), "nothing is left of replicas that are gone"


def _ids(count: int) -> bytes:
    return np.arange(count, dtype="<i4").tobytes()


def _insert(node: int, parent: int = 0, count: int = 100) -> Insert:
    return Insert(node=node, parent=parent, ids=_ids(count), namespace="", weights_version=0)


@pytest.mark.parametrize(
    "change",
    [
        CacheChange(revision=2, inserts=[_insert(1)]),
        CacheChange(revision=2, inserts=[_insert(0)]),
        CacheChange(revision=2, inserts=[_insert(3, parent=9)]),
        CacheChange(revision=2, inserts=[_insert(3, count=0)]),
        CacheChange(revision=2, inserts=[Insert(node=3, parent=0, ids=b"123", namespace="", weights_version=0)]),
        CacheChange(revision=2, splits=[Split(node=1, upper=3, num_upper=100)]),
        CacheChange(revision=2, splits=[Split(node=1, upper=2, num_upper=5)]),
        CacheChange(revision=2, splits=[Split(node=1, upper=3, num_upper=0)]),
        CacheChange(revision=2, trims=[Trim(node=1, num_left=5)]),
        CacheChange(revision=2, trims=[Trim(node=2, num_left=100)]),
        CacheChange(revision=2, evicted=[1]),
        CacheChange(revision=2, evicted=[7]),
    ],
)
def test_changes_that_do_not_fit_are_refused(change: CacheChange) -> None:
    view = CacheView(0, PrefixIndex(), PromptKeys(0), max_bytes=1 << 20)
    view.apply(CacheChange(revision=1, inserts=[_insert(1), _insert(2, parent=1)]))
    with pytest.raises(ViewError):
        view.apply(change)


def test_a_view_is_bounded_in_bytes_and_can_begin_anew() -> None:
    index = PrefixIndex()
    view = CacheView(0, index, PromptKeys(0), max_bytes=100_000)
    with pytest.raises(ViewTooLargeError):
        for node in range(1, 1000):
            view.apply(CacheChange(revision=node, inserts=[_insert(node, parent=node - 1)]))
    assert view.num_tokens < 20_000
    view.clear()
    for _ in view.clear_index():
        pass
    assert len(index) == 0 and view.num_bytes == 0
    view.apply(CacheChange(revision=1, inserts=[_insert(1)]))


def test_sent_prompts_are_bounded_and_forget_the_longest_first() -> None:
    index, keys = PrefixIndex(), PromptKeys(0)
    sent = SentPrompts(0, index, max_keys=6)
    root = keys.root("", 0)
    one = keys.of_prompt(_ids(4 * BLOCK), root)
    other = keys.of_prompt(_ids(4 * BLOCK)[::-1], root)
    sent.add(one, now=1.0)
    sent.add(other, now=2.0)
    assert len(sent) == 6
    assert index.match(one) == [(1, 2 * BLOCK)], "its longer prefixes left first"
    assert index.match(other) == [(1, 4 * BLOCK)]
    sent.forget_before(1.5)
    assert index.match(one) == [] and index.match(other) == [(1, 4 * BLOCK)]
    sent.clear()
    assert len(index) == len(sent) == 0


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=30), st.integers(0, 40))
def test_the_longest_match_is_found_for_every_replica(holdings: list[tuple[int, int]], length: int) -> None:
    index = PrefixIndex()
    keys = [3 * n + 1 for n in range(length)]
    expected = [0] * 201
    for replica, blocks in holdings:
        index.add(replica, keys[:blocks])
        expected[replica] = max(expected[replica], min(blocks, length) * BLOCK)
    assert matched_tokens(index.match(keys), 201).tolist() == expected


def test_what_a_scheduler_says_of_its_store_is_bounded() -> None:
    """The name of the store, and tiers that only later versions know."""
    tiers = (scheduler_pb2.CACHE_TIER_STORE, 99, -1)
    inserts = [scheduler_pb2.CacheInsert(node=number, tier=tier) for number, tier in enumerate(tiers, 1)]
    change = cache_change(scheduler_pb2.WatchCacheResponse(store_id="s" * 1000, inserts=inserts))
    assert len(change.store_id) == 64 and {insert.tier for insert in change.inserts} == {Tier.STORE}
