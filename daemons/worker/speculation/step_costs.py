"""Costs of steps of about so many rows, in plain steps, and the credit of drafts there.

    size        a number of drafts in all of a step, as a runner has them: its captured steps, or parts of the rows
    cost        time of a step of a size over that of one without drafts: medians of the last few times
    catching up what a step took longer in which a network computed what it had lacked, by tokens of a row
    credit      time that drafts may still lose: a small share of all time, and some of what they gained before

Costs of sizes that were not measured lie between those that were: on the line between them, and at least as high as
that of the next smaller one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_MOST_GAINED, _MOST_EARNED, _MOST_DEBT = 20.0, 40.0, 40.0
"""Of credit, in plain steps: from gains, from time that passes, and of what was lost beyond it."""
_STOPPING_DEBT, _BEGINNING_DEBT = 15.0, 8.0
"""Plain steps of debt at which nothing is drafted any more, whatever seems to pay, and at which something is again."""
_KEPT_CREDIT = 10.0
LEAST_APART, _MOST_APART = 8, 32
"""Steps from one trial to the next: so many that what it yielded is known, and twice as many behind each that does not
end in drafts, for text begins to repeat itself at some time, and credit has to be left for it."""
_MARGIN, _MARGIN_PER_DEBT = 1.02, 0.015
_NUM_TIMES, _MUCH_SHORTER = 8, 0.8
_EXPIRES = 1024
"""Steps after which the cost of a size that did not come is no longer believed."""
_MOST_UNCLEAN = 2
_UNSEEN_PER_TOKEN = 0.02
"""Plain steps that catching up with a token takes as long as nobody has seen it: rather too many."""
_FIRST_PER_TOKEN, _FIRST_CAUGHT = 0.003, 8
"""The same once it has been seen, and tokens that this counts for."""
LEAST_CAUGHT = 8
"""Tokens of a row with which a step has to catch up to tell what one costs."""


class Size(NamedTuple):
    """A number of drafts of all rows of a step. key: the same for steps that cost nearly the same."""

    key: int
    num_drafts: int


class Cost(NamedTuple):
    """Of a size, in plain steps. least: what it may be, where it was not measured of late."""

    expected: float
    least: float


class Times:
    """The last times of steps of a kind, ns. Those by the device alone give way to the first that is not, and all to
    one that is much shorter: whatever else a machine does makes steps longer, as the first ones of a process are."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._is_rough = True
        self.ns = 0.0
        """Their median, of an even number the lower one; 0: there is none."""
        self.noted_at = 0
        """Of the steps of these rows, the last one that told."""

    def note(self, ns: float, *, is_rough: bool) -> None:
        if is_rough != self._is_rough:
            if is_rough:
                return
            self._is_rough = False
            self._times.clear()
        if ns < _MUCH_SHORTER * self.ns:
            self._times.clear()
        self._times.append(ns)
        self.ns = sorted(self._times)[(len(self._times) - 1) // 2]


class StepCosts:
    """trial_share: of the time, what drafts may lose while they do not pay. to_trial: steps until another trial may
    begin; apart: from the next one to that behind it. key: size of the step that was chosen last, 0: without drafts."""

    def __init__(self, trial_share: float) -> None:
        self._trial_share = trial_share
        self.plain = Times()
        self.drafting: dict[int, Times] = {}
        self.since_plain = self.to_trial = self.key = 0
        self.apart = LEAST_APART
        self.credit_ns = 0.0
        self.is_stopped = False
        self._num_steps = 0
        # Tokens of a row with which a step caught up, and what it took longer, ns.
        self._caught: deque[tuple[float, float]] = deque(maxlen=_NUM_TIMES)
        # Drafting steps that caught up, before any that did not was measured.
        self._num_unclean = 0

    def tried(self) -> None:
        """A trial begins."""
        self.to_trial, self.apart = self.apart, min(2 * self.apart, _MOST_APART)

    def changed(self) -> None:
        """There are other rows."""
        self.apart = max(LEAST_APART, self.apart // 2)
        self.to_trial = min(self.to_trial, self.apart)

    @property
    def credit(self) -> float:
        """In plain steps, which have been measured."""
        return self.credit_ns / self.plain.ns

    def allows(self, loss: float, reserve: float = 0.0) -> bool:
        """A trial may lose that much, in plain steps, `reserve` of them beyond all credit: a quarter of what there is,
        so that the next ones are not without any."""
        credit = self.credit + reserve
        return loss <= max(credit / 4, credit - _KEPT_CREDIT)

    def is_known(self, key: int) -> bool:
        """True if steps of a size told of late what they cost."""
        times = self.drafting.get(key)
        return times is not None and times.ns > 0 and self._num_steps - times.noted_at < _EXPIRES

    def steps_until(self, loss: float, reserve: float = 0.0) -> int:
        """Plain steps at least until allows() of the same."""
        wanted = min(4 * loss, loss + _KEPT_CREDIT)
        return max(0, math.ceil((wanted - self.credit - reserve) / self._trial_share) - 1)

    @property
    def margin(self) -> float:
        """Yield over cost from which on drafts begin. The more they have lost, the surer they have to be."""
        return _MARGIN + _MARGIN_PER_DEBT * max(0.0, -self.credit)

    @property
    def has_caught_up(self) -> bool:
        """True once a step has told what catching up costs."""
        return bool(self._caught)

    def of_sizes(self, sizes: Sequence[Size]) -> list[Cost]:
        """Of sizes, ascending. Plain steps have been measured, and those of some size of these rows."""
        plain_ns = self.plain.ns
        known = [
            (index, max(1.0, times.ns / plain_ns), self._num_steps - times.noted_at < _EXPIRES)
            for index, size in enumerate(sizes)
            if (times := self.drafting.get(size.key)) is not None and times.ns
        ]
        found: list[Cost] = []
        before, of_before, least = 0, 1.0, 1.0
        for index, of_size, is_fresh in known:
            end = sizes[index].num_drafts
            for size in sizes[len(found) : index]:
                part = (size.num_drafts - before) / (end - before)
                found.append(Cost(of_before + part * (of_size - of_before), min(least, of_size)))
            # A step of more drafts takes no less: where it seems to, the smaller one was held up.
            found.append(Cost(of_size, of_size if is_fresh else min(least, of_size)))
            before, of_before, least = end, of_size, found[-1].least
        slope = (of_before - 1) / before if before else 0.0
        rest = sizes[len(found) :]
        return found + [Cost(of_before + slope * (size.num_drafts - before), least) for size in rest]

    def catching_up(self, num_tokens: float, most: int) -> float:
        """Of catching up with so many tokens of a row, at most `most` in a step, in plain steps. On the line through
        what was measured; of more tokens by their root, where that was of nearly the same number."""
        if not self._caught:
            return num_tokens * _UNSEEN_PER_TOKEN
        numbers = [number for number, _ in self._caught]
        taken = [ns for _, ns in self._caught]
        mean = sum(numbers) / len(numbers)
        of_mean = sum(taken) / len(taken) / self.plain.ns
        spread = sum((number - mean) ** 2 for number in numbers)
        per_token = (of_mean + _FIRST_CAUGHT * _FIRST_PER_TOKEN) / (mean + _FIRST_CAUGHT)
        is_line = max(numbers) > 2 * min(numbers)
        if is_line:
            both = zip(numbers, taken, strict=True)
            rise = sum((number - mean) * (ns / self.plain.ns - of_mean) for number, ns in both) / spread
            per_token = min(max(rise, 0.0), of_mean / mean)
        whole, left = divmod(num_tokens, most)

        def of_step(number: float) -> float:
            if is_line or number < mean:
                return max(0.0, of_mean + (number - mean) * per_token)
            # Of one number alone: by kernels that take as long for many tokens, or by each token.
            return of_mean * math.sqrt(number / mean)

        return whole * of_step(most) + of_step(left) * min(1.0, left / LEAST_CAUGHT)

    def note(self, ns: float, key: int, num_caught: float, *, is_rough: bool, is_settled: bool) -> None:
        """A step took so long. key: of its size, 0: it drafted nothing. is_rough: by the device alone. is_settled: the
        step before did the same. num_caught: tokens of a row, on average, with which a drafting step caught up."""
        self._num_steps += 1
        if not key:
            if is_rough or is_settled:
                self.plain.note(ns, is_rough=is_rough)
            return
        times = self.drafting.get(key)
        is_clean = num_caught < 1
        if num_caught >= LEAST_CAUGHT and times is not None and times.ns:
            self._caught.append((num_caught, max(0.0, ns - times.ns)))
        self._num_unclean += not is_clean
        # Loads that change with every step may have no other ones.
        is_all_there_is = not self.drafting and self._num_unclean > _MOST_UNCLEAN
        if (is_clean and (is_rough or is_settled)) or is_all_there_is:
            times = self.drafting.setdefault(key, Times())
            times.note(ns, is_rough=is_rough or not is_clean)
            times.noted_at = self._num_steps

    def earn(self, ns: float, key: int, num_tokens: float, num_caught: float, *, is_behind: bool = False) -> None:
        """num_tokens: of a row of a step that drafts. A step that waited for something else is not what drafts cost.
        is_behind: one without drafts, beside which the host took in some."""
        plain_ns = self.plain.ns
        if not plain_ns:
            return
        credit = min(self.credit_ns / plain_ns + self._trial_share * min(ns / plain_ns, 4), _MOST_EARNED)
        if key:
            times = self.drafting.get(key)
            usual_ns = 2 * times.ns if times is not None and times.ns and num_caught < LEAST_CAUGHT else ns
            gained = num_tokens - min(ns, usual_ns) / plain_ns
            if gained > 0:
                self.apart = LEAST_APART
                self.to_trial = min(self.to_trial, LEAST_APART)
            credit = max(min(credit + gained, max(credit, _MOST_GAINED)), -_MOST_DEBT)
        elif is_behind:
            credit = max(credit - max(0.0, min(ns / plain_ns, 4.0) - 1.0), -_MOST_DEBT)
        self.credit_ns = credit * plain_ns
        self.is_stopped = credit < -(_BEGINNING_DEBT if self.is_stopped else _STOPPING_DEBT)
