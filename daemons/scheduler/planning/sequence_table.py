"""The scheduler's picture of the worker's slots: one column per fact, so that a step is a few array operations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.prefix_cache import Match
from radixmesh.daemons.scheduler.sequence import Sequence

_FIRST_PAGE_COLUMNS = 64
_FRESH_COLUMNS = 256


class SequenceTable:
    """Columns int32 [num_slots], indexed by slot; meaningful where `live` is not 0.

    For every slot: computed_len <= least_len <= planned_len; computed_len < total_len <= max_total_len once a result is
    processed. While plans are in flight, the length that they leave is known within bounds:

        computed_len    at least (least_len)         at most (planned_len)
        known           + nothing a decode           + max_tokens_per_row a decode, up to max_total_len - 1

    With one token a row both bounds are the length itself, and one column.

    num_slots: of all data-parallel ranks together; rank r has the slots from r x slots_per_rank on.
    """

    def __init__(self, num_slots: int, max_tokens_per_row: int = 1, num_ranks: int = 1) -> None:
        def column() -> IntArray:
            return np.zeros(num_slots, np.int32)

        self.num_slots = num_slots
        self.num_ranks = num_ranks
        self.slots_per_rank = num_slots // num_ranks
        self.live = column()
        """Generation of the request in the slot; 0 = free."""
        self.owner = column()
        self.handle = column()
        self.attempt = column()
        self.priority = column()
        self.arrival: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.prompt_len = column()
        self.target_len = column()
        """Tokens known at admission: the prefill is over once they are computed."""
        self.total_len = column()
        """Tokens known by processed results."""
        self.computed_len = column()
        """Tokens whose KV is there, by processed results."""
        self.planned_len = column()
        """At most: tokens whose KV is there once every plan sent has run. Pages are granted for them."""
        self.least_len = self.planned_len if max_tokens_per_row == 1 else column()
        """At least: likewise."""
        self.num_decodes_ahead = column()
        """Decodes of the slot in the plans in flight; kept where a row may yield other than one token."""
        self.max_tokens_per_row = max_tokens_per_row
        self.max_total_len = column()
        self.num_pages = column()
        self.num_owned = column()
        """Of the slot's pages, those that are not the prefix cache's."""
        self.pages: npt.NDArray[np.int32] = np.zeros((num_slots, _FIRST_PAGE_COLUMNS), np.int32)
        """Page table: row s holds num_pages[s] pages."""
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.locks: list[Match | None] = [None] * num_slots
        """The match that each slot has locked in the prefix cache."""
        self.ranks_across_tenants = False
        """True if a priority counts against those of other tenants, see last_in_line()."""
        self._fresh: npt.NDArray[np.int32] = np.zeros((num_slots, _FRESH_COLUMNS), np.int32)
        """Output tokens that are not in their requests yet: row s holds the last num_fresh[s] of its request."""
        self._num_fresh = column()
        self._generation = column()
        starts = range(0, num_slots, self.slots_per_rank)
        self._columns = [slice(start, start + self.slots_per_rank) for start in starts]
        ends = range(self.slots_per_rank, num_slots + 1, self.slots_per_rank)
        self._free = [list(range(end - 1, end - self.slots_per_rank - 1, -1)) for end in ends]
        self.num_running = 0
        self.num_guided = 0
        """Of those that run, requests that follow a grammar."""

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_running

    def running_on(self, rank: int) -> int:
        """Requests in slots of one rank."""
        return self.slots_per_rank - len(self._free[rank])

    def running_by_rank(self) -> IntArray:
        """Requests in slots of each rank, int32 [num_ranks]."""
        return np.array([self.slots_per_rank - len(free) for free in self._free], np.int32)

    def rank_of(self, slot: int) -> int:
        return slot // self.slots_per_rank

    def slots_of(self, rank: int) -> slice:
        """The columns of one rank."""
        return self._columns[rank]

    def running(self) -> list[Sequence]:
        """Requests in slots, oldest first."""
        return sorted((r for r in self.sequences if r is not None), key=lambda sequence: sequence.arrival)

    def last_in_line(self, rank: int = 0) -> Sequence:
        """The request of a rank that gives way first where its pages run out. Something runs there.

        Of the (router, tenant) whose request was accepted last, the youngest of its lowest priority. With
        ranks_across_tenants (`--priority-across-tenants`) the youngest of the lowest priority of all.
        """
        slots = np.flatnonzero(self.live[self.slots_of(rank)]) + rank * self.slots_per_rank
        if not self.ranks_across_tenants:
            last = self.sequences[int(slots[self.arrival[slots].argmax()])]
            assert last is not None
            whose = (last.submission.router, last.submission.tenant)
            slots = np.array([slot for slot in slots.tolist() if self._whose(slot) == whose])
        slots = slots[self.priority[slots] == self.priority[slots].min()]
        sequence = self.sequences[int(slots[self.arrival[slots].argmax()])]
        assert sequence is not None
        return sequence

    def _whose(self, slot: int) -> tuple[str, str]:
        sequence = self.sequences[slot]
        assert sequence is not None
        return (sequence.submission.router, sequence.submission.tenant)

    def take(self, sequence: Sequence, cached_len: int, rank: int = 0) -> int:
        """Puts a request into a free slot of a rank under a new generation; returns the slot. No pages yet."""
        slot = self._free[rank].pop()
        self.num_running += 1
        if sequence.submission.grammar is not None:
            self.num_guided += 1
        generation = self._generation.item(slot) + 1
        sequence.slot, sequence.generation = slot, generation
        self.live[slot] = self._generation[slot] = generation
        self.owner[slot], self.handle[slot] = sequence.owner, sequence.handle
        self.attempt[slot] = sequence.submission.attempt
        self.priority[slot], self.arrival[slot] = sequence.submission.priority, sequence.arrival
        self.prompt_len[slot] = sequence.prompt_len
        self.target_len[slot] = self.total_len[slot] = sequence.total_len
        self.computed_len[slot] = self.planned_len[slot] = self.least_len[slot] = cached_len
        self.num_decodes_ahead[slot] = 0
        self.max_total_len[slot] = sequence.max_total_len
        self.num_pages[slot] = self.num_owned[slot] = 0
        self.sequences[slot] = sequence
        return slot

    def plan_chunk(self, slot: int, end: int) -> None:
        """A plan was made that computes the slot's tokens up to `end`."""
        self.planned_len[slot] = self.least_len[slot] = end

    def plan_decodes(self, slots: IntArray) -> None:
        """A plan was made in which these slots decode."""
        if self.max_tokens_per_row == 1:
            self.planned_len[slots] += 1
            return
        self.num_decodes_ahead[slots] += 1
        self.bound(slots)

    def bound(self, slots: IntArray) -> None:
        """Bounds of decoding slots from their known lengths and the decodes in flight."""
        # The chunk that ends the prefill may be in flight itself.
        least = np.maximum(self.computed_len.take(slots), self.target_len.take(slots))
        most = least + self.max_tokens_per_row * self.num_decodes_ahead.take(slots)
        self.least_len[slots] = least
        # The last token of an output is never computed.
        self.planned_len[slots] = np.minimum(most, self.max_total_len.take(slots) - 1)

    def free(self, slot: int) -> None:
        """Forgets the slot's request; results that name its generation are stale from now on."""
        sequence = self.sequences[slot]
        assert sequence is not None, slot
        self.settle(slot)
        sequence.slot = -1
        self.live[slot] = self.max_total_len[slot] = 0
        self.num_pages[slot] = self.num_owned[slot] = 0
        self.sequences[slot] = None
        self.locks[slot] = None
        self._free[slot // self.slots_per_rank].append(slot)
        self.num_running -= 1
        if sequence.submission.grammar is not None:
            self.num_guided -= 1

    def append_pages(self, slots: IntArray, counts: IntArray, pages: IntArray) -> None:
        """Appends counts[i] of `pages`, in order, to the page table of slots[i]; slots are distinct."""
        if len(slots) == 1:
            slot = slots.item()
            start = self.num_pages.item(slot)
            self._reserve_columns(start + len(pages))
            self.pages[slot, start : start + len(pages)] = pages
            self.num_pages[slot] = start + len(pages)
            return
        starts = self.num_pages.take(slots)
        ends = starts + counts
        self._reserve_columns(int(ends.max(initial=0)))
        columns = np.arange(len(pages)) + (starts + counts - counts.cumsum()).repeat(counts)
        self.pages[slots.repeat(counts), columns] = pages
        self.num_pages[slots] = ends

    def append_tokens(self, slots: IntArray, ids: IntArray) -> None:
        """One more output token for each of these slots, which are distinct."""
        num = self._num_fresh.take(slots)
        self._fresh[slots, num] = ids
        num += 1
        self._num_fresh[slots] = num
        if num.max(initial=0) == _FRESH_COLUMNS:
            for slot in slots[num == _FRESH_COLUMNS].tolist():
                self.settle(slot)

    def settle(self, slot: int) -> None:
        """Brings all output tokens of a slot into its request."""
        num, sequence = self._num_fresh.item(slot), self.sequences[slot]
        if num and sequence is not None:
            sequence.output.frombytes(self._fresh[slot, :num].tobytes())
            self._num_fresh[slot] = 0

    def settle_all(self) -> None:
        for slot in np.flatnonzero(self._num_fresh).tolist():
            self.settle(slot)

    def pages_of(self, slot: int) -> IntArray:
        """View of a slot's pages, valid until the next append_pages."""
        return self.pages[slot, : self.num_pages[slot]]

    def _reserve_columns(self, num: int) -> None:
        width = self.pages.shape[1]
        if num > width:
            wider = np.zeros((self.num_slots, max(num, 2 * width)), np.int32)
            wider[:, :width] = self.pages
            self.pages = wider
