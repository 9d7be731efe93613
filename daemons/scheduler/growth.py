"""How much memory admission leaves for the requests that run already."""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.scheduler.slot_table import SlotTable

_LEAST, _MOST = 1.0, 65_536.0
_DECAY = 0.999


class GrowthEstimate:
    """Tokens that a running request is expected to need beyond those it has.

    Doubles when a request had to be retracted, decays otherwise: too low costs a replay, too high leaves memory idle.
    """

    def __init__(self, first: int = 64) -> None:
        self.num_tokens = float(first)

    def retracted(self) -> None:
        self.num_tokens = min(_MOST, max(8.0, self.num_tokens * 2))

    def stepped(self) -> None:
        self.num_tokens = max(_LEAST, self.num_tokens * _DECAY)

    def reserved_pages(self, table: SlotTable, page_size: int) -> int:
        """Pages that running requests are expected to ask for still."""
        slots = np.flatnonzero(table.live)
        known = np.maximum(table.planned_len[slots], table.target_len[slots])
        expected = np.minimum(table.max_total_len[slots] - 1, known + int(self.num_tokens))
        pages = -(-expected // page_size) - table.num_pages[slots]
        return int(np.maximum(pages, 0).sum())
