"""Everything that is true of one epoch of the worker group only: a new epoch starts a new one."""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grants, Release
from radixmesh.daemons.scheduler.cache.prefix_cache import PrefixCache
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.pages.page_pool import PagePool
from radixmesh.daemons.scheduler.pages.slot_pages import SlotPages
from radixmesh.daemons.scheduler.planning.decode_set import DecodeSet
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable
from radixmesh.daemons.scheduler.results.in_flight import InFlight, PlannedChunk
from radixmesh.daemons.scheduler.sequence import Sequence


class EpochState:
    """Slots, pages, cache and plans in flight of an epoch.

    cache: empty. snapshot None: the worker's KV is worth nothing (a new worker in tests); its page generations start
    at 0 then.
    """

    def __init__(self, epoch: int, group: GroupInfo, snapshot: CacheSnapshot | None, cache: PrefixCache) -> None:
        self.epoch = epoch
        self.group = group
        self.table = SequenceTable(group.num_slots, group.max_tokens_per_row)
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
        if snapshot is None:
            pool = PagePool(group.num_pages)
        else:
            pool = PagePool(group.num_pages, snapshot.records.generations)
            adopted = cache.adopt(snapshot.records, snapshot.names, group.weights_version)
            pool.adopt(adopted)
            # A transfer of a former scheduler may still write there: out of use until the worker says otherwise.
            pinned = np.setdiff1d(as_ints(snapshot.pinned_pages), adopted)
            pool.quarantine(pinned[(pinned >= 0) & (pinned < group.num_pages)])
            self.num_adopted_tokens = len(adopted) * group.page_size
        self.pages = SlotPages(pool, cache, self.table, group.weights_version)

    @property
    def last_step_id(self) -> int:
        """Id of the last plan sent; 0 = none."""
        return self.next_step_id - 1

    def leave(self, sequence: Sequence) -> None:
        """Takes a request out of its slot: the next plan releases it, and may give slot and pages to another."""
        self.releases.append(Release(slot=sequence.slot, generation=sequence.generation))
        self.pages.leave(sequence)
        self.decode_set.freed()

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

    def __init__(self, token_budget: int) -> None:
        self.admits: list[Admit] = []
        self.chunks: list[Chunk] = []
        self.planned_chunks: list[PlannedChunk] = []
        self.finishing: list[int] = []
        """Slots whose prefill this plan finishes, in the order of their chunks."""
        self.token_budget = token_budget
        self.has_retracted = False
        self.num_chunk_tokens = 0
        self.num_admit_bytes = 0
        """Bytes that the admitted requests take in the plan's message."""
        self.num_logprob_bytes = 0
        """Bytes that the prompt logprobs of the chunks take in the result's message."""
        self._grants: list[Grants] = []

    def add_grants(self, slots: IntArray, counts: IntArray, pages: IntArray) -> None:
        """Pages for slots that have no grant in this plan yet; see Grants."""
        self._grants.append(Grants(slots, counts, pages))

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

    def add_chunk(self, slot: int, generation: int, length: int, *, is_last: bool) -> None:
        self.chunks.append(Chunk(slot=slot, length=length))
        self.planned_chunks.append(PlannedChunk(slot, generation, length))
        self.token_budget -= length
        self.num_chunk_tokens += length
        if is_last:
            self.finishing.append(slot)

    def finishing_slots(self) -> IntArray:
        return as_ints(self.finishing)
