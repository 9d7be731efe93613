"""The page invariant: the counts of all states add up to the total, and every owned page has one owner.

Checked after every step, in a few array operations. A violation never ends the daemon: the pages in doubt are taken out
of use, counted and logged, and serving goes on.
"""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.scheduler.cache.prefix_cache import PrefixCache
from radixmesh.daemons.scheduler.pages.page_pool import PagePool
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable
from radixmesh.daemons.scheduler.sequence import Sequence


def find_violation(pool: PagePool, cache: PrefixCache, table: SequenceTable, rank: int = 0) -> str:
    """Describes a violation in the counts of one rank; empty = none. O(slots)."""
    if not pool.is_balanced():
        return f"pages do not add up to {pool.num_pages}: {pool.recount()}"
    if pool.num_cached != cache.num_cached:
        return f"the pool counts {pool.num_cached} cached pages, the cache {cache.num_cached}"
    owned = int(table.num_owned[table.slots_of(rank)].sum())
    if pool.num_owned != owned:
        return f"the pool counts {pool.num_owned} owned pages, the slots {owned}"
    return ""


def find_deep_violation(pool: PagePool, cache: PrefixCache, table: SequenceTable, rank: int = 0) -> str:
    """As find_violation, from the pages themselves; O(pages)."""
    violation = find_violation(pool, cache, table, rank)
    if violation:
        return violation
    counted = pool.recount()
    if counted != pool.counts():
        return f"states count {counted}, the pool {pool.counts()}"
    owned = _owned_by_slots(pool, table, rank)
    if len(np.unique(owned)) != len(owned):
        return "a page has two owners"
    if not np.array_equal(np.sort(owned), pool.pages_in(PageState.OWNED)):
        return "an owned page has no owner, or an owner a page that is not owned"
    return ""


def quarantine(pool: PagePool, pages: IntArray) -> None:
    """Takes pages out of use until the next epoch, whose snapshot tells what they hold."""
    pool.quarantine(pages)


def quarantine_doubtful(pool: PagePool, table: SequenceTable, rank: int = 0) -> IntArray:
    """Takes pages out of use that are owned by nobody or by two, or free though a slot holds them; returns them. Slots
    count afresh."""
    owned = _owned_by_slots(pool, table, rank)
    pages, times = np.unique(owned, return_counts=True)
    held = _held_by_slots(table, rank)
    doubtful = np.concatenate(
        [
            pages[times > 1],
            np.setdiff1d(pool.pages_in(PageState.OWNED), pages),
            np.unique(held[pool.states_of(held) == PageState.FREE]),
        ]
    ).astype(np.int32)
    quarantine(pool, doubtful)
    for slot in _live_slots(table, rank):
        held = table.pages_of(slot)
        table.num_owned[slot] = np.count_nonzero(pool.states_of(held) == PageState.OWNED)
    return doubtful


def holders_of(pages: IntArray, table: SequenceTable, rank: int = 0) -> list[Sequence]:
    """Requests in slots whose page tables have any of these pages."""
    slots = _live_slots(table, rank)
    found = (table.sequences[slot] for slot in slots if np.isin(table.pages_of(slot), pages).any())
    return [sequence for sequence in found if sequence is not None]


def _live_slots(table: SequenceTable, rank: int) -> list[int]:
    slots: list[int] = (np.flatnonzero(table.live[table.slots_of(rank)]) + rank * table.slots_per_rank).tolist()
    return slots


def _held_by_slots(table: SequenceTable, rank: int) -> IntArray:
    held = [table.pages_of(slot) for slot in _live_slots(table, rank)]
    pages: IntArray = np.concatenate(held) if held else empty_ints()
    return pages


def _owned_by_slots(pool: PagePool, table: SequenceTable, rank: int) -> IntArray:
    pages = _held_by_slots(table, rank)
    owned: IntArray = pages[pool.states_of(pages) == PageState.OWNED]
    return owned
