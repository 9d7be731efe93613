"""Acceptance of drafts by row and by position: how likely the n-th draft of a row is right, with those before it.

    by slot       of the last drafts at a position how many were right, where those before it were
    usual         the same of all rows, greedy ones and sampled ones apart: what a row that begins is taken for
    at depth n    between what is usual at n, and what the row has at n - 1: rows differ at all positions alike

What a row told counts less with each draft since, and with each step in which it drafted nothing: its text goes on.
S slots, R rows, K positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray

Floats = npt.NDArray[np.float64]

_LOST, _LEAST_LOST = 1 / 8, 1 / 48
"""Of what a row told at a position, behind another draft there that was a full surprise, and behind any."""
_HALF_LIFE = 256
"""Steps without a draft of the row after which what it told counts half."""
_PRIOR = 3.0
"""Drafts that what is usual counts for."""
_USUAL_KEPT, _LEAST_WEIGHT = 0.97, 0.3
"""Of what is usual, behind another draft; and what drafts count for at least that are not a request's first ones."""
_FIRST = 0.55
"""Acceptance at each position, where those before it were right, as long as nothing has been told."""


@dataclass(slots=True)
class _Rows:
    """Numbers of the rows of the last step, as of their slots. told_at: of each row, int64 [R], or of all. shares_2R:
    of a row in the mean of those of each kind."""

    slots: IntArray
    told_right_2RK: Floats
    told_at: npt.NDArray[np.int64] | int
    kinds_R: npt.NDArray[np.intp]
    shares_2R: Floats
    scratch_RK: Floats


