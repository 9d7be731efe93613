"""Finds decode rows that share a prefix, whenever that may have changed."""

from __future__ import annotations

from typing import NamedTuple

from radixmesh.daemons.worker.cuda.attention.backend import HostStep
from radixmesh.kernels.attention.prefix_groups import PrefixGroup, find_shared_prefixes

LEAST_SHARED_ROWS = 8
"""Fewer rows read so little that further launches a layer cost more."""


class Seen(NamedTuple):
    """groups: of rows of the step. is_new: they were looked for anew."""

    groups: list[PrefixGroup]
    is_new: bool


class PrefixWatch:
    """Remembers the groups of the step before: while the requests and their rows are the same, so are they."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._of = ""
        self._groups: list[PrefixGroup] = []

    def forget(self) -> None:
        """Looks anew at the next step."""
        self._groups, self._of = [], ""

    def look(self, step: HostStep) -> Seen:
        if len(step.decode_slots) < LEAST_SHARED_ROWS:
            return Seen([], False)
        of = f"{step.admissions} {step.decode_slots.tobytes().hex()}"
        if of == self._of:
            return Seen(self._groups, False)
        self._of = of
        # Tables are as wide as the longest request may be: only what is in use is gathered.
        num_pages = -(-int(step.decode_kv_lens.max()) // self._page_size)
        tables = step.page_tables[:, :num_pages][step.decode_slots]
        self._groups = find_shared_prefixes(tables, step.decode_kv_lens, self._page_size)
        return Seen(self._groups, True)
