"""KV pages with state and generation: counts, the free list, and the transitions of page_states.py.

The counts of all states add up to the number of pages, always. A page that is not in the state that a transition starts
from is quarantined: the bookkeeping that led there is wrong, and using it could mix two requests' KV.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.pages.page_states import TRANSITIONS, PageState, Transition

# Looking up a member of an enum costs more than what is done with it here, and so does storing one in an array.
_FREE, _CACHED, _OWNED, _LEASED, _QUARANTINED, _LOADING = (int(state) for state in PageState)
_TAKE, _GIVE_BACK = TRANSITIONS["take"], TRANSITIONS["give_back"]
_CACHE, _EVICT = TRANSITIONS["cache"], TRANSITIONS["evict"]


class PagePool:
    """Pages [0, num_pages).

    `generations` int32 [num_pages] mirrors the worker's page records: every grant adds one.
    """

    def __init__(self, num_pages: int, generations: IntArray | None = None) -> None:
        self.num_pages = num_pages
        self.generations = np.zeros(num_pages, np.int32) if generations is None else np.array(generations, np.int32)
        assert len(self.generations) == num_pages, (len(self.generations), num_pages)
        self.num_misplaced = 0
        """Pages that were to move from a state in which they were not, since the last check of the invariant."""
        self._states: npt.NDArray[np.uint8] = np.zeros(num_pages, np.uint8)
        self._counts = [num_pages] + [0] * (len(PageState) - 1)
        # A stack: pages are taken from its end, so that a page just freed is used again first. Those freed together are
        # given out in ascending order: copies to and from the host move pages that follow each other as one.
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
    def num_loading(self) -> int:
        return self._counts[_LOADING]

    @property
    def num_quarantined(self) -> int:
        return self._counts[_QUARANTINED]

    def states_of(self, pages: IntArray) -> npt.NDArray[np.uint8]:
        """State of each page, a copy."""
        return self._states.take(pages)

    def take(self, num: int) -> IntArray:
        """`num` free pages, int32 [num], owned from now on; their generations go up by one. There must be as many."""
        assert num <= self._num_free, (num, self._num_free)
        pages = self._pop(num, _TAKE)
        self.generations[pages] += 1
        if len(pages) < num:  # Some were quarantined just now.
            return np.concatenate([pages, self.take(num - len(pages))])
        return pages

    def give_back(self, pages: IntArray) -> None:
        """Owned pages become free."""
        self._push(self._move(pages, _GIVE_BACK))

    def cache(self, pages: IntArray) -> None:
        """Owned pages become the prefix cache's."""
        self._move(pages, _CACHE)

    def evict(self, pages: IntArray) -> None:
        """Cached pages become free."""
        self._push(self._move(pages, _EVICT))

    def adopt(self, pages: IntArray) -> None:
        """Free pages become the prefix cache's: KV that a former scheduler left in the worker."""
        self._move(pages, TRANSITIONS["adopt"])
        self._rebuild_free()

    def lease(self, pages: IntArray) -> None:
        """A transfer reads or writes owned or cached pages; those must have left slot and prefix cache."""
        self._move(pages, TRANSITIONS["lease"])

    def lease_pinned(self, pages: IntArray) -> None:
        """Free pages become leased: a transfer of a former scheduler still uses them."""
        self._move(pages, TRANSITIONS["lease_pinned"])
        self._rebuild_free()

    def end_lease(self, pages: IntArray) -> None:
        """Leased pages become free: their transfer is terminal."""
        self._push(self._move(pages, TRANSITIONS["end_lease"]))

    def load(self, num: int) -> IntArray:
        """`num` free pages, int32 [num], that are being filled; their generations go up by one."""
        assert num <= self._num_free, (num, self._num_free)
        pages = self._pop(num, TRANSITIONS["load"])
        self.generations[pages] += 1
        return pages

    def end_load(self, pages: IntArray) -> None:
        """Pages that were filled become the prefix cache's."""
        self._move(pages, TRANSITIONS["end_load"])

    def drop_load(self, pages: IntArray, *, was_granted: bool = True) -> None:
        """Pages that were to be filled become free. was_granted: the worker has counted the grant too."""
        if not was_granted:
            self.generations[pages] -= 1
        self._push(self._move(pages, TRANSITIONS["drop_load"]))

    def quarantine(self, pages: IntArray) -> None:
        """Takes pages out of use, whatever they are. A quarantined one stays so."""
        self._place(pages, _QUARANTINED)
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
        """True if the counts add up to the total and the free list agrees; O(1)."""
        return sum(self._counts) == self.num_pages and self._num_free == self.num_free

    def _pop(self, num: int, transition: Transition) -> IntArray:
        """Takes pages off the free list and moves them; fewer than `num` if some turned out not to be free."""
        pages = self._free[self._num_free - num : self._num_free][::-1].copy()
        self._num_free -= num
        return self._move(pages, transition)

    def _move(self, pages: IntArray, transition: Transition) -> IntArray:
        """Moves those pages that are in a source state and returns them; the others are quarantined."""
        states = self._states.take(pages)
        source = transition.sources[0]
        is_right = states == source
        num_right = np.count_nonzero(is_right)
        if num_right == len(pages):  # Nearly always: one source, and right.
            self._states[pages] = transition.target
            self._counts[source] -= len(pages)
            self._counts[transition.target] += len(pages)
            return pages
        if len(transition.sources) > 1:
            is_right = np.isin(states, transition.sources)
        wrong, pages = pages[~is_right], pages[is_right]
        # In this order: what becomes free goes onto the free list later, and the list must not have it twice.
        if len(wrong):
            self.num_misplaced += len(wrong)
            self.quarantine(wrong)
        self._place(pages, transition.target)
        if len(wrong) and _FREE in transition.sources:
            self._rebuild_free()
        return pages

    def _place(self, pages: IntArray, target: int) -> None:
        """Gives distinct pages a state, whatever theirs is, and counts afresh what changes."""
        pages = np.unique(pages)
        lost = np.bincount(self._states.take(pages), minlength=len(PageState)).tolist()
        self._states[pages] = target
        self._counts = [count - minus for count, minus in zip(self._counts, lost, strict=True)]
        self._counts[target] += len(pages)

    def _push(self, pages: IntArray) -> None:
        if self._num_free + len(pages) > self.num_pages:  # Only after a violation: the free list is stale.
            self._rebuild_free()
            return
        self._free[self._num_free : self._num_free + len(pages)] = np.sort(pages)[::-1]
        self._num_free += len(pages)

    def _rebuild_free(self) -> None:
        free = self.pages_in(_FREE)[::-1]
        self._free[: len(free)] = free
        self._num_free = len(free)
