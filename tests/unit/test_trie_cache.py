"""The trie's own promises, and adoption from page records; what every prefix cache keeps to is under tests/contract."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.reachable import num_reachable

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace, make_prefix_cache
from radixmesh.daemons.scheduler.cache.trie_cache import TrieCache


def ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)


def test_unknown_cache_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"choose one of none, .*trie"):
        make_prefix_cache("tree", page_size=1, num_pages=1)


def test_least_recently_used_ends_go_first() -> None:
    cache = TrieCache(page_size=1, num_pages=8)
    space = Namespace("", 1)
    cache.insert(space, ints([1, 2, 3]), ints([0, 1, 2]))
    cache.insert(space, ints([1, 5]), ints([0, 3]))
    cache.insert(space, ints([9]), ints([4]))
    cache.match(space, ints([1, 2, 3]))
    assert cache.evict(2).tolist() == [3, 4]
    assert cache.evict(3).tolist() == [2, 1, 0]


def test_a_namespace_without_pages_leaves_nothing_behind() -> None:
    cache = TrieCache(page_size=1, num_pages=4)
    sizes = []
    for i in range(100):
        cache.insert(Namespace(f"salt{i}", 1), ints([1]), ints([0]))
        cache.match(Namespace(f"other{i}", 1), ints([1]))
        assert cache.evict(1).tolist() == [0]
        sizes.append(num_reachable(cache))
    assert sizes[-1] < sizes[0] + 10


def records_of(
    chains: list[tuple[int, list[int], list[int]]], page_size: int, num_pages: int, **broken: tuple[int, int]
) -> PageRecords:
    """Records of (namespace index, tokens, pages) chains; broken: column -> (page, value) overrides."""
    columns = {
        name: np.zeros(num_pages, np.int32)
        for name in ("generations", "filled", "previous_pages", "previous_generations", "namespace_indexes")
    }
    columns["weights_versions"] = np.ones(num_pages, np.int32)
    columns["generations"][:] = np.arange(num_pages) + 1
    tokens: dict[int, list[int]] = {}
    for namespace, ids, pages in chains:
        for i, page in enumerate(pages):
            tokens[page] = ids[i * page_size : (i + 1) * page_size]
            columns["filled"][page] = len(tokens[page])
            columns["previous_pages"][page] = pages[i - 1] if i else -1
            columns["previous_generations"][page] = pages[i - 1] + 1 if i else 0
            columns["namespace_indexes"][page] = namespace
    for name, (page, value) in broken.items():
        columns[name][page] = value
    ids = [token for page in sorted(tokens) for token in tokens[page]]
    return PageRecords(first_page=0, **columns, ids=ints(ids))


def test_adoption_takes_what_leads_back_to_a_root() -> None:
    chains = [(0, [1, 2, 3, 4, 5], [0, 1, 2]), (0, [1, 2, 9, 9], [4, 5]), (1, [1, 2], [6])]
    cache = TrieCache(page_size=2, num_pages=8)
    adopted = cache.adopt(records_of(chains, 2, 8), ["", "salt"], 1).tolist()
    # Page 2 is partly filled; 0 and 4 hold the same prefix, one of them stays and 5 hangs below it.
    assert set(adopted) - {0, 4} == {1, 5, 6} and len(adopted) == 4
    assert len(cache.match(Namespace("", 1), ints([1, 2, 3, 4, 5])).pages) == 2
    assert len(cache.match(Namespace("", 1), ints([1, 2, 9, 9])).pages) == 2
    assert cache.match(Namespace("salt", 1), ints([1, 2])).pages.tolist() == [6]
    assert sorted(cache.evict(8).tolist()) == sorted(adopted)


@pytest.mark.parametrize(
    "broken",
    [
        {"previous_generations": (1, 77)},
        {"generations": (0, 77)},
        {"weights_versions": (0, 2)},
        {"filled": (0, 0)},
        {"namespace_indexes": (0, 1)},
        {"previous_pages": (0, 2)},  # A cycle.
        {"previous_pages": (1, 99)},
    ],
)
def test_a_broken_link_costs_all_that_hangs_below_it(broken: dict[str, tuple[int, int]]) -> None:
    records = records_of([(0, [1, 2, 3], [0, 1, 2]), (0, [7, 8], [4, 5])], 1, 8)
    columns = {
        name: getattr(records, name).copy()
        for name in (
            "generations",
            "filled",
            "previous_pages",
            "previous_generations",
            "namespace_indexes",
            "weights_versions",
        )
    }
    for name, (page, value) in broken.items():
        columns[name][page] = value
    ids = records.ids if "filled" not in broken else records.ids[1:]
    cache = TrieCache(page_size=1, num_pages=8)
    adopted = set(cache.adopt(PageRecords(first_page=0, **columns, ids=ids), ["", "salt"], 1).tolist())
    assert {4, 5} <= adopted
    assert not adopted & {1, 2}


def test_a_million_one_token_pages_are_adopted_in_seconds() -> None:
    num_pages, length = 1_000_000, 2_000
    pages = np.random.default_rng(1).permutation(num_pages).astype(np.int32).reshape(-1, length)
    previous = np.full(num_pages, -1, np.int32)
    previous[pages[:, 1:].ravel()] = pages[:, :-1].ravel()
    generations = np.ones(num_pages, np.int32)
    ids = np.random.default_rng(2).integers(0, 30_000, num_pages, dtype=np.int32)
    records = PageRecords(
        first_page=0,
        generations=generations,
        filled=np.ones(num_pages, np.int32),
        previous_pages=previous,
        previous_generations=(previous >= 0).astype(np.int32),
        namespace_indexes=np.zeros(num_pages, np.int32),
        weights_versions=np.ones(num_pages, np.int32),
        ids=ids,
    )
    cache = TrieCache(page_size=1, num_pages=num_pages)
    start = time.process_time()
    adopted = cache.adopt(records, [""], 1)
    seconds = time.process_time() - start
    print(f"adopted {len(adopted)} pages in {seconds:.2f} s of CPU")
    assert len(adopted) >= num_pages - 10_000, "only equal first tokens are joined"
    assert cache.match(Namespace("", 1), ids[pages[3]]).pages.tolist() == pages[3].tolist()
    assert seconds < 6.0, "3 s on an idle core"
