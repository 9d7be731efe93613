"""Length of drafts, step by step: none where they do not pay, from what drafts yielded and what steps cost.

    yield     tokens of a row in a step that drafts, a mean by slot              a row that begins has the usual one
    cost      time of a step that drafts over one that does not, by number of rows

Steps draft while the mean yield of their rows is above the cost. Then one in 64 does not, so that the cost stays known
as contexts grow. Otherwise steps that try drafts are so far apart that together they cost a hundredth of the time.

A network that drafts lacks the tokens of steps that did not. A trial of it goes on until it has caught up, and for a
step more, which alone tells what drafts cost. What catching up costs is measured as well: where rows lack so much that
a trial costs more than its share, there is none until others come. Rows that a network has not caught up with say
nothing of its drafts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
_MOST_UNCLEAN = 2


@dataclass(slots=True)
class _Costs:
    """Nanoseconds of a step, means of late; 0: not measured. per_token: what catching up with a token of each row
    costs, in plain steps. num_unclean: drafting steps that caught up, before any that did not was measured. waiting:
    a trial whose result is not there yet."""

    plain_ns: float = 0.0
    drafting_ns: float = 0.0
    num_plain: int = 0
    num_drafting: int = 0
    since_plain: int = 0
    since_trial: int = 0
    per_token: float = 0.0
    num_unclean: int = 0
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
    """Used by the step thread. choose() before each launch, observe() with each result, in the same order.

    catch_up: tokens of a row, of those that a network lacks, that a step which drafts computes at most; 0: what drafts
    keeps nothing of tokens.
    """

    def __init__(self, num_slots: int, max_drafts: int, *, catch_up: int = 0) -> None:
        self._max_drafts = max_drafts
        self._catch_up = catch_up
        self._usual = 1.0 + _FIRST_ACCEPTANCE * max_drafts
        self._yields = np.full(num_slots, self._usual, np.float64)
        self._costs: defaultdict[int, _Costs] = defaultdict(_Costs)
        # By slot, tokens that the network lacks at most: behind the steps that were chosen, and behind those observed.
        self._lapsed, self._lapsed_then = np.zeros((2, num_slots), np.int64)
        self._trial_left = 0

    def admitted(self, slot: int) -> None:
        """Another request took the slot."""
        self._yields[slot] = self._usual
        self._lapsed[slot] = self._lapsed_then[slot] = 0

    def choose(self, slots: IntArray, *, is_alone: bool) -> int:
        """Most drafts of each row of a step of these slots: all, or none. is_alone: no chunks are in the step. With
        them its time does not tell what drafts cost, so nothing is tried in it."""
        has_drafts = self._has_drafts(slots, is_alone)
        self._pass(self._lapsed, slots, has_drafts)
        return self._max_drafts if has_drafts else 0

    def observe(
        self, slots: IntArray, counts: IntArray, num_drafts: int, duration_ns: int | None, drafted: IntArray
    ) -> None:
        """A step was done: tokens of each decode, the most drafts that it was to have and those that it had.
        duration_ns: None where chunks were in the step too."""
        num_caught = float(np.minimum(self._lapsed_then[slots], self._catch_up).mean())
        self._pass(self._lapsed_then, slots, num_drafts > 0)
        if duration_ns is not None:
            _note(self._costs[_bucket(len(slots))], duration_ns, num_caught if num_drafts else None)
        if not num_drafts:
            return
        # Rows without room say nothing of drafts, nor do those that the network is behind with.
        is_row = (counts > 0) & (drafted > 0) if self._catch_up else counts > 0
        slots, counts = slots[is_row], counts[is_row]
        self._yields[slots] += _ROW_WEIGHT * (counts - self._yields[slots])
        if len(counts):
            self._usual += _USUAL_WEIGHT * (float(counts.mean()) - self._usual)

    def _has_drafts(self, slots: IntArray, is_alone: bool) -> bool:
        costs = self._costs[_bucket(len(slots))]
        if is_alone and self._trial_left:
            self._trial_left -= 1
            return True
        if not costs.num_drafting:
            # The first steps of a load are among the plain ones.
            return bool(is_alone and costs.num_plain and not self._is_trying(costs) and self._try(slots))
        cost = costs.drafting_ns / costs.plain_ns
        pays = float(self._yields[slots].mean()) >= cost * _MARGIN
        if not is_alone:
            return pays
        if pays:
            costs.since_plain += 1
            if costs.since_plain >= _PLAIN_EVERY:
                costs.since_plain = 0
                return False
            return True
        costs.since_trial += 1
        of_trial = cost - 1 + costs.per_token * float(self._lapsed[slots].mean())
        if costs.since_trial >= max(_LEAST_APART, of_trial / _TRIAL_SHARE):
            costs.since_trial = 0
            return self._try(slots)
        return False

    def _try(self, slots: IntArray) -> bool:
        """Begins a trial with this step."""
        self._trial_left = -(-int(self._lapsed[slots].max()) // self._catch_up) if self._catch_up else 0
        return True

    def _pass(self, lapsed_S: npt.NDArray[np.int64], slots: IntArray, has_drafts: bool) -> None:
        """A step more: rows that do not draft yield one token each."""
        if self._catch_up:
            lapsed_S[slots] = np.maximum(lapsed_S[slots] - self._catch_up, 0) if has_drafts else lapsed_S[slots] + 1

    def _is_trying(self, costs: _Costs) -> bool:
        """True if a first step with drafts is on its way; otherwise the next one is."""
        was, costs.is_waiting = costs.is_waiting, True
        return was


def _note(costs: _Costs, duration_ns: int, num_caught: float | None) -> None:
    """num_caught: tokens of a row, on average, with which a drafting step caught up; None: it drafted nothing."""
    if num_caught is None:
        costs.note(duration_ns, has_drafts=False)
        return
    costs.is_waiting = False
    is_clean = num_caught < 1
    if not is_clean and costs.num_drafting and costs.num_plain:
        per_token = max(0.0, duration_ns - costs.drafting_ns) / costs.plain_ns / num_caught
        costs.per_token += (per_token - costs.per_token) * (_ROW_WEIGHT if costs.per_token else 1.0)
    costs.num_unclean += not is_clean
    # Loads that change with every step may have no other ones.
    if is_clean or (not costs.num_drafting and costs.num_unclean > _MOST_UNCLEAN):
        costs.note(duration_ns, has_drafts=True)


def _bucket(num_rows: int) -> int:
    """Steps of nearly as many rows cost nearly the same."""
    return (num_rows - 1).bit_length()
