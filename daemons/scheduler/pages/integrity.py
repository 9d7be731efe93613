"""The page invariant: free + cached + owned + leased + quarantined = total, and every owned page has one owner.

Checked after every step, in a few array operations. A breach never ends the daemon: the pages in doubt are taken out of
use, counted and logged, and serving goes on.
"""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.scheduler.cache.prefix_cache import PrefixCache
from radixmesh.daemons.scheduler.pages.page_pool import PagePool, PageState
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable
from radixmesh.daemons.scheduler.sequence import Sequence


def find_violation(pool: PagePool, cache: PrefixCache, table: SequenceTable) -> str:
    """What is wrong with the counts, in words; empty = nothing. O(slots)."""
    if not pool.is_balanced():
        return f"pages do not add up to {pool.num_pages}: {pool.recount()}"
    if pool.num_cached != cache.num_cached:
        return f"the pool counts {pool.num_cached} cached pages, the cache {cache.num_cached}"
    owned = int(table.num_owned.sum())
    if pool.num_owned != owned:
        return f"the pool counts {pool.num_owned} owned pages, the slots {owned}"
    return ""


def find_deep_violation(pool: PagePool, cache: PrefixCache, table: SequenceTable) -> str:
    """As find_breach, from the pages themselves; O(pages)."""
    violation = find_violation(pool, cache, table)
    if violation:
        return violation
    counted = pool.recount()
    counts = (pool.num_free, pool.num_cached, pool.num_owned, pool.num_leased, pool.num_quarantined)
    if tuple(counted[state] for state in PageState) != counts:
        return f"states count {counted}, the pool {counts}"
    owned = _owned_by_slots(pool, table)
    if len(np.unique(owned)) != len(owned):
        return "a page has two owners"
    if not np.array_equal(np.sort(owned), pool.pages_in(PageState.OWNED)):
        return "an owned page has no owner, or an owner a page that is not owned"
    return ""


def quarantine_doubtful(pool: PagePool, table: SequenceTable) -> IntArray:
    """Takes pages out of use that are owned by nobody or by two, or free though a slot holds them; returns them. Slots
    count afresh."""
    owned = _owned_by_slots(pool, table)
    pages, times = np.unique(owned, return_counts=True)
    held = _held_by_slots(table)
    doubtful = np.concatenate(
        [
            pages[times > 1],
            np.setdiff1d(pool.pages_in(PageState.OWNED), pages),
            np.unique(held[pool.states_of(held) == PageState.FREE]),
        ]
    ).astype(np.int32)
    pool.quarantine(doubtful)
    for slot in np.flatnonzero(table.live).tolist():
        held = table.pages_of(slot)
        table.num_owned[slot] = np.count_nonzero(pool.states_of(held) == PageState.OWNED)
    return doubtful


def holders_of(pages: IntArray, table: SequenceTable) -> list[Sequence]:
    """Requests in slots whose page tables have any of these pages."""
    slots = np.flatnonzero(table.live).tolist()
    found = (table.sequences[slot] for slot in slots if np.isin(table.pages_of(slot), pages).any())
    return [sequence for sequence in found if sequence is not None]


def _held_by_slots(table: SequenceTable) -> IntArray:
    held = [table.pages_of(slot) for slot in np.flatnonzero(table.live).tolist()]
    pages: IntArray = np.concatenate(held) if held else empty_ints()
    return pages


def _owned_by_slots(pool: PagePool, table: SequenceTable) -> IntArray:
    pages = _held_by_slots(table)
    owned: IntArray = pages[pool.states_of(pages) == PageState.OWNED]
    return owned
