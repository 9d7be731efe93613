"""Groups of rows of a decode step that share a prefix, found on the host from their page tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
# Prefixes end at one of this many lengths at most, which bounds what is compared of each row.
_MAX_LENGTHS = 24
_LEAST_STEP = 64
# Tokens to which the prefix of a group is then known: what is left to its rows is read once for each.
_FINE_STEP = 16


class PrefixGroup(NamedTuple):
    """Rows (two or more, as indices) whose first `length` tokens lie in the same pages."""

    rows: IntArray
    length: int


def find_shared_prefixes(
    page_tables: IntArray, lens: IntArray, page_size: int = 1, min_tokens: int = 256
) -> list[PrefixGroup]:
    """Groups that save the most reading, each row in one of them at most.

    page_tables [rows, pages]; lens [rows]: tokens of each row that have KV or get it in this step, the last of which is
    its own. Rows of a radix cache that have a page at the same index share the whole prefix up to it, so pages are
    compared at some lengths only: at `min_tokens`, every 64 tokens or more after it, and finer after a group's last.

    Groups nest (all rows share a system prompt, some of them a document too): each set of rows that agree up to some
    length either is a group or leaves it to those of its parts that agree further, by which of both saves more tokens.
    """
    lengths, keys = _keys_at_lengths(page_tables, lens, page_size, min_tokens)
    if keys.shape[1] == 0:
        return []
    groups = _best_groups(_nested_sets(keys), lengths, len(lens))
    step = int(lengths[1] - lengths[0]) if len(lengths) > 1 else _LEAST_STEP
    return _lengthened(groups, page_tables, lens, page_size, step) if groups else []


def split_groups(groups: Sequence[PrefixGroup], max_rows: int) -> list[PrefixGroup]:
    """The same groups in pieces of at most `max_rows` rows, of about equal sizes; those of a group are neighbours."""
    pieces = []
    for rows, length in groups:
        count = -(-len(rows) // max_rows)
        pieces += [PrefixGroup(piece, length) for piece in np.array_split(rows, count)]
    return pieces


class _Level(NamedTuple):
    """Disjoint sets of rows that agree up to a length. rows: sorted by set; starts [sets + 1]; shared [sets]: how many
    lengths the rows of each agree at; parents [sets]: the set of the level before that each comes from."""

    rows: IntArray
    starts: IntArray
    shared: IntArray
    parents: IntArray


def _keys_at_lengths(
    page_tables: IntArray, lens: IntArray, page_size: int, min_tokens: int
) -> tuple[IntArray, IntArray]:
    """Prefix lengths [lengths] in tokens, and the last page of each [rows, lengths]; negative: row is shorter."""
    first = -(-min_tokens // page_size) * page_size
    limits = (lens - 1) // page_size * page_size
    longest = int(np.partition(limits, -2)[-2]) if len(limits) > 1 else 0
    if longest < first:
        return np.empty(0, np.int64), np.empty((len(lens), 0), np.int64)
    step = _LEAST_STEP
    while (longest - first) // step >= _MAX_LENGTHS:
        step *= 2
    step = -(-step // page_size) * page_size
    lengths = np.arange(first, longest + 1, step)
    keys = page_tables[:, lengths // page_size - 1]
    # A page of its own for a row that ends before: it agrees with no other.
    own = -1 - np.arange(len(lens), dtype=keys.dtype)
    return lengths, np.where(lengths <= limits[:, None], keys, own[:, None])


def _nested_sets(keys: IntArray) -> list[_Level]:
    levels: list[_Level] = []
    rows = np.arange(len(keys))
    labels = keys[:, 0]
    parent_of_row = np.zeros(len(keys), np.int64)
    while True:
        order = np.lexsort((labels, parent_of_row))
        rows, labels, parent_of_row = rows[order], labels[order], parent_of_row[order]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (labels[1:] != labels[:-1]) | (parent_of_row[1:] != parent_of_row[:-1])
        set_of_row = np.cumsum(is_first) - 1
        sizes = np.bincount(set_of_row)
        keep = (sizes >= 2)[set_of_row]
        if not keep.any():
            return levels
        rows, parent_of_row = rows[keep], parent_of_row[keep]
        starts = np.concatenate(([0], np.cumsum(sizes[sizes >= 2])))
        set_of_row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        # A length at which two rows agree is one up to which they agree: counting suffices.
        agreed = (keys[rows] == keys[rows[starts[:-1]]][set_of_row]).sum(axis=1)
        shared = np.minimum.reduceat(agreed, starts[:-1])
        levels.append(_Level(rows, starts, shared, parent_of_row[starts[:-1]]))
        goes_on = shared[set_of_row] < keys.shape[1]
        rows, parent_of_row = rows[goes_on], set_of_row[goes_on]
        if not len(rows):
            return levels
        labels = keys[rows, shared[parent_of_row]]


def _best_groups(levels: list[_Level], lengths: IntArray, num_rows: int) -> list[PrefixGroup]:
    saved_by_parts = np.zeros(0)
    is_group: list[npt.NDArray[np.bool_]] = []
    for index in reversed(range(len(levels))):
        level = levels[index]
        saved = (np.diff(level.starts) - 1) * lengths[level.shared - 1]
        deeper = saved_by_parts if len(saved_by_parts) else np.zeros(len(saved))
        is_group.append(saved >= deeper)
        num_parents = len(levels[index - 1].starts) - 1 if index else 1
        saved_by_parts = np.bincount(level.parents, np.maximum(saved, deeper), num_parents)
    groups = []
    is_taken = np.zeros(num_rows, np.bool_)
    for level, chosen in zip(levels, reversed(is_group), strict=True):
        for index in np.flatnonzero(chosen).tolist():
            rows = level.rows[level.starts[index] : level.starts[index + 1]]
            if not is_taken[rows[0]]:
                is_taken[rows] = True
                groups.append(PrefixGroup(rows, int(lengths[level.shared[index] - 1])))
    return groups


def _lengthened(
    groups: list[PrefixGroup], page_tables: IntArray, lens: IntArray, page_size: int, step: int
) -> list[PrefixGroup]:
    """The groups with what their rows share of the `step` tokens after the length that was compared last."""
    fine = -(-_FINE_STEP // page_size) * page_size
    rows = np.concatenate([group.rows for group in groups])
    sizes = np.array([len(group.rows) for group in groups])
    lengths = np.array([group.length for group in groups])
    starts = np.cumsum(sizes) - sizes
    ends = np.repeat(lengths, sizes)[:, None] + np.arange(fine, step + fine, fine)
    is_in = ends < lens[rows][:, None]
    pages = page_tables[rows[:, None], np.minimum(ends // page_size, page_tables.shape[1]) - 1]
    agreed = ((pages == np.repeat(pages[starts], sizes, axis=0)) & is_in).sum(axis=1)
    lengths += np.minimum.reduceat(agreed, starts) * fine
    return [PrefixGroup(group.rows, length) for group, length in zip(groups, lengths.tolist(), strict=True)]
