"""The radix tree's own promises: compact edges, cuts of leaves, size, depth, watchers, and what it refuses."""

import itertools
import time

import numpy as np
import pytest
from support.cache_driver import CacheDriver, run_random
from support.cache_oracle import TreeMirror
from support.reachable import num_reachable

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.cache.eviction import make_eviction_policy
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace
from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache
from radixmesh.daemons.scheduler.cache.radix_nodes import RadixNodes

NAMESPACE = Namespace("", 1)


def make_cache(num_pages: int, *, page_size: int = 1, mirror: TreeMirror | None = None) -> RadixCache:
    cache = RadixCache(page_size=page_size, num_pages=num_pages)
    cache.watch(mirror)
    return cache


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def records_of(previous: IntArray, ids: IntArray) -> PageRecords:
    """Records of full one-token pages, all of generation 1."""
    zeros = np.zeros(len(previous), np.int32)
    return PageRecords(
        first_page=0,
        generations=zeros + 1,
        filled=zeros + 1,
        previous_pages=previous,
        previous_generations=zeros + 1,
        namespace_indexes=zeros,
        weights_versions=zeros + 1,
        ids=ids,
    )


def test_edges_are_as_long_as_sharing_allows() -> None:
    cache = make_cache(100)
    cache.insert(NAMESPACE, span(0, 40), span(0, 40))
    assert cache.tree.num_nodes == 1
    cache.insert(NAMESPACE, np.append(span(0, 30), ints(90, 91)), np.append(span(0, 30), ints(60, 61)))
    assert cache.tree.num_nodes == 3  # The shared part, and two ends.
    cache.match(NAMESPACE, span(0, 35))
    assert cache.tree.num_nodes == 4
    path, num = cache.tree.find(NAMESPACE, span(0, 33))
    assert (len(path), num, cache.tree.num_nodes) == (2, 33, 4)  # Only looking cuts nothing.


def test_evicts_no_more_of_a_long_leaf_than_asked() -> None:
    cache = make_cache(1000, page_size=4)
    cache.insert(NAMESPACE, span(0, 4000), span(0, 1000))
    assert sorted(cache.evict(3).tolist()) == [997, 998, 999]
    assert sorted(cache.evict(1).tolist()) == [996]
    assert (cache.num_cached, cache.tree.num_nodes) == (996, 1)
    assert np.array_equal(cache.match(NAMESPACE, span(0, 4000)).pages, span(0, 996))
    assert len(cache.evict(10_000)) == 996
    assert (cache.num_cached, cache.tree.num_nodes, cache.tree.namespaces) == (0, 0, [])


@pytest.mark.parametrize(
    "differs_at", [0, 1, 511, 512, 513, 8703, 8704, 74_239, 74_240, 139_775, 139_776, 149_999, None]
)
def test_long_edges_match_up_to_the_first_difference(differs_at: int | None) -> None:
    cache = make_cache(150_000)
    ids = np.random.default_rng(0).integers(0, 1000, 150_000).astype(np.int32)
    cache.insert(NAMESPACE, ids, span(0, 150_000))
    asked = ids.copy()
    if differs_at is not None:
        asked[differs_at:] += 1
    found = cache.match(NAMESPACE, asked).pages
    assert np.array_equal(found, span(0, 150_000 if differs_at is None else differs_at))


def test_a_page_that_is_cached_is_not_taken_again() -> None:
    cache = make_cache(100)
    cache.insert(NAMESPACE, span(0, 10), span(0, 10))
    before = cache.num_cached
    match, num_known = cache.insert(NAMESPACE, np.append(span(0, 5), ints(77, 78)), np.append(span(0, 5), ints(50, 8)))
    assert (num_known, match.pages.tolist(), cache.num_cached) == (7, [0, 1, 2, 3, 4], before)
    cache.lock(match)
    cache.unlock(match)
    assert len(set(cache.evict(100).tolist())) == before


def test_a_handle_of_something_gone_is_refused() -> None:
    cache = make_cache(100)
    match, _ = cache.insert(NAMESPACE, span(0, 10), span(0, 10))
    cache.evict(1)
    with pytest.raises(AssertionError, match="no such match"):
        cache.lock(match)
    cache.evict(9)
    cache.insert(NAMESPACE, span(20, 30), span(20, 30))
    with pytest.raises(AssertionError, match="no such match"):
        cache.lock(match)
    cache.lock(Match(empty_ints(), -1))
    again, _ = cache.insert(NAMESPACE, span(20, 30), span(20, 30))
    with pytest.raises(AssertionError):
        cache.unlock(again)


