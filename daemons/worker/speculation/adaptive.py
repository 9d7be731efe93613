"""Length of drafts, step by step: none where they do not pay, from what drafts yielded and what steps cost.

    yield     tokens of a row in a step that drafts, a mean by slot              a row that begins has the usual one
    cost      time of a step that drafts over one that does not, by number of rows
    credit    time that drafts may still lose: a hundredth of all time, and what they gained before

Steps draft while the mean yield of their rows is above the cost. Otherwise a trial of two steps begins as soon as there
is credit for what it is expected to lose: often where drafts nearly pay, rarely where they are far from it. What drafts
really gained or lost, in trials or not, goes to the credit; once that is used up, nothing is drafted until it has been
earned again. So whatever yields and costs seem to be, drafts lose about a hundredth of the time at most.

The time of a step is that from the end of the step before to its own end: a small model's device waits for the host,
whose work for a step is not in the time of the device. It counts if the step before was of the same rows and did the
same, so that nothing was waited for but the engine. Where rows change with every step the device's time has to do.
Costs are medians of the last few times: a step that waited for a compiler, or for the garbage collector, tells nothing.

A network that drafts lacks the tokens of steps that did not. A trial of it goes on until it has caught up, and for a
step or two more, which alone tell what drafts cost. What catching up costs is measured as well, and asked of the
credit: where rows lack so much that a trial costs more than there can be, there is none until others come. Rows that a
network has not caught up with say nothing of its drafts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray

_MARGIN = 1.02
"""Yield over cost from which on drafts pay: below it a step that drafts gains less than a mistaken one loses."""
_TRIAL_SHARE = 0.0125
"""Of the time, what drafts may lose while they do not pay."""
_TRIAL_STEPS = 2
"""Of steps one behind the other: the first one still runs beside what the host does for others."""
_LEAST_APART = 8
"""Steps from one trial to the next, so that what it yielded is known: more than are in flight."""
_LEAST_LOSS = 0.05
"""Of a step of a trial, in plain steps: a yield just below the cost may be wrong."""
_MOST_GAINED, _MOST_EARNED, _MOST_DEBT = 10.0, 40.0, 40.0
"""Of credit, in plain steps: from gains, from time that passes, and of what was lost beyond it."""
_STOPPING_DEBT = 6.0
_PLAIN_EVERY = 128
_NUM_TIMES = 8
_LEAST_WEIGHT, _PRIOR_STEPS = 0.15, 3
"""Of a row's last step in its yield; as many steps as what is usual counts for with a row that begins."""
_USUAL_WEIGHT = 0.05
_FIRST_ACCEPTANCE = 0.3
_MOST_UNCLEAN = 2
_FIRST_PER_TOKEN, _FIRST_CAUGHT = 0.003, 8
"""Plain steps that catching up with a token takes as long as nobody has seen it, and tokens that this counts for."""
_LEAST_CAUGHT = 8
"""Tokens of a row with which a step has to catch up to tell what one costs."""


