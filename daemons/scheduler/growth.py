"""How much memory admission leaves for the requests that run already."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.slot_table import SlotTable

_MOST = 65_536.0
_DECAY = 0.999


class GrowthEstimate:
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

    def reserved_pages(self, table: SlotTable, page_size: int, slots: IntArray | None = None) -> npt.NDArray[np.int64]:
        """Pages that requests in these slots (None: all that run) are expected to ask for still, int64 [slots]."""
        where = np.flatnonzero(table.live) if slots is None else slots
        known = np.maximum(table.planned_len[where], table.target_len[where])
        expected = np.minimum(table.max_total_len[where] - 1, known + int(self.num_tokens))
        pages = -(-expected // page_size) - table.num_pages[where]
        reserved: npt.NDArray[np.int64] = np.maximum(pages, 0).astype(np.int64)
        return reserved
