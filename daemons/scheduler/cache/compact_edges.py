"""Path compression: pages with their parents become edges that are as long as they can be. Arrays only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.pages.page_chains import Chains

NO_EDGE = -1


class Edges(NamedTuple):
    """Edges of a compact tree, parents before children. Edge i has pages[starts[i]:starts[i + 1]] and those tokens."""

    starts: npt.NDArray[np.int64]
    """int64 [edges + 1]"""
    parents: npt.NDArray[np.int64]
    """Edge above, NO_EDGE = none. int64 [edges]"""
    ends: IntArray
    """Pages from the beginning of the prefix to the end of the edge. int32 [edges]"""
    namespace_indexes: IntArray
    pages: IntArray
    tokens: IntArray
    """int32 [pages * page_size]"""


def compress(chains: Chains, num_pages: int) -> Edges:
    """Joins every page to its parent where it is the only child, O(pages * log(longest edge)).

    Pages point at their parent, first pages of edges at themselves; pointers double until all point at the first page
    of their edge. Sorted by it, a stable sort of pages in order of depth, edges lie one after the other.
    """
    num = len(chains.pages)
    position = np.full(num_pages, -1, np.int64)
    position[chains.pages] = np.arange(num)
    above = np.where(chains.parents >= 0, position[chains.parents], -1)
    num_children = np.bincount(above[above >= 0], minlength=num)
    is_first = (above < 0) | (num_children[above] != 1)
    first = np.where(is_first, np.arange(num), above)
    while True:
        doubled = first[first]
        if np.array_equal(doubled, first):
            break
        first = doubled
    order = np.argsort(first, kind="stable")
    starts = np.flatnonzero(is_first[order])
    edge_of = np.empty(num, np.int64)
    edge_of[order] = np.cumsum(is_first[order]) - 1
    above_first = above[order[starts]]
    last = np.append(starts[1:], num)[: len(starts)] - 1
    return Edges(
        starts=np.append(starts, num),
        parents=np.where(above_first >= 0, edge_of[above_first], NO_EDGE) if num else above_first,
        ends=chains.depths[order[last]],
        namespace_indexes=chains.namespace_indexes[order[starts]],
        pages=chains.pages[order],
        tokens=chains.tokens[order].reshape(-1),
    )
