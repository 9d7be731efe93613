"""Prefixes that left host memory for the store: a bounded hint, which watchers follow and no output depends on."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_oracle import TreeMirror
from support.planner_world import World

from radixmesh.daemons.router.peers.grpc_peers import cache_change
from radixmesh.daemons.router.placement.cache_view import CacheView
from radixmesh.daemons.router.placement.prefix_index import PrefixIndex, matched_tokens
from radixmesh.daemons.router.placement.prompt_keys import BLOCK, PromptKeys
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.watch import change_messages, snapshot_messages
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings
from radixmesh.daemons.scheduler.tiers.stored_prefixes import StoredPrefixes
from radixmesh.scheduler.v1 import scheduler_pb2

NAME = Namespace("", 1)
OTHER = Namespace("0:salt", 1)
# Tokens for all that a test adds.
_ROOM = 1 << 14


def prefixes_of(stored: StoredPrefixes) -> set[tuple[Namespace, bytes]]:
    mirror = TreeMirror(stored.cache.page_size)
    content = stored.cache.content()
    content.order()
    for node in content.nodes():
        mirror.on_insert(*node)
    return mirror.prefixes()


@pytest.mark.parametrize("page_size", [1, 4])
@given(seed=st.integers(0, 10_000))
def test_what_is_known_was_added_and_not_forgotten_since(page_size: int, seed: int) -> None:
    """Against a set of prefixes: never more than that, all of it while there is room, and never beyond the bounds."""
    rng = np.random.default_rng(seed)
    most = int(rng.choice([32, 128, _ROOM]))
    stored, truth = StoredPrefixes(page_size, most), set[tuple[Namespace, bytes]]()
    num_evicted = 0
    for _ in range(50):
        name = NAME if rng.random() < 0.7 else OTHER
        ids = rng.integers(0, 2, int(rng.integers(1, 12)) * page_size).astype(np.int32)
        ends = range(page_size, len(ids) + 1, page_size)
        pages = [(name, ids[:end].tobytes()) for end in ends]
        if rng.random() < 0.6:
            before = len(truth | set(pages))
            stored.add(name, ids)
            truth |= set(pages)
            assert stored.num_known(name, ids) == len(pages) or most < _ROOM
        else:
            num_there = int(rng.integers(0, len(pages) + 1))
            stored.forget(name, ids, num_there)
            # Whatever continues the page that is missing, unless something else does, too.
            known = prefixes_of(stored)
            assert known <= truth
            if num_there < len(pages) and stored.num_known(name, ids) > num_there:
                missing = pages[num_there][1]
                branches = [path for at, path in known if at == name and path.startswith(missing)]
                assert max(branches, key=len) != ids.tobytes(), "the end of the prefix itself is gone"
            truth = known
            before = len(truth)
        assert not stored.find_violation() and stored.cache.num_cached * page_size <= most
        known = prefixes_of(stored)
        assert known <= truth
        num_evicted += before - len(known)
        truth = known
    if most == _ROOM:
        assert not num_evicted, "there was room for all"


def test_the_least_recently_used_are_forgotten_first_and_nodes_count() -> None:
    stored = StoredPrefixes(1, 256)
    prompts = [np.full(100, n, np.int32) for n in range(4)]
    for ids in prompts[:2]:
        stored.add(NAME, ids)
    stored.add(NAME, prompts[0][:60])  # Used again, in part: that splits nothing.
    assert stored.cache.tree.num_nodes == 2
    stored.add(NAME, prompts[2])
    assert [stored.num_known(NAME, ids) for ids in prompts] == [100, 56, 100, 0]
    for n in range(20):
        stored.add(NAME, np.array([50 + n], np.int32))
    assert stored.cache.tree.num_nodes == 4 and stored.num_known(NAME, np.array([69], np.int32)) == 1
    stored.add(NAME, np.arange(1000, dtype=np.int32))
    assert stored.num_known(NAME, np.arange(1000, dtype=np.int32)) == 256, "its beginning is what fits"
    stored.clear()
    assert not stored.cache.num_cached and not stored.find_violation()


def test_forgetting_without_evictions_leaves_no_row_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that loses everything, asked for ever."""
    pushed, push = [], heapq.heappush
    monkeypatch.setattr(heapq, "heappush", lambda heap, item: (pushed.append(heap), push(heap, item))[1])
    stored = StoredPrefixes(1, 4096)
    for n in range(2000):
        ids = np.array([n % 7, n, n + 1], np.int32)
        stored.add(NAME, ids)
        stored.forget(NAME, ids, n % 3)
    assert len(pushed[-1]) < 300 and not stored.find_violation()