class _Times:
    """The last times of steps of a kind, ns. Those by the device alone give way to the first that is not."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._is_rough = True
        self.ns = 0.0
        """Their median, of an even number the lower one; 0: there is none."""

    def note(self, ns: float, *, is_rough: bool) -> None:
        if is_rough != self._is_rough:
            if is_rough:
                return
            self._is_rough = False
            self._times.clear()
        self._times.append(ns)
        self.ns = sorted(self._times)[(len(self._times) - 1) // 2]


@dataclass(slots=True)
class _Costs:
    """Of steps of about so many rows. caught_ns, num_caught: what catching up took, and with how many tokens of each
    row, sums of late. num_unclean: drafting steps that caught up, before any that did not was measured. to_trial: steps
    until another trial may begin."""

    plain: _Times = field(default_factory=_Times)
    drafting: _Times = field(default_factory=_Times)
    since_plain: int = 0
    to_trial: int = 0
    caught_ns: float = 0.0
    num_caught: float = 0.0
    num_unclean: int = 0
    credit_ns: float = 0.0
    is_stopped: bool = False

    @property
    def per_token(self) -> float:
        """Of catching up with a token of each row, in plain steps."""
        caught = self.caught_ns / self.plain.ns + _FIRST_CAUGHT * _FIRST_PER_TOKEN
        return caught / (self.num_caught + _FIRST_CAUGHT)


class _Step(NamedTuple):
    """The step that was observed last, if it had no chunks."""

    slots: IntArray
    has_drafts: bool
    end_ns: int


class DraftLengths:
    """Used by the step thread. choose() before each launch, observe() with each result, in the same order.

    catch_up: tokens of a row, of those that a network lacks, that a step which drafts computes at most; 0: what drafts
    keeps nothing of tokens.
    """

    def __init__(self, num_slots: int, max_drafts: int, *, catch_up: int = 0) -> None:
        self._max_drafts = max_drafts
        self._catch_up = catch_up
        # Greedy rows, and those that are sampled: drafts of these are right less often.
        self._usual, self._num_usual = [1.0 + _FIRST_ACCEPTANCE * max_drafts] * 2, [0, 0]
        self._is_sampled: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._yields = np.full(num_slots, self._usual[0], np.float64)
        self._num_steps = np.zeros(num_slots, np.int64)
        self._costs: defaultdict[int, _Costs] = defaultdict(_Costs)
        # By slot, tokens that the network lacks at most: behind the steps that were chosen, and behind those observed.
        self._lapsed, self._lapsed_then = np.zeros((2, num_slots), np.int64)
        self._trial_left = self._plain_left = 0
        # Steps of trials that are in flight.
        self._unseen = 0
        self._before: _Step | None = None

    def admitted(self, slot: int, *, is_sampled: bool = False) -> None:
        """Another request took the slot."""
        # The worker may have been idle before.
        self._before = None
        self._is_sampled[slot] = is_sampled
        self._yields[slot] = self._usual[is_sampled]
        self._num_steps[slot] = self._lapsed[slot] = self._lapsed_then[slot] = 0

    def choose(self, slots: IntArray, *, is_alone: bool) -> int:
        """Most drafts of each row of a step of these slots: all, or none. is_alone: no chunks are in the step. With
        them its time does not tell what drafts cost, so nothing is tried in it."""
        has_drafts = self._has_drafts(slots, is_alone)
        self._pass(self._lapsed, slots, has_drafts)
        return self._max_drafts if has_drafts else 0

    def observe(
        self,
        slots: IntArray,
        counts: IntArray,
        num_drafts: int,
        times: tuple[int, int] | None,
        drafted: IntArray | None,
    ) -> None:
        """A step was done: tokens of each decode, the most drafts that it was to have and those that it had, None: none
        had any. times: its start and its end on the device, ns; None: chunks were in the step too."""
        num_caught, has_drafts = 0.0, num_drafts > 0
        if self._catch_up:
            num_caught = float(np.minimum(self._lapsed_then[slots], self._catch_up).mean()) if has_drafts else 0.0
            self._pass(self._lapsed_then, slots, has_drafts)
        costs, before = self._costs[_bucket(len(slots))], self._before
        self._before = None if times is None else _Step(slots, has_drafts, times[1])
        if times is not None:
            is_next = before is not None and before.end_ns < times[1] and _are_same(before.slots, slots)
            start_ns = before.end_ns if before is not None and is_next else times[0]
            was_same = before is not None and before.has_drafts == has_drafts
            self._note(costs, times[1] - start_ns, has_drafts, num_caught, is_rough=not is_next, is_settled=was_same)
            self._earn(costs, times[1] - start_ns, float(counts.mean()) if has_drafts else 0.0, num_caught)
        if not has_drafts or drafted is None:
            return
        # Rows without room say nothing of drafts, nor do those that the network is behind with.
        is_row = (counts > 0) & (drafted > 0) if self._catch_up else counts > 0
        slots, counts = slots[is_row], counts[is_row]
        self._num_steps[slots] += 1
        weights = np.maximum(1.0 / (self._num_steps[slots] + _PRIOR_STEPS), _LEAST_WEIGHT)
        self._yields[slots] += weights * (counts - self._yields[slots])
        is_sampled = self._is_sampled[slots]
        for kind, of_kind in enumerate((counts[~is_sampled], counts[is_sampled])):
            if len(of_kind):
                self._num_usual[kind] += 1
                weight = max(1.0 / (self._num_usual[kind] + 1), _USUAL_WEIGHT)
                self._usual[kind] += weight * (float(of_kind.mean()) - self._usual[kind])

    def _has_drafts(self, slots: IntArray, is_alone: bool) -> bool:
        costs = self._costs[_bucket(len(slots))]
        if is_alone and self._trial_left:
            self._trial_left -= 1
            return True
        if is_alone and self._plain_left:
            self._plain_left -= 1
            return False
        plain_ns, drafting_ns = costs.plain.ns, costs.drafting.ns
        if not drafting_ns or not plain_ns:
            # The first steps of a load are among the plain ones. A trial may end without telling what drafts cost.
            costs.to_trial -= bool(plain_ns)
            return bool(is_alone and plain_ns and costs.to_trial < 0 and self._try(slots, costs))
        cost, expected = drafting_ns / plain_ns, float(self._yields[slots].sum()) / len(slots)
        pays = expected >= cost * _MARGIN and not costs.is_stopped
        if not is_alone:
            return pays
        if pays:
            costs.since_plain += 1
            if costs.since_plain >= _PLAIN_EVERY:
                costs.since_plain, self._plain_left = 0, _TRIAL_STEPS - 1
                return False
            return True
        costs.to_trial -= 1
        if costs.is_stopped:
            return False
        unseen = self._unseen if costs.to_trial >= 0 else 0
        of_trial = (unseen + _TRIAL_STEPS) * max(cost - expected, _LEAST_LOSS)
        is_unseen = bool(self._catch_up) and not costs.num_caught and costs.to_trial < 0
        # Numbers by row take longer than all else here.
        if costs.credit_ns < of_trial * plain_ns and not is_unseen:
            return False
        lapsed = self._lapsed[slots]
        if is_unseen and lapsed.max() >= 2 * _LEAST_CAUGHT:
            # The cost of catching up is better known before it is with much.
            return self._try(slots, costs)
        of_trial += (self._steps_behind(slots) - 1) * (cost - 1)
        of_trial += costs.per_token * float(lapsed.mean())
        if costs.credit_ns < of_trial * plain_ns:
            return False
        self._unseen = unseen + _TRIAL_STEPS
        return self._try(slots, costs)

    def _try(self, slots: IntArray, costs: _Costs) -> bool:
        """Begins a trial with this step."""
        costs.to_trial = _LEAST_APART
        self._trial_left = self._steps_behind(slots) + _TRIAL_STEPS - 2
        return True

    def _steps_behind(self, slots: IntArray) -> int:
        """Steps of a trial up to and with the one in which the last of the rows drafts, at least 1."""
        return max(1, -(-int(self._lapsed[slots].max()) // self._catch_up)) if self._catch_up else 1

    def _note(
        self, costs: _Costs, ns: float, has_drafts: bool, num_caught: float, *, is_rough: bool, is_settled: bool
    ) -> None:
        """is_rough: by the device alone. is_settled: the step before did the same. num_caught: tokens of a row, on
        average, with which a drafting step caught up."""
        if not has_drafts:
            if is_rough or is_settled:
                costs.plain.note(ns, is_rough=is_rough)
            return
        is_clean = num_caught < 1
        if num_caught >= _LEAST_CAUGHT and costs.drafting.ns:
            costs.caught_ns = 0.7 * costs.caught_ns + max(0.0, ns - costs.drafting.ns)
            costs.num_caught = 0.7 * costs.num_caught + num_caught
        costs.num_unclean += not is_clean
        # Loads that change with every step may have no other ones.
        is_all_there_is = not costs.drafting.ns and costs.num_unclean > _MOST_UNCLEAN
        if (is_clean and (is_rough or is_settled)) or is_all_there_is:
            costs.drafting.note(ns, is_rough=is_rough or not is_clean)

    def _earn(self, costs: _Costs, ns: float, num_tokens: float, num_caught: float) -> None:
        """num_tokens: of a row of a step that drafts; 0: it did not. A step that waited for something else is not what
        drafts cost."""
        plain_ns, drafting_ns = costs.plain.ns, costs.drafting.ns
        if not plain_ns:
            return
        credit = costs.credit_ns / plain_ns + _TRIAL_SHARE * min(ns / plain_ns, 4)
        credit = min(credit, _MOST_EARNED)
        if num_tokens:
            self._unseen = max(0, self._unseen - 1)
            usual_ns = 2 * drafting_ns if drafting_ns and num_caught < _LEAST_CAUGHT else ns
            gained = num_tokens - min(ns, usual_ns) / plain_ns
            credit = max(min(credit + gained, max(credit, _MOST_GAINED)), -_MOST_DEBT)
        costs.credit_ns = credit * plain_ns
        costs.is_stopped = credit < 0 and (costs.is_stopped or credit < -_STOPPING_DEBT)

    def _pass(self, lapsed_S: npt.NDArray[np.int64], slots: IntArray, has_drafts: bool) -> None:
        """A step more: rows that do not draft yield one token each."""
        if self._catch_up:
            lapsed_S[slots] = np.maximum(lapsed_S[slots] - self._catch_up, 0) if has_drafts else lapsed_S[slots] + 1


def _are_same(slots: IntArray, others: IntArray) -> bool:
    return slots is others or (len(slots) == len(others) and bool((slots == others).all()))


def _bucket(num_rows: int) -> int:
    """Steps of nearly as many rows cost nearly the same."""
    return (num_rows - 1).bit_length()
