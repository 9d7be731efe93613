"""Drafts of each row, step by step: as many as make the most tokens a second, from what drafts yielded and steps cost.

    acceptance   of each row's n-th draft, and all before it             row_acceptance.py
    cost         of steps, by the number of drafts of all their rows     step_costs.py
    choice       of that number: where tokens over time are the most. The likeliest drafts of all rows are made
    credit       time that drafts may still lose: a share of all time, and some of what they gained before

Where no number of drafts yields more than it costs, a trial of two steps begins as soon as there is credit for what it
is expected to lose: often where drafts nearly pay, rarely where they are far from it. Behind each that gained nothing
the next one is further away, up to a bound: text begins to repeat itself at some time. So it is with numbers of drafts
whose cost is not known. What drafts really gained or lost, in trials or not, goes to the credit; at some steps of debt
nothing is drafted until half of it has been earned. So whatever acceptance and costs seem to be, drafts lose an
eightieth of the time and 25 plain steps at most; of drafts that take nothing to be caught up with half as much time,
since a trial of them costs less.

The time of a step is that from the end of the step before to its own end: a small model's device waits for the host,
whose work for a step is not in the time of the device. It counts if the step before was of the same rows and did the
same, so that nothing was waited for but the engine. Beside a short step the host takes in one that was launched some
steps before: it counts only if all in between did the same, and trials go on until there is one that does. Where rows
change with every step the device's time has to do.

A network that drafts lacks the tokens of steps that did not. A trial of it goes on until it has caught up, and for a
step or two more, which alone tell what drafts cost. What catching up costs is measured as well, and asked of the
credit: where rows lack so much that a trial costs more than there can be, there is none until others come. A network
whose drafts just fail to pay goes on for as long as that costs less than it would to stop and catch up later. Rows that
it has not caught up with say nothing of its drafts, and all rows of a step in which it drafts have one at least: it
computes their tokens in any case.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.worker.speculation.row_acceptance import Floats, RowAcceptance
from radixmesh.daemons.worker.speculation.step_costs import LEAST_APART, LEAST_CAUGHT, Cost, Size, StepCosts

_MARGIN = 1.02
"""Yield over cost from which on drafts begin, or another number of them: below it a mistake costs more than it may
gain."""
_TRIAL_SHARE, _LAPSING_SHARE = 1 / 160, 1 / 80
"""Of the time, what drafts may lose while they do not pay, and those of a network, which has to catch up first."""
_TRIAL_STEPS = 2
"""Of steps one behind the other: the first one still runs beside what the host does for others."""
_SHORT_NS, _MOST_AHEAD = 1_500_000, 8
"""Of a step for which a device may have to wait for the host; steps that are launched ahead of one, at most."""
_LEAST_LOSS = 0.05
"""Of a step of a trial, in plain steps: a yield just below the cost may be wrong."""
_RESERVE = 4.0
"""Of credit, in plain steps, that rows which begin may still use up: of a network it is they that need not catch up."""
_PLAIN_EVERY = 128
_HORIZON = 32
"""Steps in which what beginning to draft costs has to come in again."""
_LAPSED, _MOST_PATIENCE = 32, 0.1
"""Tokens of a row that a network will have to catch up with, as far as one knows, when it stops; plain steps that a
step may lose for not having to."""
_PLAN_DRAFTS, _SETTLED_PLAN_DRAFTS, _PLAN_STEPS = 2, 8, 32
"""Results with drafts, and steps, for which a plan holds: to make one takes the host as long as ten kernels."""
_YOUNG_DRAFTS, _CLEAR_GAIN = 16, 0.15
"""Results with drafts of the same rows, and gain of a step, from which on little changes from one to the next."""
_FRACTIONS = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16)
"""Drafts of a row, in the mean, of the numbers of drafts that runners have which may have any."""


_NONE = empty_ints()


class RowLengths(NamedTuple):
    """A step's drafts. by_row: most drafts of each row, int32 [rows]. size: of what it costs."""

    by_row: IntArray
    size: Size

    @classmethod
    def even(cls, num_rows: int, num_drafts: int) -> RowLengths:
        """As many for each row, at least one."""
        return cls(np.full(num_rows, num_drafts, np.int32), Size(1 + num_drafts, num_rows * num_drafts))


