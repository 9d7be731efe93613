"""Who holds each KV page.

  FREE --take--> OWNED (by a slot, granted ahead included) --cache--> CACHED --evict--> FREE
                   |                                                    |
                   +--give_back--> FREE                                 +-- a slot that shares it only locks it
  any --quarantine--> QUARANTINED (until the next epoch). LEASED: lent to a transfer.

free + cached + owned + leased + quarantined = total, always. A page that is not in the state that a transition starts
from is quarantined: the bookkeeping that led there is wrong, and using it could mix two requests' KV.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray


class PageState(IntEnum):
    FREE = 0
    CACHED = 1
    OWNED = 2
    LEASED = 3
    QUARANTINED = 4


# Looking up a member of an enum costs more than what is done with it here, and so does storing one in an array.
_FREE, _CACHED, _OWNED, _LEASED, _QUARANTINED = (int(state) for state in PageState)


class PagePool:
    """Pages [0, num_pages) with state and generation.

    `generations` int32 [num_pages] mirrors the worker's page records: every grant adds one.
    """

    def __init__(self, num_pages: int, generations: IntArray | None = None) -> None:
        self.num_pages = num_pages
        self.generations = np.zeros(num_pages, np.int32) if generations is None else np.array(generations, np.int32)
        assert len(self.generations) == num_pages, (len(self.generations), num_pages)
        self.num_page_violations = 0
        self._states: npt.NDArray[np.uint8] = np.zeros(num_pages, np.uint8)
        self._counts = [num_pages, 0, 0, 0, 0]
        # A stack: pages are taken from its end, so that a page just freed is used again first.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._counts[_FREE]

    @property
    def num_cached(self) -> int:
        return self._counts[_CACHED]

    @property
    def num_owned(self) -> int:
        return self._counts[_OWNED]

    @property
    def num_leased(self) -> int:
        return self._counts[_LEASED]

    @property
    def num_quarantined(self) -> int:
        return self._counts[_QUARANTINED]

    def states_of(self, pages: IntArray) -> npt.NDArray[np.uint8]:
        """State of each page, a copy."""
        return self._states.take(pages)

    def take(self, num: int) -> IntArray:
        """`num` free pages, int32 [num], owned from now on; their generations go up by one. There must be as many."""
        assert num <= self._num_free, (num, self._num_free)
        pages = self._free[self._num_free - num : self._num_free].copy()
        self._num_free -= num
        pages = self._move(pages, _FREE, _OWNED)
        self.generations[pages] += 1
        if len(pages) < num:  # Some were quarantined just now.
            return np.concatenate([pages, self.take(num - len(pages))])
        return pages

    def give_back(self, pages: IntArray) -> None:
        """Owned pages become free."""
        self._push(self._move(pages, _OWNED, _FREE))

    def cache(self, pages: IntArray) -> None:
        """Owned pages become the prefix cache's."""
        self._move(pages, _OWNED, _CACHED)

    def evict(self, pages: IntArray) -> None:
        """Cached pages become free."""
        self._push(self._move(pages, _CACHED, _FREE))

    def adopt(self, pages: IntArray) -> None:
        """Free pages become the prefix cache's: KV that a former scheduler left in the worker."""
        self._move(pages, _FREE, _CACHED)
        self._rebuild_free()

    def quarantine(self, pages: IntArray) -> None:
        """Takes pages out of use, whatever they are."""
        pages = pages[self._states[pages] != _QUARANTINED]
        for state in PageState:
            self._move(pages[self._states[pages] == state], state, _QUARANTINED)
        self._rebuild_free()

    def bump_generations(self) -> None:
        """Follows a flush of the worker's page records."""
        self.generations += 1

    def counts(self) -> dict[PageState, int]:
        """Pages by state, as kept; O(1)."""
        return {state: self._counts[state] for state in PageState}

    def recount(self) -> dict[PageState, int]:
        """Pages by state, counted afresh; O(num_pages)."""
        counted = np.bincount(self._states, minlength=len(PageState))
        return {state: int(counted[state]) for state in PageState}

    def pages_in(self, state: int) -> IntArray:
        """All pages of a state, ascending; O(num_pages)."""
        return np.flatnonzero(self._states == state).astype(np.int32)

    def is_balanced(self) -> bool:
        """Whether the five counts add up to the total and the free list agrees; O(1)."""
        return sum(self._counts) == self.num_pages and self._num_free == self.num_free

    def _move(self, pages: IntArray, old: int, new: int) -> IntArray:
        """Moves those pages that are in state `old` and returns them; the others are quarantined."""
        right = self._states.take(pages) == old
        if np.count_nonzero(right) != len(pages):
            wrong, pages = pages[~right], pages[right]
            self.num_page_violations += len(wrong)
            self.quarantine(wrong)
        self._states[pages] = new
        self._counts[old] -= len(pages)
        self._counts[new] += len(pages)
        return pages

    def _push(self, pages: IntArray) -> None:
        if self._num_free + len(pages) > self.num_pages:  # Only after a breach: the free list is stale.
            self._rebuild_free()
            return
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _rebuild_free(self) -> None:
        free = self.pages_in(_FREE)[::-1]
        self._free[: len(free)] = free
        self._num_free = len(free)
