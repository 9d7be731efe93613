"""Reads page records: which pages of a worker hold prefixes that can still be trusted. No loop per page."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageRecords

# Odd, so that every token counts in all bits of a product modulo 2^64 (the multiplier of Knuth's MMIX generator).
_MULTIPLIER = np.uint64(6364136223846793005)


class Chains(NamedTuple):
    """Pages that form prefixes, parents before children. int32 [n]; tokens int32 [n, page_size]."""

    pages: IntArray
    parents: IntArray
    """Page before, -1 = the prefix starts here."""
    depths: IntArray
    namespace_indexes: IntArray
    tokens: npt.NDArray[np.int32]


def read_chains(records: PageRecords, page_size: int, weights_version: int) -> Chains:
    """Full pages whose chain leads back to a root with all generations matching, each prefix once.

    Reachability, depth and a rolling hash of the whole prefix come by pointer doubling: log2(longest chain) rounds.
    Pages of equal hash are compared token by token before one of them replaces the others; a collision drops both's
    later pages, never mixes them.
    """
    num_pages = len(records.filled)
    tokens = _tokens_of_full(records, page_size)
    parents = _valid_parents(records, page_size, weights_version)
    hashes = ((tokens.astype(np.uint64) + np.uint64(1)) * _powers(page_size)[None, :]).sum(
        axis=1, dtype=np.uint64
    ) * _MULTIPLIER + records.namespace_indexes.astype(np.uint64)
    is_rooted, depths, hashes = _follow(parents, hashes)
    pages = np.flatnonzero(is_rooted).astype(np.int32)
    canon = np.arange(num_pages + 1, dtype=np.int32)
    _, first, inverse = np.unique(hashes[pages], return_index=True, return_inverse=True)
    canon[pages] = pages[first[inverse]]
    # Node num_pages is the root, its own canonical page. By induction over the depth: equal tokens below equal
    # canonical parents are equal prefixes.
    grand = canon[pages]
    same = (
        (tokens[pages] == tokens[grand]).all(axis=1)
        & (canon[parents[pages]] == canon[parents[grand]])
        & (records.namespace_indexes[pages] == records.namespace_indexes[grand])
    )
    kept = pages[same & (grand == pages)]
    if not same.all():  # A hash collision: drop those pages and all below them.
        parents = parents.copy()
        parents[pages[~same]] = -1
        is_rooted, _, _ = _follow(parents, hashes[:num_pages])
        kept = kept[is_rooted[kept]]
    kept = kept[np.argsort(depths[kept], kind="stable")]
    above = canon[parents[kept]]
    return Chains(
        pages=kept,
        parents=np.where(above == num_pages, np.int32(-1), above).astype(np.int32),
        depths=depths[kept].astype(np.int32),
        namespace_indexes=records.namespace_indexes[kept],
        tokens=tokens[kept],
    )


def without_pages(records: PageRecords, pages: IntArray, weights_version: int) -> PageRecords:
    """The records with these pages unusable under `weights_version`, and so whatever continues them."""
    if not len(pages):
        return records
    weights_versions = records.weights_versions.copy()
    weights_versions[pages] = weights_version - 1 if weights_version > 0 else weights_version + 1
    return replace(records, weights_versions=weights_versions)


def _tokens_of_full(records: PageRecords, page_size: int) -> npt.NDArray[np.int32]:
    """Tokens int32 [num_pages, page_size]; zeros where a page is not full."""
    filled = records.filled
    tokens = np.zeros((len(filled), page_size), np.int32)
    starts = np.cumsum(filled) - filled
    full = np.flatnonzero(filled == page_size)
    tokens[full] = records.ids[starts[full][:, None] + np.arange(page_size)]
    return tokens


def _valid_parents(records: PageRecords, page_size: int, weights_version: int) -> npt.NDArray[np.int64]:
    """Per page its valid parent: a page, num_pages for a root, -1 where the page cannot be used. int64 [num_pages]."""
    num_pages = len(records.filled)
    previous = records.previous_pages.astype(np.int64)
    is_usable = (records.filled == page_size) & (records.weights_versions == weights_version)
    is_child = (previous >= 0) & (previous < num_pages)
    above = np.where(is_child, previous, 0)
    is_linked = (
        is_child
        & is_usable[above]
        & (records.generations[above] == records.previous_generations)
        & (records.namespace_indexes[above] == records.namespace_indexes)
    )
    parents = np.where(is_linked, previous, -1)
    parents[previous == -1] = num_pages
    parents[~is_usable] = -1
    return parents


def _follow(
    parents: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Per page: whether its chain reaches the root, its depth (1 = first page), the hash of its whole prefix.

    A page's step is the affine map x -> m * x + h; composing maps while pointers double gives the hash of the chain.
    """
    num_pages = len(parents)
    root, nowhere = num_pages, num_pages + 1
    target = np.append(np.where(parents < 0, nowhere, parents), [root, nowhere])
    depths = np.append(np.ones(num_pages, np.int64), [0, 0])
    factor = np.append(np.full(num_pages, _MULTIPLIER, np.uint64), np.ones(2, np.uint64))
    offset = np.append(hashes, np.zeros(2, np.uint64))
    for _ in range(num_pages.bit_length() + 1):
        if (target[:num_pages] >= num_pages).all():
            break
        depths += depths[target]
        offset += factor * offset[target]
        factor *= factor[target]
        target = target[target]
    return target[:num_pages] == root, depths[:num_pages], offset


def _powers(num: int) -> npt.NDArray[np.uint64]:
    return np.cumprod(np.full(num, _MULTIPLIER, np.uint64), dtype=np.uint64)