class _Plan(NamedTuple):
    """For steps of these rows. yields: tokens of a row, in the mean, with each of `sizes`; best: of these the number
    with the most tokens a second, trial: that of a trial. order: positions of all rows, row after row, the likeliest
    first. begun_at: results with drafts before the first plan for these rows; made_at: the same before this one, and
    steps. holds: for so many results."""

    slots: IntArray
    sizes: Sequence[Size]
    yields: list[float]
    costs: list[Cost]
    best: int
    trial: int
    order: IntArray
    lengths: dict[int, RowLengths]
    begun_at: int
    made_at: tuple[int, int]
    holds: int

    @property
    def gain(self) -> float:
        """Of a step of the best size, in tokens of a row."""
        return self.yields[self.best] - self.costs[self.best].expected

    @property
    def speed(self) -> float:
        """Of the best size, over that without drafts."""
        return self.yields[self.best] / self.costs[self.best].expected


class _Step(NamedTuple):
    """The step that was observed last, if it had no chunks. num_same: steps of its key one behind the other."""

    slots: IntArray
    key: int
    end_ns: int
    num_same: int


class _Lapsed:
    """Tokens that a network lacks of each slot, at most: rows that do not draft yield one token each. Of steps of the
    same rows, of which there are many one behind the other, those without drafts are only counted, and those with
    drafts change nothing once nothing is lacking."""

    def __init__(self, num_slots: int, catch_up: int) -> None:
        """catch_up: tokens of a row that a step with drafts computes; 0: nothing lapses."""
        self._catch_up = catch_up
        self._tokens_S = np.zeros(num_slots, np.int64)
        # Rows of steps that are only counted; rows that lack nothing.
        self._slots, self._num_steps, self._up_to_date = empty_ints(), 0, empty_ints()

    def admitted(self, slot: int) -> None:
        self._count()
        self._tokens_S[slot] = 0

    def passed(self, slots: IntArray, *, has_drafts: bool) -> None:
        """A step of these slots more."""
        if not self._catch_up:
            return
        if not has_drafts:
            if slots is not self._slots:
                self._count()
                self._slots = slots
            self._num_steps += 1
            self._up_to_date = _NONE
        elif slots is not self._up_to_date:
            left_R = np.maximum(self.of(slots) - self._catch_up, 0)
            self._tokens_S[slots] = left_R
            self._up_to_date = _NONE if left_R.any() else slots

    def caught_up(self, slots: IntArray) -> float:
        """Tokens of a row, in the mean, that a step of these slots with drafts computes of those."""
        if not self._catch_up or slots is self._up_to_date:
            return 0.0
        return float(np.minimum(self.of(slots), self._catch_up).mean())

    def of(self, slots: IntArray) -> npt.NDArray[np.int64]:
        """Of these slots, [rows]."""
        self._count()
        tokens_R: npt.NDArray[np.int64] = self._tokens_S[slots]
        return tokens_R

    def _count(self) -> None:
        if self._num_steps:
            self._tokens_S[self._slots] += self._num_steps
            self._num_steps = 0


