"""Watching the prefix cache: who reads the feed can rebuild the exact content, and who does not costs nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import CacheDriver, run_random
from support.cache_oracle import TreeMirror
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.scheduler.cache.eviction import make_eviction_policy
from radixmesh.daemons.scheduler.cache.feed import CacheFeed
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache
from radixmesh.daemons.scheduler.cache.trie_cache import TrieCache
from radixmesh.daemons.scheduler.cache.watch import change_messages
from radixmesh.scheduler.v1 import scheduler_pb2


def apply(mirror: TreeMirror, message: scheduler_pb2.WatchCacheResponse) -> None:
    """A watcher that treats messages as the contract says."""
    if message.is_reset:
        mirror.on_reset()
    for split in message.splits:
        mirror.on_split(split.node - 1, split.upper - 1, split.num_upper)
    for insert in message.inserts:
        name = Namespace(insert.cache_namespace, insert.weights_version)
        mirror.on_insert(insert.node - 1, insert.parent - 1, unpack_ints(insert.ids, "ids"), name)
    for trim in message.trims:
        mirror.on_evict(trim.node - 1, trim.num_left)
    for node in unpack_ints(message.evicted_nodes, "evicted_nodes").tolist():
        mirror.on_evict(node - 1, 0)


class Watcher:
    """Follows a feed by what goes over the wire alone."""

    def __init__(self, feed: CacheFeed, page_size: int) -> None:
        self._feed = feed
        self.mirror = TreeMirror(page_size)
        (content,) = feed.open() or (None,)
        assert content is not None
        self.revision = feed.revision
        content.order()
        for item in content.nodes():
            self.mirror.on_insert(*item)

    def read(self, max_events: int = 1 << 30, max_tokens: int = 1 << 30) -> bool:
        """False: fell behind."""
        events = self._feed.events_after(self.revision, max_events, max_tokens)
        if events is None:
            return False
        for message in change_messages(events, self.revision):
            apply(self.mirror, scheduler_pb2.WatchCacheResponse.FromString(message.SerializeToString()))
            assert message.revision > self.revision
            self.revision = message.revision
        return True


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_watchers_rebuild_the_exact_content_whenever_they_begin(page_size: int, eviction: str) -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        cache = RadixCache(page_size=page_size, num_pages=40, policy=make_eviction_policy(eviction))
        driver, feed = CacheDriver(cache, eviction), CacheFeed(first_revision=1000)
        feed.follow((cache,))
        run_random(driver, rng, 100)
        watchers = []
        for _ in range(4):
            watchers.append(Watcher(feed, page_size))
            run_random(driver, rng, 100)
            for watcher in watchers[::2]:
                while watcher.revision < feed.revision:
                    assert watcher.read(max_events=int(rng.integers(1, 9)), max_tokens=int(rng.integers(1, 99)))
        for watcher in watchers:
            assert watcher.read() and watcher.revision == feed.revision
            assert watcher.mirror.prefixes() == set(driver.oracle.entries)


def test_content_stays_as_it_was_while_the_tree_goes_on() -> None:
    cache = RadixCache(page_size=1, num_pages=60)
    driver, rng, feed = CacheDriver(cache), np.random.default_rng(3), CacheFeed()
    feed.follow((cache,))
    run_random(driver, rng, 200)
    (content,), then = feed.open(), set(driver.oracle.entries)
    run_random(driver, rng, 300)
    mirror = TreeMirror(1)
    assert content is not None
    content.order()
    for item in content.nodes():
        mirror.on_insert(*item)
    assert mirror.prefixes() == then != set(driver.oracle.entries)


@settings(max_examples=40)
@given(max_events=st.integers(1, 40), max_tokens=st.integers(1, 200), pause=st.integers(1, 60), seed=st.integers(0, 99))
def test_who_falls_behind_is_told_and_never_gets_half_the_truth(
    max_events: int, max_tokens: int, pause: int, seed: int
) -> None:
    cache = RadixCache(page_size=1, num_pages=40)
    driver, rng = CacheDriver(cache), np.random.default_rng(seed)
    feed = CacheFeed(first_revision=7, max_events=max_events, max_tokens=max_tokens)
    feed.follow((cache,))
    watcher, num_behind = Watcher(feed, 1), 0
    for _ in range(6):
        run_random(driver, rng, pause)
        if not watcher.read():
            num_behind += 1
            watcher = Watcher(feed, 1)
        assert watcher.mirror.prefixes() == set(driver.oracle.entries)
        assert feed.num_tokens <= max_tokens
    if max_events == 40 and max_tokens >= 190 and pause == 1:
        assert num_behind == 0


def test_revisions_that_never_were_and_other_epochs_are_gaps() -> None:
    feed = CacheFeed(first_revision=500)
    assert feed.events_after(500, 9, 9) is None, "nobody watched: nothing was noted"
    cache = RadixCache(page_size=1, num_pages=8)
    feed.follow((cache,))
    assert feed.open() is not None
    revision = feed.revision
    cache.insert(Namespace("", 1), np.array([1, 2], np.int32), np.array([0, 1], np.int32))
    assert len(feed.events_after(revision, 9, 9) or ()) == 1
    assert feed.events_after(revision + 1, 9, 9) == []
    assert feed.events_after(revision + 2, 9, 9) is None and feed.events_after(0, 9, 9) is None
    feed.follow(())
    assert feed.events_after(revision + 1, 9, 9) is None
    assert feed.open() is None
    feed.follow((TrieCache(page_size=1, num_pages=8),))
    assert feed.open() is None, "the trie tells nobody"


def test_the_planners_cache_is_rebuilt_by_its_watcher_through_a_life() -> None:
    world = World(num_pages=96, num_slots=4, decode_reserve_tokens=1)
    watcher = Watcher(world.planner.cache_feed, 1)
    for i in range(30):
        world.submit([2 + (i + j) % 9 for j in range(4 + i % 17)])
        if i % 5 == 4:
            world.run(2)
        if i == 20:
            world.planner.flush.wish()
    world.run()
    assert watcher.read()
    state = world.planner.state
    assert state is not None and state.pages.num_evicted > 0
    assert len(watcher.mirror.prefixes()) == state.pages.cache.num_cached > 0
    fresh = Watcher(world.planner.cache_feed, 1)
    assert fresh.mirror.prefixes() == watcher.mirror.prefixes()
    world.begin_epoch()
    assert not watcher.read(), "a new epoch is a gap"
    again = Watcher(world.planner.cache_feed, 1)
    assert again.mirror.prefixes() == watcher.mirror.prefixes(), "and everything was adopted again"
