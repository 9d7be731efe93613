"""Groups of rows that share a prefix: against the tables themselves, and against all ways to choose."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.kernels.attention.prefix_groups import PrefixGroup, find_shared_prefixes, split_groups


def _radix_tables(branches, depth_tokens, page_size=1):
    """Page tables of a tree. branches: for each row its choice at each depth, so equal beginnings share pages."""
    pages_each = depth_tokens // page_size
    ids, tables = {}, []
    for choices in branches:
        row = []
        for depth in range(len(choices)):
            first = ids.setdefault(tuple(choices[: depth + 1]), len(ids) * pages_each)
            row += range(first, first + pages_each)
        tables.append(row)
    width = max(map(len, tables)) + 1
    table = np.full((len(tables), width), -1, np.int32)
    for row, pages in zip(table, tables, strict=True):
        row[: len(pages)] = pages
    lens = np.array([len(pages) * page_size for pages in tables])
    return table, lens


def _saved(groups):
    return sum((len(rows) - 1) * length for rows, length in groups)


def _best_saving(branches, rows, depth, depth_tokens, lens):
    """Of all ways to group the rows that agree up to `depth`: as one group, or by where they go on."""
    if len(rows) < 2:
        return 0
    length = min(depth * depth_tokens, *(int(lens[row]) - depth_tokens for row in rows))
    together = (len(rows) - 1) * depth * depth_tokens if length == depth * depth_tokens else 0
    parts = {}
    for row in rows:
        if len(branches[row]) > depth:
            parts.setdefault(branches[row][depth], []).append(row)
    return max(together, sum(_best_saving(branches, part, depth + 1, depth_tokens, lens) for part in parts.values()))


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=6), min_size=1, max_size=12), st.sampled_from([1, 16]))
def test_groups_share_what_they_say_and_save_the_most(branches, page_size):
    depth_tokens = 64
    # The last depth of each row is its own.
    branches = [[*choices, 100 + row] for row, choices in enumerate(branches)]
    tables, lens = _radix_tables(branches, depth_tokens, page_size)
    groups = find_shared_prefixes(tables, lens, page_size, min_tokens=64)
    rows_seen = [row for rows, _ in groups for row in rows.tolist()]
    assert len(rows_seen) == len(set(rows_seen))
    for rows, length in groups:
        assert len(rows) >= 2 and length >= 64 and length % page_size == 0
        assert (lens[rows] > length).all()
        pages = tables[rows, : length // page_size]
        assert (pages == pages[0]).all()
    assert _saved(groups) == _best_saving(branches, list(range(len(branches))), 0, depth_tokens, lens)


def test_short_prefixes_and_rows_alone_make_no_groups():
    tables = np.zeros((4, 300), np.int32) + np.arange(300, dtype=np.int32)
    tables[:, 100:] += 1000 * np.arange(4, dtype=np.int32)[:, None]
    lens = np.full(4, 300)
    assert find_shared_prefixes(tables, lens) == []
    assert find_shared_prefixes(tables[:1], lens[:1], min_tokens=64) == []
    assert find_shared_prefixes(tables[:0], lens[:0]) == []


def test_a_prefix_ends_before_the_last_token_of_the_shortest_row():
    tables = np.tile(np.arange(400, dtype=np.int32), (3, 1))
    (group,) = find_shared_prefixes(tables, np.array([400, 256, 320]), min_tokens=256)
    assert sorted(group.rows.tolist()) == [0, 2] and group.length == 304
    (group,) = find_shared_prefixes(tables, np.array([400, 257, 321]), min_tokens=256)
    assert sorted(group.rows.tolist()) == [0, 1, 2] and group.length == 256


@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("shared_len", [256, 290, 319, 1000, 5000])
def test_a_prefix_is_found_to_a_few_tokens(shared_len, page_size):
    shared_pages = shared_len // page_size
    tables = np.tile(np.arange(6000 // page_size, dtype=np.int32), (3, 1))
    tables[:, shared_pages:] += 100_000 * np.arange(1, 4, dtype=np.int32)[:, None]
    (group,) = find_shared_prefixes(tables, np.full(3, 6000 // page_size * page_size), page_size)
    shared_len = shared_pages * page_size
    assert len(group.rows) == 3 and shared_len - max(16, page_size) < group.length <= shared_len


def test_long_contexts_are_compared_at_few_lengths():
    tables = np.tile(np.arange(33000, dtype=np.int32), (4, 1))
    tables[2:, 20000:] += 100_000
    (first, second) = sorted(find_shared_prefixes(tables, np.full(4, 33000)), key=lambda group: group.rows.min())
    assert sorted(first.rows.tolist()) == [0, 1] and sorted(second.rows.tolist()) == [2, 3]
    assert min(first.length, second.length) > 30000


def test_large_groups_are_cut_evenly():
    pieces = split_groups([PrefixGroup(np.arange(45), 300), PrefixGroup(np.arange(45, 48), 400)], 21)
    assert [len(rows) for rows, _ in pieces] == [15, 15, 15, 3]
    assert [length for _, length in pieces] == [300, 300, 300, 400]
    assert np.concatenate([rows for rows, _ in pieces]).tolist() == list(range(48))