class DraftLengths:
    """Used by the step thread. choose() before each launch, observe() with each result, in the same order.

    catch_up: tokens of a row, of those that a network lacks, that a step which drafts computes at most; 0: what drafts
    keeps nothing of tokens. is_whole: rows of a step have all drafts or none, as trees do.
    """

    def __init__(self, num_slots: int, max_drafts: int, *, catch_up: int = 0, is_whole: bool = False) -> None:
        self._max_drafts, self._catch_up = max_drafts, catch_up
        self.is_whole = is_whole
        self._acceptance = RowAcceptance(num_slots, max_drafts)
        self._sizes: Callable[[int], Sequence[Size]] = self._any_sizes
        self._is_even = is_whole
        if is_whole:
            self.use_sizes(lambda num_rows: (Size(max_drafts, num_rows * max_drafts),), is_even=True)
        self._sizes_of: dict[int, Sequence[Size]] = {}
        trial_share = _LAPSING_SHARE if catch_up else _TRIAL_SHARE
        self._costs: defaultdict[int, StepCosts] = defaultdict(partial(StepCosts, trial_share))
        # Behind the steps that were chosen, and behind those observed.
        self._lapsed, self._lapsed_then = (_Lapsed(num_slots, catch_up) for _ in range(2))
        self._trial_left = self._plain_left = self._trial_key = 0
        # Steps in which no trial may begin, for want of credit or too soon behind another.
        self._rest_left = 0
        self._before: _Step | None = None
        self._plan: _Plan | None = None
        # Steps that were chosen and that were observed, and results with drafts.
        self._num_chosen = self._num_observed = self._num_told = 0
        # Steps that were launched ahead of the one that was observed last.
        self._num_ahead = 0

    def use_sizes(self, sizes: Callable[[int], Sequence[Size]], *, is_even: bool) -> None:
        """The numbers of drafts of a step, by its rows, ascending, none where steps of so many draft nothing; as long
        as this is not called, any. is_even: all rows of a step have as many."""
        self._sizes, self._is_even, self._sizes_of = sizes, is_even, {}

    def admitted(self, slot: int, *, is_sampled: bool = False) -> None:
        """Another request took the slot."""
        # The worker may have been idle before.
        self._before = self._plan = None
        self._acceptance.admitted(slot, is_sampled=is_sampled)
        for costs in self._costs.values():
            costs.changed()
        self._lapsed.admitted(slot)
        self._lapsed_then.admitted(slot)

    def choose(self, slots: IntArray, *, is_alone: bool) -> RowLengths | None:
        """Drafts of the rows of a step of these slots; None: they have none. is_alone: no chunks are in the step. With
        them its time does not tell what drafts cost, so nothing is tried in it."""
        self._num_chosen += 1
        lengths = None
        if self._rest_left and self._plan is not None and _are_same(self._plan.slots, slots):
            self._rest_left -= 1
            self._costs[_bucket(len(slots))].to_trial -= 1
        else:
            self._rest_left = 0
            lengths = self._choose(slots, is_alone)
        self._lapsed.passed(slots, has_drafts=lengths is not None)
        return lengths

    def as_drafted(self, lengths: RowLengths | None, drafted: IntArray) -> RowLengths | None:
        """Of a runner whose steps cost what they compute, not what they have room for: what the rows really drafted,
        int32 [rows]. A row without a proposal says nothing of proposals."""
        # Steps of a network catch up, whatever they drafted.
        if lengths is None or self._catch_up or self.is_whole:
            return lengths
        num_drafts = int(drafted.sum())
        sizes = self._sizes_for(len(drafted))
        size = next((size for size in sizes if size.num_drafts >= num_drafts), sizes[-1])
        return RowLengths(np.minimum(lengths.by_row, drafted), size) if num_drafts else None

    def observe(
        self,
        slots: IntArray,
        counts: IntArray,
        lengths: RowLengths | None,
        times: tuple[int, int] | None,
        drafted: IntArray | None,
    ) -> None:
        """A step was done: tokens of each decode, the drafts that they were to have and those that they had, None: none
        had any. times: its start and its end on the device, ns; None: chunks were in the step too."""
        key = 0 if lengths is None else lengths.size.key
        num_caught = self._lapsed_then.caught_up(slots) if key else 0.0
        self._lapsed_then.passed(slots, has_drafts=key > 0)
        costs, before = self._costs[_bucket(len(slots))], self._before
        self._num_observed += 1
        self._num_ahead = min(self._num_chosen - self._num_observed, _MOST_AHEAD)
        self._before = None
        if times is not None:
            is_next = before is not None and before.end_ns < times[1] and _are_same(before.slots, slots)
            start_ns = before.end_ns if before is not None and is_next else times[0]
            num_same = 1 + (before.num_same if before is not None and before.key == key else 0)
            self._before = _Step(slots, key, times[1], num_same)
            ns = times[1] - start_ns
            is_settled = num_same >= self._trial_steps(ns)
            costs.note(ns, key, num_caught, is_rough=not is_next, is_settled=is_settled)
            num_tokens = int(counts.sum()) / len(counts) if key else 0.0
            costs.earn(ns, key, num_tokens, num_caught, is_behind=is_next and not is_settled and ns < _SHORT_NS)
        elif key and key in costs.drafting:
            costs.earn(costs.drafting[key].ns, key, float(counts.mean()), num_caught)
        self._acceptance.passed()
        if lengths is None or drafted is None:
            return
        # It may change what is chosen next.
        self._rest_left = 0
        # Rows without room say nothing of drafts, nor do those that the network is behind with.
        self._num_told += 1
        self._acceptance.observe(slots, counts, lengths.by_row * (drafted > 0) if self._catch_up else lengths.by_row)

    def _choose(self, slots: IntArray, is_alone: bool) -> RowLengths | None:
        costs = self._costs[_bucket(len(slots))]
        sizes = self._sizes_for(len(slots))
        if not sizes:
            return None
        # One that turned out dear ends before its end.
        self._trial_left *= not costs.is_stopped
        if is_alone and self._trial_left:
            self._trial_left -= 1
            return self._of_key(slots, costs, self._trial_key)
        if is_alone and self._plain_left:
            self._plain_left -= 1
            return None
        costs.to_trial -= bool(costs.plain.ns)
        if not costs.plain.ns or costs.is_stopped:
            costs.key = 0
            return None
        if not costs.drafting:
            # The first steps of a load are among the plain ones. A trial may end without telling what drafts cost.
            one_each = next((size for size in sizes if size.num_drafts >= len(slots)), sizes[-1])
            return self._try(slots, costs, one_each.key) if is_alone and costs.to_trial < 0 else None
        plan = self._plan_for(slots, costs)
        if not self._pays(plan, costs):
            costs.key = 0
            return self._trial(plan, costs) if is_alone else None
        costs.key, costs.apart = plan.sizes[plan.best].key, LEAST_APART
        if is_alone:
            costs.since_plain += 1
            # The more drafts yield, the less it matters what exactly a plain step takes.
            if costs.since_plain >= _PLAIN_EVERY * plan.speed**2:
                costs.since_plain, self._plain_left = 0, self._trial_steps(costs.plain.ns) - 1
                return None
            other = self._untried(plan, costs)
            if other is not None:
                return self._try(slots, costs, other.key)
        return self._share(plan, plan.best)

    def _pays(self, plan: _Plan, costs: StepCosts) -> bool:
        if costs.key:
            patience = 0.0
            if self._catch_up and plan.gain < 0 < costs.credit:
                patience = min(costs.catching_up(_LAPSED, self._catch_up) / _HORIZON, _MOST_PATIENCE)
            return plan.gain >= -patience
        if plan.speed < costs.margin:
            return False
        return not self._catch_up or plan.gain * _HORIZON >= self._catching_up(plan.slots, costs)

    def _trial(self, plan: _Plan, costs: StepCosts) -> RowLengths | None:
        """The first step of a trial, of the number of drafts of which most is hoped; None: it is too soon for one, or
        there is no credit."""
        if costs.to_trial >= 0:
            self._rest(costs.to_trial)
            return None
        sizes, index = plan.sizes, plan.trial
        most_lapsed = int(self._lapsed.of(plan.slots).max()) if self._catch_up else 0
        is_unseen = bool(self._catch_up) and not costs.has_caught_up
        # The cost of catching up is better known before it is with much: steps tell it whose own is known.
        if is_unseen and 2 * LEAST_CAUGHT <= most_lapsed <= 4 * LEAST_CAUGHT:
            known = min(costs.drafting, key=lambda key: costs.drafting[key].ns)
            return self._try(plan.slots, costs, known)
        cost = plan.costs[index].expected
        of_trial = self._trial_steps_of(sizes[index].key, costs) * max(cost - plan.yields[index], _LEAST_LOSS)
        if self._catch_up:
            of_trial += (self._steps_behind(plan.slots) - 1) * (cost - 1) + self._catching_up(plan.slots, costs)
        reserve = _RESERVE if self._catch_up and most_lapsed <= LEAST_CAUGHT else 0.0
        if costs.allows(of_trial, reserve):
            return self._try(plan.slots, costs, sizes[index].key)
        # Meanwhile there is only more to be caught up with.
        if not is_unseen:
            self._rest(costs.steps_until(of_trial, reserve))
        return None

    def _rest(self, num_steps: int) -> None:
        """Nothing is asked for so many steps, as long as they are of the same rows."""
        self._rest_left = min(num_steps, _PLAN_STEPS)

    def _untried(self, plan: _Plan, costs: StepCosts) -> Size | None:
        """Another number of drafts that may be better than the best that is known, as cheap as it may be, if there is
        credit for it."""
        if costs.to_trial >= 0:
            return None
        for size, tokens, cost in zip(plan.sizes, plan.yields, plan.costs, strict=True):
            if cost.least < cost.expected and tokens >= cost.least * plan.speed * _MARGIN:
                loss = max(cost.expected - tokens / plan.speed, _LEAST_LOSS)
                if costs.allows(self._trial_steps_of(size.key, costs) * loss):
                    return size
        return None

    def _try(self, slots: IntArray, costs: StepCosts, key: int) -> RowLengths:
        """Begins a trial with this step."""
        costs.tried()
        if self._catch_up and not costs.has_caught_up:
            # One of the next trials tells what that costs, while little is lacking.
            costs.apart = LEAST_APART
        self._trial_key = key
        self._trial_left = self._steps_behind(slots) + self._trial_steps_of(key, costs) - 2
        return self._of_key(slots, costs, key)

    def _of_key(self, slots: IntArray, costs: StepCosts, key: int) -> RowLengths:
        """A step of the size with this key, or of the largest if these rows have none with it."""
        plan = self._plan_for(slots, costs)
        index = next((index for index, size in enumerate(plan.sizes) if size.key == key), len(plan.sizes) - 1)
        return self._share(plan, index)

    def _plan_for(self, slots: IntArray, costs: StepCosts) -> _Plan:
        plan = self._plan
        if (
            plan is None
            or not _are_same(plan.slots, slots)
            or self._num_told - plan.made_at[0] >= plan.holds
            or self._num_chosen - plan.made_at[1] >= _PLAN_STEPS
        ):
            begun_at = plan.begun_at if plan is not None and _are_same(plan.slots, slots) else self._num_told
            self._plan = plan = self._new_plan(slots, costs, begun_at)
        return plan

    def _new_plan(self, slots: IntArray, costs: StepCosts, begun_at: int) -> _Plan:
        sizes, num_rows = self._sizes_for(len(slots)), len(slots)
        # All rows draft in a trial, if there are that many: what the others would yield nobody would know.
        first = next((index for index, size in enumerate(sizes) if size.num_drafts >= num_rows), len(sizes) - 1)
        likely_RK = self._acceptance.by_position(slots)
        if self._is_even:
            order, of_row = _NONE, np.cumsum(np.add.reduce(likely_RK, axis=0)) * (1.0 / num_rows)
            yields = [1 + float(of_row[size.num_drafts // num_rows - 1]) for size in sizes]
        else:
            order, tokens_N = self._ordered(likely_RK)
            yields = [1 + float(tokens_N[size.num_drafts - 1]) / num_rows for size in sizes]
        of_sizes = costs.of_sizes(sizes)
        best = max(range(len(sizes)), key=lambda index: yields[index] / of_sizes[index].expected)
        # Steps of the same number one behind the other tell what they cost.
        for index, size in enumerate(sizes):
            is_near = yields[index] / of_sizes[index].expected * _MARGIN >= yields[best] / of_sizes[best].expected
            if size.key == costs.key and is_near:
                best = index
        plan = _Plan(
            slots=slots,
            sizes=sizes,
            yields=yields,
            costs=of_sizes,
            best=best,
            trial=_most_hopeful(yields, of_sizes, first),
            order=order,
            lengths={},
            begun_at=begun_at,
            made_at=(self._num_told, self._num_chosen),
            holds=_PLAN_DRAFTS,
        )
        is_settled = self._num_told - begun_at >= _YOUNG_DRAFTS and abs(plan.gain) >= _CLEAR_GAIN
        return plan._replace(holds=_SETTLED_PLAN_DRAFTS) if is_settled else plan

    def _ordered(self, likely_RK: Floats) -> tuple[IntArray, Floats]:
        """Positions of all rows in the order in which they get drafts, and the tokens that those up to each yield."""
        keys_RK = likely_RK
        if self._catch_up:
            keys_RK = likely_RK.copy()
            keys_RK[:, 0] += 1.0
        order = np.argsort(-keys_RK, axis=None, kind="stable").astype(np.int32)
        return order, np.cumsum(likely_RK.ravel()[order])

    def _share(self, plan: _Plan, index: int) -> RowLengths:
        """Drafts of the rows of a step of that size: the likeliest ones."""
        if index not in plan.lengths:
            size, num_rows = plan.sizes[index], len(plan.slots)
            if self._is_even:
                by_row = np.full(num_rows, size.num_drafts // num_rows, np.int32)
            else:
                rows = plan.order[: size.num_drafts] // self._max_drafts
                by_row = np.bincount(rows, minlength=num_rows).astype(np.int32)
            plan.lengths[index] = RowLengths(by_row, size)
        return plan.lengths[index]

    def _catching_up(self, slots: IntArray, costs: StepCosts) -> float:
        """Of all that these rows lack, in plain steps."""
        return costs.catching_up(float(self._lapsed.of(slots).mean()), self._catch_up) if self._catch_up else 0.0

    def _trial_steps(self, ns: float) -> int:
        """Steps of a trial, of steps that take so long: as many as there have to be for the last to tell its cost."""
        return max(_TRIAL_STEPS, self._num_ahead + 2) if ns < _SHORT_NS else _TRIAL_STEPS

    def _trial_steps_of(self, key: int, costs: StepCosts) -> int:
        """Of a size: a short trial tells what drafts yield, and what they cost is known."""
        return _TRIAL_STEPS if costs.is_known(key) else self._trial_steps(costs.plain.ns)

    def _steps_behind(self, slots: IntArray) -> int:
        """Steps of a trial up to and with the one in which the last of the rows drafts, at least 1."""
        return max(1, -(-int(self._lapsed.of(slots).max()) // self._catch_up)) if self._catch_up else 1

    def _sizes_for(self, num_rows: int) -> Sequence[Size]:
        if num_rows not in self._sizes_of:
            self._sizes_of[num_rows] = tuple(self._sizes(num_rows))
        return self._sizes_of[num_rows]

    def _any_sizes(self, num_rows: int) -> list[Size]:
        least = num_rows if self._catch_up else 1
        most = self._max_drafts * num_rows
        found: dict[int, int] = {}
        for key, fraction in enumerate(_FRACTIONS, 1):
            found.setdefault(min(max(math.ceil(num_rows * fraction), least), most), key)
        return [Size(key, num_drafts) for num_drafts, key in found.items()]


def _most_hopeful(yields: Sequence[float], costs: Sequence[Cost], first: int) -> int:
    """The number of a size from `first` on that may be best, with costs as low as they may be."""
    index = max(range(first, len(costs)), key=lambda index: yields[index] / costs[index].least)
    if yields[index] / costs[index].least >= _MARGIN:
        return index
    # Nothing would pay as things are: drafts of the cheapest size tell as well what they yield.
    return min(range(first, len(costs)), key=lambda index: costs[index].expected - yields[index])


def _are_same(slots: IntArray, others: IntArray) -> bool:
    return slots is others or (len(slots) == len(others) and bool((slots == others).all()))


def _bucket(num_rows: int) -> int:
    """Steps of nearly as many rows cost nearly the same."""
    return (num_rows - 1).bit_length()