def test_a_small_rest_lets_its_long_array_go() -> None:
    cache = make_cache(100_000)
    cache.insert(NAMESPACE, span(0, 100_000), span(0, 100_000))
    cache.match(NAMESPACE, span(0, 10))
    held = cache.match(NAMESPACE, span(0, 10))
    cache.lock(held)
    cache.evict(100_000)
    nodes = cache.tree.nodes
    assert len(nodes.ids[held.node]) == 10
    for array in (nodes.ids[held.node], nodes.pages[held.node]):
        assert (array if array.base is None else array.base).nbytes <= 4 * array.nbytes
    cache.unlock(held)
    cache.insert(NAMESPACE, span(0, 10_000), span(0, 10_000))
    leaf = cache.match(NAMESPACE, span(0, 10_000)).node
    cache.evict(9_500)
    array = nodes.pages[leaf]
    assert len(array) == 490 and (array if array.base is None else array.base).nbytes <= 4 * array.nbytes


def test_eviction_work_does_not_grow_with_use() -> None:
    """Each leaf has one entry in the queue, however often it is matched, locked and unlocked."""
    cache = make_cache(1000)
    for token in range(100):
        cache.insert(NAMESPACE, ints(token, 1), ints(2 * token, 2 * token + 1))
    sizes = []
    for _ in range(20):
        for token in range(100):
            match = cache.match(NAMESPACE, ints(token, 1))
            cache.lock(match)
            cache.evict(0)
            cache.unlock(match)
        sizes.append(num_reachable(cache))
    assert sizes[-1] < sizes[0] + 100, "not an entry more for each use"
    assert cache.evict(2).tolist() == [0, 1]


def test_a_policy_is_a_strategy() -> None:
    """The same life under each policy: which of three prefixes goes first."""
    first = {}
    for name in ("lru", "lfu", "fifo", "priority"):
        cache = RadixCache(page_size=1, num_pages=10, policy=make_eviction_policy(name))
        cache.insert(NAMESPACE, ints(1), ints(1), priority=5)
        cache.insert(NAMESPACE, ints(2), ints(2), priority=-5)
        cache.insert(NAMESPACE, ints(3), ints(3), priority=9)
        cache.match(NAMESPACE, ints(3))
        for token in (2, 2, 1):
            cache.match(NAMESPACE, ints(token))
        first[name] = cache.evict(3).tolist()
    assert first == {"lru": [3, 2, 1], "lfu": [3, 1, 2], "fifo": [1, 2, 3], "priority": [2, 1, 3]}
    with pytest.raises(ValueError, match="choose one of fifo, lfu, lru, priority"):
        make_eviction_policy("newest")


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_watcher_that_comes_late_sees_the_same_tree(page_size: int) -> None:
    early, late = TreeMirror(page_size), TreeMirror(page_size)
    cache = make_cache(60, page_size=page_size, mirror=early)
    driver = CacheDriver(cache, mirror=early)
    run_random(driver, np.random.default_rng(3), 300)
    driver.insert(NAMESPACE, np.arange(5 * page_size, dtype=np.int32))
    cache.watch(late)
    assert late.edges() == early.edges() and late.prefixes() == set(driver.oracle.entries) and late.edges()
    nodes = cache.tree.nodes
    for node, (parent, ids, _) in early.edges().items():
        assert nodes.ids[node].tobytes() == ids
        assert parent == (nodes.parent[node] if nodes.num[nodes.parent[node]] else -1)
    num_told, driver.mirror = early.num_events, late
    run_random(driver, np.random.default_rng(4), 300)
    assert early.num_events == num_told < late.num_events


def test_adopted_chains_become_few_edges_that_live_on() -> None:
    """Ten prompts of 50 tokens that share their first 20, two more that share nothing, pages in random order."""
    rng = np.random.default_rng(0)
    order = rng.permutation(420).astype(np.int32)
    previous, ids = np.full(420, -1, np.int32), np.zeros(420, np.int32)
    chains = [order[:20], *np.split(order[20:320], 10), order[320:370], order[370:]]
    for index, chain in enumerate(chains):
        previous[chain[1:]] = chain[:-1]
        ids[chain] = 1000 * index + span(0, len(chain))
        if 1 <= index <= 10:
            previous[chain[0]] = chains[0][-1]
    mirror = TreeMirror(1)
    cache = make_cache(420, mirror=mirror)
    assert sorted(cache.adopt(records_of(previous, ids), [""], 1).tolist()) == list(range(420))
    assert cache.tree.num_nodes == 13 == len(mirror.edges())
    whole = np.concatenate([chains[0], chains[4]])
    match = cache.match(NAMESPACE, ids[whole])
    assert np.array_equal(match.pages, whole)
    cache.lock(match)
    part = cache.match(NAMESPACE, ids[whole][:7])
    cache.lock(part)
    assert cache.num_evictable == 370
    assert len(cache.evict(1000)) == 370
    cache.unlock(match)
    assert sorted(cache.evict(1000).tolist()) == sorted(whole[7:].tolist())
    assert len(mirror.prefixes()) == cache.num_cached == 7


