"""Pages that admission keeps free for the sequences that run already."""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable

_MOST = 65_536.0
_DECAY = 0.999


class DecodeReserve:
    """Tokens that a running request is expected to need beyond those it has.

    Doubles in a step in which requests had to be retracted, decays otherwise (by half in 700 steps): too low costs a
    replay, too high leaves memory idle. However many are retracted at once, it doubles once: one shortage is one sign.
    least: tokens that pages are granted ahead for, which is what a request takes in any case.
    """

    def __init__(self, first: int = 64, least: int = 1) -> None:
        self.num_tokens = float(max(first, least))
        self._least = float(least)
        self._has_grown = False

    def retracted(self) -> None:
        if not self._has_grown:
            self.num_tokens = min(_MOST, max(8.0, 2 * self.num_tokens))
            self._has_grown = True

    def stepped(self) -> None:
        """A step's result was processed."""
        self._has_grown = False
        self.num_tokens = max(self._least, self.num_tokens * _DECAY)

    def reserved_pages(self, table: SequenceTable, page_size: int, rank: int = 0) -> int:
        """Pages that all requests in slots of a rank are expected to ask for still."""
        # A free slot's max_total_len is 0: nothing is expected of it.
        slots = table.slots_of(rank)
        known = np.maximum(table.planned_len[slots], table.target_len[slots])
        expected = np.minimum(table.max_total_len[slots] - 1, known + int(self.num_tokens))
        pages = (expected + (page_size - 1)) // page_size - table.num_pages[slots]
        return int(np.maximum(pages, 0).sum())

    def reserved_of(self, table: SequenceTable, page_size: int, slot: int) -> int:
        """Of them, those of one slot."""
        known = max(table.planned_len.item(slot), table.target_len.item(slot))
        expected = min(table.max_total_len.item(slot) - 1, known + int(self.num_tokens))
        return max(0, (expected + page_size - 1) // page_size - table.num_pages.item(slot))
