"""Nodes of a radix tree as columns: a node is a number, so that a million of them are a few arrays and no objects."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints

NO_NODE = -1

# An edge may be a view of a longer array; below this share of it, a copy is made and the array let go.
_SPARSE = 4


class RadixNodes:
    """Table of nodes. A node stands for the end of its edge and keeps its number for life, whatever is split above it.

    Columns are memoryviews over lazily touched memory: an item costs a third of what it does in an ndarray, and the
    garbage collector has nothing to traverse. ids[n], pages[n]: tokens int32 [num * page_size] and pages int32 [num] of
    the edge above n; never written to. A root has no edge.
    """

    def __init__(self, *, num_pages: int) -> None:
        # Every node but a root holds a page, and every root but the one being made a node.
        capacity = 2 * num_pages + 1
        self.parent = _column(capacity, "i4")
        self.num = _column(capacity, "i4")
        """Pages of the edge; 0 = a root, or no node."""
        self.end = _column(capacity, "i4")
        """Pages from the root to the end of the edge."""
        self.num_children = _column(capacity, "i4")
        self.locks = _column(capacity, "i4")
        self.last_used = _column(capacity, "i8")
        self.created = _column(capacity, "i8")
        self.hits = _column(capacity, "i8")
        self.priority = _column(capacity, "i8")
        self.is_queued = _column(capacity, "u1")
        """True if the queue of leaves has an entry for it."""
        self.ids: list[IntArray] = []
        self.pages: list[IntArray] = []
        self._none = empty_ints()
        self._free: list[int] = []

    @property
    def num_nodes(self) -> int:
        """Nodes and roots."""
        return len(self.ids) - len(self._free)

    @property
    def num_numbers(self) -> int:
        """Numbers given out so far, those free again included."""
        return len(self.ids)

    def take(self) -> int:
        """A new node, with zeros and without an edge."""
        if self._free:
            return self._free.pop()
        self.ids.append(self._none)
        self.pages.append(self._none)
        return len(self.ids) - 1

    def take_many(self, num: int) -> int:
        """`num` new nodes of consecutive numbers, of which none was given out before; returns the first."""
        first = len(self.ids)
        self.ids.extend([self._none] * num)
        self.pages.extend([self._none] * num)
        return first

    def free(self, node: int) -> None:
        self.ids[node] = self.pages[node] = self._none
        for column in (self.parent, self.num, self.end, self.num_children, self.locks, self.is_queued):
            column[node] = 0
        for column in (self.last_used, self.created, self.hits, self.priority):
            column[node] = 0
        self._free.append(node)

    def set_edge(self, node: int, ids: IntArray, pages: IntArray) -> None:
        """Gives a node its edge; views of arrays that nobody writes to."""
        self.ids[node] = _compact(ids)
        self.pages[node] = _compact(pages)
        self.num[node] = len(pages)

    def copy_usage(self, source: int, target: int) -> None:
        """For a split: both halves were used, and are locked, as the whole was."""
        for column in (self.locks, self.last_used, self.created, self.hits, self.priority):
            column[target] = column[source]

    def is_free_leaf(self, node: int) -> bool:
        """True if the node could be evicted now."""
        return not self.locks[node] and not self.num_children[node] and self.num[node] > 0


def array_of(column: memoryview, num: int) -> npt.NDArray[np.int64]:
    """The first `num` items of a column as an array of the column's own dtype, sharing memory."""
    array: npt.NDArray[np.int64] = np.asarray(column)[:num]
    return array


def _column(capacity: int, dtype: str) -> memoryview:
    return np.zeros(capacity, dtype).data


def _compact(array: IntArray) -> IntArray:
    base = array.base
    if isinstance(base, np.ndarray) and base.size > _SPARSE * array.size:
        return array.copy()
    return array
