"""Pages for the rows that decode, granted ahead so that most decode plans grant nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.sequence import Sequence


def grant_decodes(
    state: EpochState, draft: PlanDraft, ahead_pages: int, give_way: Callable[[EpochState, Sequence], None]
) -> None:
    """Grants pages to every decoding slot that has none for the most that its next decode may compute.

    Where memory does not suffice, of the lowest priority the youngest request gives way (give_way frees its slot and
    pages), until it does. `ahead_pages` at a time if there are as many, those that are missing otherwise. Pages that
    a decode turned out not to need stay in the slot: plans in flight may use them, and the next grant is smaller.
    """
    short, missing = state.short_of_pages(state.decode_set.slots)
    if not len(short):
        return
    while missing.sum() > state.pages.num_available:
        give_way(state, state.table.last_in_line())
        draft.has_retracted = True
        state.is_decode_set_unsent |= state.decode_set.update()
        short, missing = state.short_of_pages(state.decode_set.slots)
    if not len(short):
        return
    table, page_size = state.table, state.group.page_size
    # The last token of an output is never computed: it needs no page.
    most = (table.max_total_len.take(short) + (page_size - 2)) // page_size - table.num_pages.take(short)
    counts = np.maximum(np.minimum(most, ahead_pages), missing)
    if counts.sum() > state.pages.num_available:
        counts = missing
    draft.add_grants(short, counts, state.pages.grant(short, counts))
