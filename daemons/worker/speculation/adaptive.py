"""Length of drafts, step by step: none where they do not pay, from what drafts yielded and what steps cost.

    yield     tokens of a row in a step that drafts, a mean by slot              a row that begins has the usual one
    cost      time of a step that drafts over one that does not, by number of rows

Steps draft while the mean yield of their rows is above the cost. Then one in 64 does not, so that the cost stays known
as contexts grow. Otherwise steps that try drafts are so far apart that together they cost a hundredth of the time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray

_MARGIN = 1.02
"""Yield over cost from which on drafts pay: below it a step that drafts gains less than a mistaken one loses."""
_TRIAL_SHARE = 0.01
"""Of the time, what steps may cost that try drafts while these do not pay."""
_LEAST_APART = 8
_PLAIN_EVERY = 64
_ROW_WEIGHT = 0.3
_USUAL_WEIGHT = 0.05
_FIRST_ACCEPTANCE = 0.3


@dataclass(slots=True)
class _Costs:
    """Nanoseconds of a step, means of late; 0: not measured. waiting: a trial whose result is not there yet."""

    plain_ns: float = 0.0
    drafting_ns: float = 0.0
    num_plain: int = 0
    num_drafting: int = 0
    since_plain: int = 0
    since_trial: int = 0
    is_waiting: bool = False

    def note(self, duration_ns: int, *, has_drafts: bool) -> None:
        """The first ones count as much as later ones together: they may have waited for a compiler."""
        if has_drafts:
            self.num_drafting = min(self.num_drafting + 1, 8)
            self.drafting_ns += (duration_ns - self.drafting_ns) / self.num_drafting
        else:
            self.num_plain = min(self.num_plain + 1, 8)
            self.plain_ns += (duration_ns - self.plain_ns) / self.num_plain


class DraftLengths:
    """Used by the step thread. choose() before each launch, observe() with each result, in the same order."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._usual = 1.0 + _FIRST_ACCEPTANCE * max_drafts
        self._yields = np.full(num_slots, self._usual, np.float64)
        self._costs: defaultdict[int, _Costs] = defaultdict(_Costs)

    def admitted(self, slot: int) -> None:
        """Another request took the slot."""
        self._yields[slot] = self._usual

    def choose(self, slots: IntArray, *, is_alone: bool) -> int:
        """Most drafts of each row of a step of these slots: all, or none. is_alone: no chunks are in the step. With
        them its time does not tell what drafts cost, so nothing is tried in it."""
        costs = self._costs[_bucket(len(slots))]
        if not costs.num_drafting:
            # The first steps of a load are among the plain ones.
            is_trial = is_alone and costs.num_plain and not self._is_trying(costs)
            return self._max_drafts if is_trial else 0
        cost = costs.drafting_ns / costs.plain_ns
        pays = float(self._yields[slots].mean()) >= cost * _MARGIN
        if not is_alone:
            return self._max_drafts if pays else 0
        if pays:
            costs.since_plain += 1
            if costs.since_plain >= _PLAIN_EVERY:
                costs.since_plain = 0
                return 0
            return self._max_drafts
        costs.since_trial += 1
        if costs.since_trial >= max(_LEAST_APART, (cost - 1) / _TRIAL_SHARE):
            costs.since_trial = 0
            return self._max_drafts
        return 0

    def observe(self, slots: IntArray, counts: IntArray, num_drafts: int, duration_ns: int | None) -> None:
        """A step was done: tokens of each decode, and the most drafts that it was to have. duration_ns: None where
        chunks were in the step too."""
        if duration_ns is not None:
            costs = self._costs[_bucket(len(slots))]
            costs.note(duration_ns, has_drafts=num_drafts > 0)
            if num_drafts:
                costs.is_waiting = False
        if not num_drafts:
            return
        is_row = counts > 0  # Rows without room say nothing of drafts.
        slots, counts = slots[is_row], counts[is_row]
        self._yields[slots] += _ROW_WEIGHT * (counts - self._yields[slots])
        if len(counts):
            self._usual += _USUAL_WEIGHT * (float(counts.mean()) - self._usual)

    def _is_trying(self, costs: _Costs) -> bool:
        """True if a first step with drafts is on its way; otherwise the next one is."""
        was, costs.is_waiting = costs.is_waiting, True
        return was


def _bucket(num_rows: int) -> int:
    """Steps of nearly as many rows cost nearly the same."""
    return (num_rows - 1).bit_length()
