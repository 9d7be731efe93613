"""The slots that decode, as the worker was last told: plans name them only when they change."""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable
from radixmesh.daemons.scheduler.results.in_flight import Rows


class DecodeSet:
    """Members in the order of the result rows. Joins and leaves collect until commit()."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._joining: list[int] = []
        self._rejoining: list[int] = []
        self._is_dirty = False
        self.rows: Rows = Rows.none()
        self.num_by_rank: list[int] = [0] * table.num_ranks
        """Members of each rank."""

    @property
    def slots(self) -> IntArray:
        return self.rows.slots

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, slot: int) -> None:
        """The slot decodes from the next plan on: its prefill finishes in the plan being made."""
        self._joining.append(slot)

    def rejoin(self, slot: int) -> None:
        """A decode of the slot yielded no token: if it has left, since all its tokens were in flight, it comes back."""
        self._rejoining.append(slot)

    def freed(self) -> None:
        """Some slot was freed, a member perhaps."""
        self._is_dirty = True

    def update(self) -> bool:
        """Takes members in that joined, and out those that left their slot or need no further token.

        Returns whether the set changed. A slot whose least length leaves room for no token beyond the one that its
        last plan samples has all its tokens in flight.
        """
        table, rows = self._table, self.rows
        slots = rows.slots
        stays = table.least_len.take(slots) + 2 <= table.max_total_len.take(slots)
        if self._is_dirty:
            stays &= table.live.take(slots) == rows.generations
            self._is_dirty = False
        if self._rejoining:
            # Those that have not left. A slot that joins has never been one: a finished prefill is no member yet.
            members = set(slots[stays].tolist())
            self._joining += [s for s in self._rejoining if s not in members]
            self._joining = list(dict.fromkeys(self._joining))
            self._rejoining.clear()
        joining = [s for s in self._joining if table.live.item(s) and _has_room(table, s)]
        self._joining.clear()
        if not joining and np.count_nonzero(stays) == len(stays):
            return False
        slots = np.concatenate([slots[stays], as_ints(joining)])
        if table.num_ranks > 1:
            # The rows of a rank follow each other, as in its part of the result.
            slots = slots[np.argsort(slots // table.slots_per_rank, kind="stable")]
            self.num_by_rank = np.bincount(slots // table.slots_per_rank, minlength=table.num_ranks).tolist()
        else:
            self.num_by_rank = [len(slots)]
        self.rows = Rows.of(table, slots)
        return True


def _has_room(table: SequenceTable, slot: int) -> bool:
    return table.least_len.item(slot) + 2 <= table.max_total_len.item(slot)