class Watcher:
    """A router's view of a planner's caches, by messages alone. takes_store: False: a router that knows no stores."""

    def __init__(self, world: World, keys: PromptKeys, *, takes_store: bool) -> None:
        self._feed, self._takes_store = world.planner.cache_feed, takes_store
        self.indexes = [PrefixIndex(), PrefixIndex(), PrefixIndex()]
        self._view = CacheView(0, self.indexes[0], keys, max_bytes=1 << 30, lower=self.indexes[1:])
        self._revision = -1
        self.num_gaps = 0

    async def read(self) -> None:
        """Applies what has changed; all that there is, where too little is kept."""
        events = self._feed.events_after(self._revision, 1 << 30, 1 << 30)
        if events is not None:
            for message in change_messages(
                events, self._revision, None if self._takes_store else self._feed.is_of_store
            ):
                self._apply(message)
            self._revision += len(events)
            return
        self.num_gaps += 1
        self._view.clear()
        for _ in self._view.clear_index():
            pass
        contents, self._revision = self._feed.open(), self._feed.revision
        assert contents is not None
        num_ranks = self._feed.num_ranks
        async for message in snapshot_messages(contents, self._revision, num_ranks, takes_store=self._takes_store):
            self._apply(message)

    def _apply(self, message: scheduler_pb2.WatchCacheResponse) -> None:
        self._view.apply(cache_change(scheduler_pb2.WatchCacheResponse.FromString(message.SerializeToString())))


