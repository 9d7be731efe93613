"""Contract of every registered prefix cache."""

import numpy as np
import pytest
from support.cache_driver import CacheDriver, run_random
from support.cache_oracle import CacheOracle

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.cache.prefix_cache import PREFIX_CACHES, Namespace, make_prefix_cache

ALL = sorted(PREFIX_CACHES)
REAL = sorted(set(PREFIX_CACHES) - {"none"})
SIZES = [1, 4, 16]
NAMESPACE = Namespace("", 1)


def _ids(*tokens: int, page_size: int) -> IntArray:
    return np.repeat(np.array(tokens, np.int32), page_size)


def _pages(*pages: int) -> IntArray:
    return np.array(pages, np.int32)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("page_size", SIZES)
def test_counts_add_up_and_locked_pages_stay(name: str, page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    cache = make_prefix_cache(name, page_size=page_size, num_pages=64)
    free = set(range(64))
    for _ in range(300):
        num = min(int(rng.integers(0, 10)), len(free))
        ids = np.repeat(rng.integers(0, 2, num).astype(np.int32), page_size)
        pages = np.array(sorted(free)[:num], np.int32)
        match, num_known = cache.insert(NAMESPACE, ids, pages)
        taken = set(pages[num_known:].tolist())
        assert 0 <= num_known <= num and len(match.pages) <= num and taken <= set(match.pages.tolist())
        free -= taken
        cache.lock(match)
        evictable = cache.num_evictable
        evicted = cache.evict(int(rng.integers(0, 80)))
        assert len(evicted) <= evictable == cache.num_evictable + len(evicted)
        assert not set(evicted.tolist()) & set(match.pages.tolist())
        found = cache.match(NAMESPACE, ids)
        assert found.pages.tolist() == match.pages.tolist()
        cache.unlock(match)
        free |= set(evicted.tolist())
        assert len(free) + cache.num_cached == 64 and cache.num_evictable == cache.num_cached
    left = cache.reset().tolist()
    assert set(left) | free == set(range(64)) and len(left) == 64 - len(free)
    assert cache.num_cached == cache.num_evictable == 0


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("page_size", SIZES)
def test_agrees_with_the_oracle(name: str, page_size: int) -> None:
    for seed in range(4):
        cache = make_prefix_cache(name, page_size=page_size, num_pages=40)
        run_random(CacheDriver(cache), np.random.default_rng(seed), 400)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("page_size", SIZES)
def test_namespaces_share_nothing(name: str, page_size: int) -> None:
    cache = make_prefix_cache(name, page_size=page_size, num_pages=64)
    ids = _ids(1, 2, 3, page_size=page_size)
    for index, namespace in enumerate([Namespace("", 1), Namespace("a", 1), Namespace("", 2)]):
        assert not len(cache.match(namespace, ids).pages)
        pages = _pages(10 * index, 10 * index + 1, 10 * index + 2)
        assert cache.insert(namespace, ids, pages).num_known == 0
        assert np.array_equal(cache.match(namespace, ids).pages, pages)


@pytest.mark.parametrize("name", REAL)
def test_a_flood_of_namespaces_leaves_nothing_behind(name: str) -> None:
    cache = make_prefix_cache(name, page_size=1, num_pages=8)
    for index in range(2000):
        namespace = Namespace(f"salt {index}", 1)
        cache.match(namespace, _pages(1, 2))
        assert cache.insert(namespace, _pages(1, 2), _pages(0, 1)).num_known == 0
        assert sorted(cache.evict(2).tolist()) == [0, 1]
    assert cache.num_cached == 0


@pytest.mark.parametrize("name", REAL)
def test_a_handle_outlives_splits_around_it(name: str) -> None:
    cache = make_prefix_cache(name, page_size=1, num_pages=100)
    ids = np.arange(50, dtype=np.int32)
    cache.insert(NAMESPACE, ids, ids)
    held = cache.match(NAMESPACE, ids[:30])
    cache.lock(held)
    for stop in (10, 20, 5, 29):  # Others leave the path above where the handle ends.
        other = np.append(ids[:stop], 99).astype(np.int32)
        cache.insert(NAMESPACE, other, np.append(ids[:stop], 50 + stop).astype(np.int32))
    assert cache.num_evictable == 54 - 30
    assert sorted(cache.evict(100).tolist()) == [*range(30, 50), 55, 60, 70, 79]
    assert np.array_equal(cache.match(NAMESPACE, ids).pages, ids[:30])
    cache.unlock(held)
    assert sorted(cache.evict(7).tolist()) == list(range(23, 30))
    assert len(cache.evict(100)) == 23 and cache.num_cached == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("page_size", [1, 4])
def test_adopts_what_the_records_prove(name: str, page_size: int) -> None:
    for seed in range(30):
        records, proven = _random_records(np.random.default_rng(seed), page_size, 60)
        cache = make_prefix_cache(name, page_size=page_size, num_pages=60)
        taken = cache.adopt(records, ["", "adapter"], 1).tolist()
        assert len(taken) == len(set(taken)) == cache.num_cached == cache.num_evictable
        if name == "none":
            assert not taken
            continue
        assert len(taken) == len(set(proven.values())) and set(taken) <= set(proven)
        for namespace, tokens in set(proven.values()):
            found = cache.match(namespace, np.frombuffer(tokens, np.int32)).pages.tolist()
            assert [proven[page] for page in found] == CacheOracle(page_size).prefixes_of(
                namespace, np.frombuffer(tokens, np.int32)
            )
        assert sorted(cache.evict(60).tolist()) == sorted(taken)


def _random_records(
    rng: np.random.Generator, page_size: int, num: int
) -> tuple[PageRecords, dict[int, tuple[Namespace, bytes]]]:
    """Records of a forest with sharing and duplicates in random pages; and of each provable page its prefix."""
    order = rng.permutation(num)
    full = np.where(rng.random(num) < 0.9, page_size, rng.integers(0, page_size, num)).astype(np.int32)
    generations = rng.integers(1, 4, num).astype(np.int32)
    previous, previous_generations = np.full(num, -1, np.int32), np.zeros(num, np.int32)
    indexes = rng.integers(0, 2, num).astype(np.int32)
    versions = np.where(rng.random(num) < 0.95, 1, 2).astype(np.int32)
    for rank in range(1, num):
        if rng.random() < 0.85:
            page, above = order[rank], order[rng.integers(max(0, rank - 4), rank)]
            previous[page] = above
            previous_generations[page] = generations[above] - (rng.random() < 0.05)
            indexes[page] = indexes[above] if rng.random() < 0.95 else 1 - indexes[above]
    tokens = [np.repeat(rng.integers(0, 2, 1), count).astype(np.int32) for count in full]
    proven: dict[int, tuple[Namespace, bytes]] = {}
    for page in order.tolist():
        above, name = int(previous[page]), Namespace(("", "adapter")[indexes[page]], 1)
        if full[page] < page_size or versions[page] != 1:
            continue
        if above < 0:
            proven[page] = (name, tokens[page].tobytes())
        elif above in proven and previous_generations[page] == generations[above] and proven[above][0] == name:
            proven[page] = (name, proven[above][1] + tokens[page].tobytes())
    records = PageRecords(
        first_page=0,
        generations=generations,
        filled=full,
        previous_pages=previous,
        previous_generations=previous_generations,
        namespace_indexes=indexes,
        weights_versions=versions,
        ids=np.concatenate(tokens),
    )
    return records, proven
