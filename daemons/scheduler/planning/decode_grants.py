"""Pages for the rows that decode, granted ahead so that most decode plans grant nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.sequence import Sequence


def grant_decodes(
    state: EpochState, draft: PlanDraft, ahead_pages: int, give_way: Callable[[EpochState, Sequence], None]
) -> None:
    """Grants pages to every decoding slot that has none for the most that its next decode may compute.

    Where memory does not suffice, give_way makes room on that rank, at the cost of the rank's `last_in_line` if it
    must, until it does. `ahead_pages` at a time if there are as many, those that are missing otherwise. Pages that
    a decode turned out not to need stay in the slot: plans in flight may use them, and the next grant is smaller.
    """
    short, missing = state.short_of_pages(state.decode_set.slots)
    if not len(short):
        return
    if state.table.num_ranks == 1:
        _grant(state, draft, 0, short, missing, ahead_pages, give_way)
        return
    ranks = short // state.table.slots_per_rank
    for rank in np.unique(ranks).tolist():
        _grant(state, draft, rank, short[ranks == rank], missing[ranks == rank], ahead_pages, give_way)


def _grant(
    state: EpochState,
    draft: PlanDraft,
    rank: int,
    short: IntArray,
    missing: IntArray,
    ahead_pages: int,
    give_way: Callable[[EpochState, Sequence], None],
) -> None:
    """The same for the slots of one rank."""
    pages = state.ranks[rank]
    while missing.sum() > pages.num_available:
        give_way(state, state.table.last_in_line(rank))
        draft.has_retracted = True
        state.is_decode_set_unsent |= state.decode_set.update()
        short, missing = _short_on(state, rank)
    if not len(short):
        return
    table, page_size = state.table, state.group.page_size
    # The last token of an output is never computed: it needs no page.
    most = (table.max_total_len.take(short) + (page_size - 2)) // page_size - table.num_pages.take(short)
    counts = np.maximum(np.minimum(most, ahead_pages), missing)
    if counts.sum() > pages.num_available:
        counts = missing
    draft.add_grants(short, counts, pages.grant(short, counts))


def _short_on(state: EpochState, rank: int) -> tuple[IntArray, IntArray]:
    slots = state.decode_set.slots
    if state.table.num_ranks > 1:
        start = sum(state.decode_set.num_by_rank[:rank])
        slots = slots[start : start + state.decode_set.num_by_rank[rank]]
    return state.short_of_pages(slots)
