"""State of one epoch of the worker group; a new epoch starts with a new one."""

from __future__ import annotations

from collections.abc import Sequence as PySequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grants, PageMove, Release
from radixmesh.daemons.scheduler.cache.prefix_cache import Probe, make_prefix_cache
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.pages.page_pool import PagePool
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.pages.slot_pages import SlotPages
from radixmesh.daemons.scheduler.planning.admission.rank_placement import RecentPrefixes
from radixmesh.daemons.scheduler.planning.decode_set import DecodeSet
from radixmesh.daemons.scheduler.planning.experts.dispatch import DispatchChoice
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable
from radixmesh.daemons.scheduler.results.in_flight import InFlight, PlannedChunk
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.tiers.host_cache import HostCache, TierSettings
from radixmesh.daemons.scheduler.tiers.stored_prefixes import StoredPrefixes


class EpochState:
    """Slots, pages, caches and plans in flight of an epoch.

    Slots of all data-parallel ranks are columns of one table; pages and caches are each rank's own, in `ranks`.
    cache, eviction: names of what each gets. snapshots: of each; None: the workers' KV is worth nothing (new ones in
    tests), and page generations start at 0.
    """

    def __init__(
        self,
        epoch: int,
        group: GroupInfo,
        snapshots: PySequence[CacheSnapshot] | None,
        cache: str = "radix",
        eviction: str = "lru",
        dispatch: DispatchChoice | None = None,
        tiers: TierSettings | None = None,
        stored: PySequence[StoredPrefixes] = (),
    ) -> None:
        """tiers: how a host tier is used, where the workers have one; None: not at all. stored: what the store below it
        probably has, of each data-parallel rank or of all; empty: there is none, or it is not known."""
        self.dispatch = dispatch or DispatchChoice()
        self.epoch = epoch
        self.group = group
        self.table = SequenceTable(group.num_slots * group.dp_size, group.max_tokens_per_row, group.dp_size)
        self.in_flight = InFlight()
        self.decode_set = DecodeSet(self.table)
        self.releases: list[Release] = []
        """Slots freed since the last plan."""
        self.prefilling: list[Sequence] = []
        """Requests in slots whose prompt is not planned to its end, oldest admission first."""
        self.retracting: dict[tuple[int, int], Sequence] = {}
        """By the (slot, generation) that their outstanding rows name."""
        self.next_step_id = 1
        self.is_decode_set_unsent = False
        self.num_adopted_tokens = 0
        ranks: list[SlotPages] = []
        for rank in range(group.dp_size):
            prefixes = make_prefix_cache(cache, page_size=group.page_size, num_pages=group.num_pages, eviction=eviction)
            generations = snapshots[rank].records.generations if snapshots is not None else None
            host: HostCache | None = None
            if tiers is not None and group.num_host_pages:
                below = stored[rank % len(stored)] if stored else None
                host = HostCache(group.num_host_pages, group.page_size, tiers, tiers.eviction or eviction, rank, below)
            pool = PagePool(group.num_pages, generations)
            pages = SlotPages(pool, prefixes, self.table, group.weights_version, host)
            if snapshots is not None:
                self.num_adopted_tokens += pages.adopt(snapshots[rank]) * group.page_size
            ranks.append(pages)
        self.ranks = tuple(ranks)
        """Pages of each data-parallel rank."""
        self.hosts = tuple(pages.host for pages in ranks if pages.host is not None)
        """Host tiers of all ranks; empty = there is none."""
        self.stored = tuple(stored) if self.hosts else ()
        self.recent = RecentPrefixes(len(ranks))

    @property
    def pages(self) -> SlotPages:
        """Pages of the only rank, or of the first."""
        return self.ranks[0]

    def pages_of(self, slot: int) -> SlotPages:
        """Pages of the rank that has the slot."""
        return self.ranks[slot // self.table.slots_per_rank]

    def page_counts(self) -> dict[PageState, int]:
        """Pages of all ranks by state."""
        if len(self.ranks) == 1:
            return self.pages.pool.counts()
        counts = [pages.pool.counts() for pages in self.ranks]
        return {state: sum(each[state] for each in counts) for state in PageState}

    @property
    def num_pages(self) -> int:
        """Of all ranks."""
        return self.group.num_pages * len(self.ranks)

    @property
    def num_available(self) -> int:
        """Pages of all ranks that could be granted now."""
        return sum(pages.num_available for pages in self.ranks)

    def take_saves(self) -> tuple[PageMove, ...]:
        """Saves to the host for the plan that is being made."""
        return tuple(move for host in self.hosts for move in host.take_saves())

    @property
    def num_evicted(self) -> int:
        """Pages of all ranks that were evicted in this epoch."""
        return sum(pages.num_evicted for pages in self.ranks)

    def probe(self, sequence: Sequence) -> Probe:
        """The longest cached prefix of a waiting sequence, on whichever rank."""
        if len(self.ranks) == 1:
            return self.pages.probe(sequence)
        ranks = self.recent.ranks_of(sequence) or (0,)
        return max((self.ranks[rank].probe(sequence) for rank in ranks), key=lambda probe: probe.num_pages)

    @property
    def last_step_id(self) -> int:
        """Id of the last plan sent; 0 = none."""
        return self.next_step_id - 1

    def leave(self, sequence: Sequence) -> None:
        """Takes a request out of its slot: the next plan releases it, and may give slot and pages to another."""
        self.releases.append(Release(slot=sequence.slot, generation=sequence.generation))
        self.pages_of(sequence.slot).leave(sequence)
        self.decode_set.freed()

    def end(self) -> list[Sequence]:
        """The epoch is over: its requests, which wait again with all their tokens in their outputs."""
        self.table.settle_all()
        sequences = [*self.table.running(), *self.retracting.values()]
        for sequence in sequences:
            sequence.slot = -1
            sequence.lifecycle = Lifecycle.WAITING
        return sequences

    def settle(self, sequence: Sequence) -> None:
        """Brings all tokens of a live request into its output."""
        if sequence.slot >= 0:
            self.table.settle(sequence.slot)

    def short_of_pages(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Of these slots, those without pages for all that their next decode may compute, and how many each lacks."""
        table, page_size = self.table, self.group.page_size
        if table.max_tokens_per_row == 1:
            short = slots[table.planned_len.take(slots) >= table.num_pages.take(slots) * page_size]
            return short, np.ones(len(short), np.int32)
        most = np.minimum(table.planned_len.take(slots) + table.max_tokens_per_row, table.max_total_len.take(slots) - 1)
        missing = (most + (page_size - 1)) // page_size - table.num_pages.take(slots)
        is_short = missing > 0
        return slots[is_short], missing[is_short]


class PlanDraft:
    """A plan while it is made."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.admits: list[Admit] = []
        self.chunks: list[Chunk] = []
        self.planned_chunks: list[PlannedChunk] = []
        self.finishing: list[int] = []
        """Slots whose prefill this plan finishes, in the order of their chunks."""
        self.token_budgets = [0] * num_ranks
        """Tokens that each rank may still be given."""
        self.rank_tokens = [0] * num_ranks
        """Tokens of the chunks of each rank."""
        self.has_retracted = False
        self.num_admit_bytes = 0
        """Bytes that the admitted requests take in the plan's message."""
        self.num_logprob_bytes = 0
        """Bytes that the prompt logprobs of the chunks take in the result's message."""
        self._grants: list[Grants] = []
        self._chunk_of: dict[int, int] = {}

    def add_grants(self, slots: IntArray, counts: IntArray, pages: IntArray) -> None:
        """Pages for slots that have no grant in this plan yet; see Grants."""
        self._grants.append(Grants(slots, counts, pages))

    def extend_grants(self, slots: IntArray, counts: IntArray, pages: IntArray) -> None:
        """More pages for one slot, which has a chunk in this plan, and may have a grant for it."""
        for index, part in enumerate(self._grants):
            if len(part.slots) == 1 and part.slots[0] == slots[0]:
                self._grants[index] = Grants(part.slots, part.counts + counts, np.concatenate([part.pages, pages]))
                return
        self.add_grants(slots, counts, pages)

    def grants(self) -> Grants | tuple[()]:
        """All of them."""
        parts = self._grants
        if len(parts) < 2:
            return parts[0] if parts else ()
        return Grants(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.pages for part in parts]),
        )

    def granted_slots(self) -> set[int]:
        return {slot for part in self._grants for slot in part.slots.tolist()}

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(self.rank_tokens)

    def add_chunk(self, slot: int, generation: int, length: int, *, is_last: bool, rank: int = 0) -> None:
        """Of a slot that has one already: both are one chunk."""
        is_first = slot not in self._chunk_of
        index = self._chunk_of.setdefault(slot, len(self.chunks))
        if is_first:
            self.chunks.append(Chunk(slot=slot, length=length))
            self.planned_chunks.append(PlannedChunk(slot, generation, length))
        else:
            whole = self.chunks[index].length + length
            self.chunks[index] = Chunk(slot=slot, length=whole)
            self.planned_chunks[index] = PlannedChunk(slot, generation, whole)
        self.token_budgets[rank] -= length
        self.rank_tokens[rank] += length
        if is_last:
            self.finishing.append(slot)
            if not is_first:
                self.finishing.sort(key=self._chunk_of.__getitem__)

    def has_chunk(self, slot: int) -> bool:
        return slot in self._chunk_of

    def order_by_rank(self, slots_per_rank: int) -> None:
        """Chunks of one rank follow each other, as in its part of the plan and of the result."""
        self.chunks.sort(key=lambda chunk: chunk.slot // slots_per_rank)
        self.planned_chunks.sort(key=lambda chunk: chunk.slot // slots_per_rank)
        self.finishing.sort(key=lambda slot: slot // slots_per_rank)

    def finishing_slots(self) -> IntArray:
        return as_ints(self.finishing)