@pytest.mark.parametrize("seed", range(4))
async def test_views_equal_the_three_trees_and_no_hint_changes_an_output(seed: int) -> None:
    """Little memory in both tiers, a store that loses what it likes, new epochs, a flush, and watchers that lag."""
    rng = np.random.default_rng(seed)
    keys, size = PromptKeys(seed), (1, 4)[seed % 2]
    world = World(
        page_size=size,
        num_pages=240 // size,
        num_host_pages=320 // size,
        num_slots=4,
        chunk_tokens=64,
        num_stored=lambda num: num if rng.random() < 0.6 else int(rng.integers(0, num + 1)),
        load_token_us=1.0,
        tiers=TierSettings(load_min_tokens=1, fetch_min_tokens=4, stored_tokens=(900, 5000)[seed // 2]),
    )
    watchers = [Watcher(world, keys, takes_store=True), Watcher(world, keys, takes_store=False)]
    stems = [rng.integers(2, 64, 120).tolist() for _ in range(6)]
    prompts = [stem[: rng.integers(40, 121)] + rng.integers(2, 64, 20).tolist() for stem in stems for _ in range(4)]
    for turn in range(90):
        world.submit(prompts[rng.integers(len(prompts))])
        if turn % 3 == 2:
            world.run(2)
        if turn in (40, 80):
            world.begin_epoch()
        if turn == 60:
            world.run()
            world.planner.flush.wish()
        if rng.random() < 0.2:
            watcher = watchers[rng.integers(2)]
            await watcher.read()
        state = world.planner.state
        assert state is not None and not state.stored[0].find_violation()
    world.run()
    world.check_clean()
    for record in world.records.values():
        assert record.tokens == world.expected(record.submission)
    state = world.planner.state
    assert state is not None and state.stored[0].cache.num_cached and world.planner.fetches.num_tokens
    caches = [state.pages.cache, state.hosts[0].cache, state.stored[0].cache]
    for watcher in watchers:
        await watcher.read()
        assert watcher.num_gaps >= 2
        for tier, (cache, index) in enumerate(zip(caches, watcher.indexes, strict=True)):
            for prompt in prompts:
                ids = np.array(prompt, np.int32)
                found = matched_tokens(index.match(keys.of_prompt(ids.astype("<i4").tobytes(), keys.root("", 1))), 1)
                known = cache.probe(NAME, ids).num_pages * size // BLOCK * BLOCK
                assert found[0] == (known if tier < 2 or watcher is watchers[0] else 0), (tier, prompt)
    assert len(watchers[0].indexes[2]) and not len(watchers[1].indexes[2])


def host_world(**changes: object) -> World:
    """Host memory for two prompts, a device for little more, a store that has all of whatever was asked for."""
    tiers = TierSettings(load_min_tokens=1, fetch_min_tokens=4)
    sizes: dict[str, object] = {"num_pages": 240, "num_host_pages": 200, "eos_rate": 0.0, "load_token_us": 1.0}
    return World(**{**sizes, "num_stored": lambda num: num, "tiers": tiers, **changes})  # type: ignore[arg-type]


PROMPTS = [[2 + (i * 7 + n) % 60 for i in range(80)] for n in range(8)]


def known(world: World, prompt: list[int]) -> int:
    state = world.planner.state
    assert state is not None
    return state.stored[0].num_known(NAME, np.array(prompt, np.int32))


def run_all(world: World, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        world.submit(prompt)
        world.run()


def test_prefixes_that_leave_the_host_are_remembered_until_the_store_lacks_them() -> None:
    world = host_world(num_stored=lambda num: there["num"])
    there = {"num": 0}
    run_all(world, PROMPTS)
    assert known(world, PROMPTS[0]) == 79 + 1 and known(world, PROMPTS[-1]) == 0, "the last one is on the host"
    # A fetch that brings less than what was thought to be there.
    there["num"] = 30
    run_all(world, PROMPTS[:1])
    assert known(world, PROMPTS[0]) == 30
    assert all(record.tokens == world.expected(record.submission) for record in world.records.values())


def test_a_fetch_that_failed_says_nothing_of_the_store() -> None:
    world = host_world()
    run_all(world, PROMPTS)
    before = known(world, PROMPTS[0])
    world.submit(PROMPTS[0])
    state = world.planner.state
    assert state is not None and before and world.planner.plan(world.now) is None
    (fetch,) = world.planner.fetches.take_wanted()
    world.planner.fetches.fetched(state, fetch, 0, is_answer=False)
    assert known(world, PROMPTS[0]) == before
    world.run()


def test_workers_that_come_back_empty_find_what_their_host_memory_had_in_the_store() -> None:
    world = host_world()
    run_all(world, PROMPTS[:3])
    before = [known(world, prompt) for prompt in PROMPTS[:3]]
    assert before[2] == 0, "it is on the host"
    planner = world.planner
    planner.begin_epoch(world.epoch + 1, world.group, None)
    assert [known(world, prompt) for prompt in PROMPTS[:3]] == [before[0], known(world, PROMPTS[1]), 80]
    assert known(world, PROMPTS[1]) >= 79
    # Other weights, another form of KV, another store, or none: what is known is worth nothing.
    for number, change in enumerate([{"weights_digest": "x"}, {"kv_layout": "y"}, {"kv_store_id": "s"}], 2):
        world.group = replace(world.group, **change)
        planner.begin_epoch(world.epoch + number, world.group, None)
        assert not known(world, PROMPTS[0])
        state = planner.state
        assert state is not None
        state.stored[0].add(NAME, np.array(PROMPTS[0], np.int32))
    planner.begin_epoch(world.epoch + 9, replace(world.group, has_kv_store=False), None)
    assert planner.state is not None and not planner.state.stored and planner.state.hosts[0].stored is None


def test_nothing_is_remembered_where_that_is_not_wanted() -> None:
    world = host_world(tiers=TierSettings(load_min_tokens=1, fetch_min_tokens=4, stored_tokens=0))
    run_all(world, PROMPTS)
    state = world.planner.state
    assert state is not None and not state.stored and state.hosts[0].counters.evicted
    assert world.planner.fetches.num_tokens == 0 or world.planner.fetches.num_filled


def test_the_cost_of_a_stored_token_is_measured() -> None:
    """A fetch and a load, against computing; at most one."""
    world = host_world()
    assert world.planner.fetches.store_cost(0.1) == pytest.approx(0.35), "nothing came so far"
    run_all(world, PROMPTS[:2])
    world.submit(PROMPTS[3])
    world.planner.plan(world.now)
    assert len(world.planner.fetches) == 1
    world.now += 0.001
    world.run()
    expect_us = world.planner.estimate.expect_us(1024) / 1024
    world.planner.plan(world.now)
    # 0.25 + the load's, until now; then the millisecond for its 79 tokens, and no load.
    measured = world.planner.fetches.store_cost(0.0)
    assert 0.0 < measured <= 1.0 and measured != pytest.approx(0.25)
    assert measured <= 1000 / 79 / expect_us + 1e-9
    assert world.planner.fetches.store_cost(1.0) == 1.0