def test_adopts_again_after_a_full_life() -> None:
    cache = make_cache(50)
    for _ in range(3):
        taken = cache.adopt(records_of(span(-1, 49), span(0, 50)), [""], 1)
        assert len(taken) == 50 and len(cache.match(NAMESPACE, span(0, 50)).pages) == 50
        free = cache.evict(50)
        for token in range(50):  # Takes every number of a node once.
            cache.insert(NAMESPACE, ints(token), free[token : token + 1])
        assert cache.tree.num_nodes == 50 and len(cache.reset()) == 50 and cache.num_cached == 0
    for _ in range(4):
        assert len(cache.adopt(records_of(np.full(50, -1, np.int32), span(0, 50)), [""], 1)) == 50
        assert len(cache.evict(50)) == 50


def test_a_million_tokens_are_adopted_in_seconds() -> None:
    num = 1_000_000
    rng = np.random.default_rng(0)
    pages = rng.permutation(num).astype(np.int32).reshape(5000, 200)
    previous = np.full(num, -1, np.int32)
    previous[pages[:, 1:]] = pages[:, :-1]
    previous[pages[1:, 0]] = pages[0, 99]
    ids = rng.integers(0, 100_000, num).astype(np.int32)
    cache = make_cache(num)
    began = time.process_time()
    taken = cache.adopt(records_of(previous, ids), [""], 1)
    # 0.9 s where it was written; the bound leaves room for a busy machine.
    assert time.process_time() - began < 6
    assert len(taken) > 990_000 and 5000 <= cache.tree.num_nodes < 5400


def test_a_chain_of_a_hundred_thousand_nodes_is_walked_without_recursion() -> None:
    """Each prefix is inserted at the node above as no caller could afford to: by the tree itself."""
    num = 100_000
    cache = make_cache(num)
    tree, node = cache.tree, -1
    for token in range(num):
        node = tree.append(NAMESPACE, node, ints(token), ints(token))
    match = Match(span(0, num), node)
    path, found = tree.find(NAMESPACE, span(0, num))
    assert (found, len(path), path[-1]) == (num, num, node)
    late = TreeMirror(1)
    tree.replay(late)
    assert late.num_events == num
    assert len(tree.path_to(match.node)) == num


def test_a_path_of_thousands_of_nodes_is_locked_and_evicted() -> None:
    num = 5000
    cache = make_cache(num)
    cache.insert(NAMESPACE, span(0, num), span(0, num))
    for stop in range(num - 1, 0, -1):
        cache.match(NAMESPACE, span(0, stop))
    assert cache.tree.num_nodes == num
    match = cache.match(NAMESPACE, span(0, num - 1))
    cache.lock(match)
    assert cache.evict(num).tolist() == [num - 1]
    cache.unlock(match)
    assert cache.evict(num).tolist() == list(range(num - 2, -1, -1))


def test_a_million_tokens_in_one_edge() -> None:
    num = 1_000_000
    cache = make_cache(num)
    match, _ = cache.insert(NAMESPACE, span(0, num), span(0, num))
    cache.lock(match)
    assert len(cache.match(NAMESPACE, span(0, num)).pages) == num
    for stop in (999_999, 500_000, 1, 250_000):
        assert len(cache.match(NAMESPACE, span(0, stop)).pages) == stop
    assert cache.tree.num_nodes == 5 and cache.num_evictable == 0
    cache.unlock(match)
    assert sorted(cache.evict(num).tolist()) == list(range(num))


def test_a_million_leaves_of_one_token() -> None:
    num = 1_000_000
    previous = np.full(num, 0, np.int32)
    previous[0] = -1
    cache = make_cache(num)
    assert len(cache.adopt(records_of(previous, span(0, num)), [""], 1)) == num
    assert cache.tree.num_nodes == num
    for token in (1, 999_999, 500_000):
        assert cache.match(NAMESPACE, ints(0, token)).pages.tolist() == [0, token]
    assert cache.num_evictable == num
    evicted = list(itertools.chain.from_iterable(cache.evict(count).tolist() for count in (1, 1000, 9_999)))
    assert len(set(evicted)) == 11_000 and not {0, 1, 999_999, 500_000} & set(evicted)
    assert cache.num_cached == num - 11_000


def test_numbers_of_nodes_are_used_again() -> None:
    cache = make_cache(4)
    for index in range(1000):
        cache.insert(Namespace(str(index), 1), ints(index, 1, 2, 3), span(0, 4))
        cache.match(Namespace(str(index), 1), ints(index, 1))
        assert len(cache.evict(4)) == 4
    assert cache.tree.nodes.num_numbers <= 4 and cache.tree.nodes.num_nodes == 0


def test_a_node_given_back_starts_afresh() -> None:
    nodes = RadixNodes(num_pages=4)
    node = nodes.take()
    columns = (nodes.parent, nodes.num, nodes.end, nodes.num_children, nodes.locks, nodes.is_queued)
    columns += (nodes.last_used, nodes.created, nodes.hits, nodes.priority)
    for column in columns:
        column[node] = 3
    nodes.free(node)
    assert nodes.take() == node
    assert [column[node] for column in columns] == [0] * len(columns)