class RowAcceptance:
    """Used by one thread. Calls of numpy are what it costs the host, some thirty a step: arrays of what was told and of
    what was right lie together, and those of rows that go on from step to step stay apart from the slots. Numbers of a
    single row are computed one by one, which takes a quarter of that: steps of one row are the shortest ones."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        # Of drafts that were told, and of those that were right.
        self._told_right_2SK = np.zeros((2, num_slots, max_drafts), np.float64)
        self._usual_2_2K = np.ones((2, 2, max_drafts), np.float64)
        """By kind; as before."""
        self._usual_2_2K[:, 1] = _FIRST
        self._kind_S: npt.NDArray[np.intp] = np.zeros(num_slots, np.intp)
        # The step, of those that are observed, in which a slot told something last.
        self._told_at_S = np.zeros(num_slots, np.int64)
        self._step = 0
        # Row n: ones at the first n positions; the last one, of n = -1: none.
        self._first_n = np.concatenate((np.tri(max_drafts + 1, max_drafts, -1), np.zeros((1, max_drafts))))
        self._behind_21 = np.array([[0], [1]], np.int32)
        self._rows: _Rows | None = None

    def admitted(self, slot: int, *, is_sampled: bool) -> None:
        """Another request took the slot: nothing is known of it but whether it is sampled."""
        self._put_back()
        self._told_right_2SK[:, slot] = 0.0
        self._kind_S[slot], self._told_at_S[slot] = int(is_sampled), self._step

    def passed(self) -> None:
        """A step is over."""
        self._step += 1

    def observe(self, slots: IntArray, counts: IntArray, drafted: IntArray) -> None:
        """Rows yielded `counts` tokens and had so many drafts, int32 [R] each; of none nothing is told. Tells of the
        positions up to the first wrong draft."""
        if len(slots) == 1:
            self._put_back()
            self._observe_row(int(slots[0]), int(counts[0]), int(drafted[0]))
            return
        rows = self._rows_of(slots)
        told_right_2RK, kept_RK = rows.told_right_2RK, rows.scratch_RK
        told_RK, right_RK = told_right_2RK
        # Rows that yielded nothing tell nothing: the last row of the table.
        now_2RK = self._first_n[np.minimum(counts - self._behind_21, drafted)]
        # Requests differ more than the drafts of one: its first ones say more of what is usual.
        weights_RK = np.add(told_RK, _PRIOR)
        np.divide(_PRIOR, weights_RK, out=weights_RK)
        np.maximum(weights_RK, _LEAST_WEIGHT, out=weights_RK)
        surprise_RK = right_RK + 0.5
        surprise_RK /= np.add(told_RK, 1.0, out=kept_RK)
        surprise_RK -= now_2RK[1]
        np.abs(surprise_RK, out=surprise_RK)
        surprise_RK *= _LOST
        lost_RK = np.maximum(surprise_RK, _LEAST_LOST, out=surprise_RK)
        lost_RK *= now_2RK[0]
        np.subtract(1.0, lost_RK, out=kept_RK)
        kept_RK *= self._since(rows)
        told_right_2RK *= kept_RK
        told_right_2RK += now_2RK
        rows.told_at = self._step
        now_2RK *= weights_RK
        # A step counts once, however many rows of a kind it has.
        mean_22K = (rows.shares_2R @ now_2RK).swapaxes(0, 1)
        self._usual_2_2K *= 1.0 - (1 - _USUAL_KEPT) * mean_22K[:, :1]
        self._usual_2_2K += mean_22K

    def by_position(self, slots: IntArray) -> Floats:
        """[R, K]: how likely the n-th draft of a row and all before it are right. No row's numbers rise."""
        if len(slots) == 1:
            self._put_back()
            return np.array([self._of_row(int(slots[0]))])
        rows, usual_2_2K = self._rows_of(slots), self._usual_2_2K
        usual_KR = (usual_2_2K[:, 1] / usual_2_2K[:, 0])[rows.kinds_R].T
        told_KR, right_KR = (rows.told_right_2RK * self._since(rows)).transpose(0, 2, 1)
        told_KR = told_KR + _PRIOR
        # Priors behind the first position: half of what is usual, and half of what the row has at the one before.
        usual_KR[1:] *= 0.5
        likely_KR = (right_KR + _PRIOR * usual_KR) / told_KR
        shares_KR = 0.5 * _PRIOR / told_KR
        for number in range(1, len(likely_KR)):
            likely_KR[number] += shares_KR[number] * likely_KR[number - 1]
        return np.cumprod(likely_KR, axis=0, dtype=np.float64).T

    def _observe_row(self, slot: int, count: int, drafted: int) -> None:
        """observe() of one row."""
        told_K, right_K = self._told_right_2SK[:, slot].tolist()
        usual_2K = self._usual_2_2K[self._kind_S[slot]]
        (usual_told_K, usual_right_K), kept = usual_2K.tolist(), self._kept(slot)
        num_told, num_right = max(min(count, drafted), 0), max(min(count - 1, drafted), 0)
        for number, (told, right) in enumerate(zip(told_K, right_K, strict=True)):
            is_told, is_right = float(number < num_told), float(number < num_right)
            lost = max(_LOST * abs(is_right - (right + 0.5) / (told + 1.0)), _LEAST_LOST) if is_told else 0.0
            told_K[number] = told * kept * (1.0 - lost) + is_told
            right_K[number] = right * kept * (1.0 - lost) + is_right
            weight = max(_PRIOR / (told + _PRIOR), _LEAST_WEIGHT)
            usual_kept = 1.0 - (1 - _USUAL_KEPT) * weight * is_told
            usual_told_K[number] = usual_told_K[number] * usual_kept + weight * is_told
            usual_right_K[number] = usual_right_K[number] * usual_kept + weight * is_right
        self._told_right_2SK[:, slot] = told_K, right_K
        self._told_at_S[slot] = self._step
        usual_2K[:] = usual_told_K, usual_right_K

    def _of_row(self, slot: int) -> list[float]:
        """by_position() of one row."""
        told_K, right_K = self._told_right_2SK[:, slot].tolist()
        usual_told_K, usual_right_K = self._usual_2_2K[self._kind_S[slot]].tolist()
        kept, likely, of_all, found = self._kept(slot), 0.0, 1.0, list[float]()
        for number, (told, right) in enumerate(zip(told_K, right_K, strict=True)):
            usual = usual_right_K[number] / usual_told_K[number]
            prior = 0.5 * (usual + likely) if number else usual
            likely = (right * kept + _PRIOR * prior) / (told * kept + _PRIOR)
            of_all *= likely
            found.append(of_all)
        return found

    def _kept(self, slot: int) -> float:
        """As _since() of one row."""
        return math.exp2(int(self._told_at_S[slot] - self._step) / _HALF_LIFE)

    def _since(self, rows: _Rows) -> Floats | float:
        """Weight of what a row has told, of all rows or [R, 1]: it has drafted nothing for a while."""
        if isinstance(rows.told_at, int):
            return math.exp2((rows.told_at - self._step) * (1.0 / _HALF_LIFE))
        part_R: Floats = np.exp2((rows.told_at - self._step) * (1.0 / _HALF_LIFE))
        return part_R[:, None]

    def _rows_of(self, slots: IntArray) -> _Rows:
        """Numbers of these slots, which are the latest until they are put back."""
        rows = self._rows
        if rows is not None and (rows.slots is slots or _are_same(rows.slots, slots)):
            return rows
        self._put_back()
        kinds_R = self._kind_S[slots]
        is_kind_2R = kinds_R == np.array([[0], [1]])
        shares_2R = is_kind_2R / np.maximum(is_kind_2R.sum(axis=1, keepdims=True), 1)
        told_right_2RK, told_at = self._told_right_2SK[:, slots], self._told_at_S[slots]
        scratch_RK = np.empty_like(told_right_2RK[0])
        self._rows = rows = _Rows(slots, told_right_2RK, told_at, kinds_R, shares_2R, scratch_RK)
        return rows

    def _put_back(self) -> None:
        """Others are told of, or asked for."""
        rows, self._rows = self._rows, None
        if rows is not None:
            self._told_right_2SK[:, rows.slots] = rows.told_right_2RK
            self._told_at_S[rows.slots] = rows.told_at


def _are_same(slots: IntArray, others: IntArray) -> bool:
    return len(slots) == len(others) and bool((slots == others).all())
