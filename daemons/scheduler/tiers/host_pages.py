"""Pages of host memory: free, or the host cache's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray


class HostPages:
    """Pages [0, num_pages). A page that is moved from a state that it is not in is a fault of ours: AssertionError."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._is_used: npt.NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        # A stack; first pages that follow each other, which are copied in longer pieces.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, num: int) -> IntArray:
        """`num` free pages, int32 [num]; there must be as many."""
        assert num <= self.num_free, (num, self.num_free)
        pages = self._free[self.num_free - num : self.num_free][::-1].copy()
        self.num_free -= num
        assert not self._is_used[pages].any(), "a page of the free list is used"
        self._is_used[pages] = True
        return pages

    def adopt(self, pages: IntArray) -> None:
        """Free pages are used: a former scheduler had something saved there."""
        assert not self._is_used[pages].any(), "a page is adopted twice"
        self._is_used[pages] = True
        free = np.flatnonzero(~self._is_used)[::-1].astype(np.int32)
        self.num_free = len(free)
        self._free[: self.num_free] = free

    def give_back(self, pages: IntArray) -> None:
        """Used pages are free."""
        assert self._is_used[pages].all(), "a page is given back twice"
        self._is_used[pages] = False
        self._free[self.num_free : self.num_free + len(pages)] = np.sort(pages)[::-1]
        self.num_free += len(pages)

    def count_used(self) -> int:
        """Used pages, counted afresh; O(num_pages)."""
        return int(np.count_nonzero(self._is_used))
