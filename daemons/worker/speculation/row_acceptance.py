"""Acceptance of drafts by row and by position: how likely the n-th draft of a row is right, with those before it.

    by slot       of the last drafts at a position how many were right, where those before it were
    usual         the same of all rows, greedy ones and sampled ones apart: what a row that begins is taken for
    at depth n    between what is usual at n, and what the row has at n - 1: rows differ at all positions alike

What a row told counts less with each draft since, and with each step in which it drafted nothing: its text goes on.
S slots, R rows, K positions.
"""

from __future__ import annotations

import math

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


class RowAcceptance:
    """Used by one thread. Calls of numpy are what it costs the host, some thirty a step: arrays of what was told and of
    what was right lie together. Numbers of a single row are computed one by one, which takes a quarter of that: steps
    of one row are the shortest ones."""

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
        # Row n: ones at the first n positions.
        self._first_n = np.tri(max_drafts + 1, max_drafts, -1)
        self._behind_21 = np.array([[0], [1]], np.int32)

    def admitted(self, slot: int, *, is_sampled: bool) -> None:
        """Another request took the slot: nothing is known of it but whether it is sampled."""
        self._told_right_2SK[:, slot] = 0.0
        self._kind_S[slot], self._told_at_S[slot] = int(is_sampled), self._step

    def passed(self) -> None:
        """A step is over."""
        self._step += 1

    def observe(self, slots: IntArray, counts: IntArray, drafted: IntArray) -> None:
        """Rows yielded `counts` tokens and had so many drafts, int32 [R] each; of none nothing is told. Tells of the
        positions up to the first wrong draft."""
        if len(slots) == 1:
            self._observe_row(int(slots[0]), int(counts[0]), int(drafted[0]))
            return
        before_2RK = self._told_right_2SK[:, slots]
        now_2RK = self._first_n[np.maximum(np.minimum(counts - self._behind_21, drafted), 0)]
        surprise_RK = np.abs(now_2RK[1] - (before_2RK[1] + 0.5) / (before_2RK[0] + 1.0))
        kept_RK = 1.0 - now_2RK[0] * np.maximum(_LOST * surprise_RK, _LEAST_LOST)
        kept_RK *= self._since(slots)[:, None]
        self._told_right_2SK[:, slots] = before_2RK * kept_RK + now_2RK
        self._told_at_S[slots] = self._step
        # Requests differ more than the drafts of one: its first ones say more of what is usual.
        weighed_2RK = now_2RK * np.maximum(_PRIOR / (before_2RK[0] + _PRIOR), _LEAST_WEIGHT)
        kinds = self._kind_S[slots]
        first = int(kinds[0])
        if len(kinds) == 1 or (kinds == first).all():
            self._add_usual(first, weighed_2RK)
            return
        for kind in (0, 1):
            self._add_usual(kind, weighed_2RK[:, kinds == kind])

    def by_position(self, slots: IntArray) -> Floats:
        """[R, K]: how likely the n-th draft of a row and all before it are right. No row's numbers rise."""
        if len(slots) == 1:
            return np.array([self._of_row(int(slots[0]))])
        usual_2_2K = self._usual_2_2K
        usual_KR = (usual_2_2K[:, 1] / usual_2_2K[:, 0])[self._kind_S[slots]].T
        told_KR, right_KR = (self._told_right_2SK[:, slots] * self._since(slots)[:, None]).transpose(0, 2, 1)
        told_KR = told_KR + _PRIOR
        likely_KR = np.empty_like(told_KR)
        prior_R = usual_KR[0]
        for number in range(len(likely_KR)):
            if number:
                prior_R = 0.5 * (usual_KR[number] + likely_KR[number - 1])
            likely_KR[number] = (right_KR[number] + _PRIOR * prior_R) / told_KR[number]
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

    def _since(self, slots: IntArray) -> Floats:
        """Weight of what a row has told: it has drafted nothing for a while."""
        part_R: Floats = np.exp2((self._told_at_S[slots] - self._step) * (1.0 / _HALF_LIFE))
        return part_R

    def _add_usual(self, kind: int, weighed_2RK: Floats) -> None:
        """A step counts once, however many rows it has."""
        mean_2K = np.add.reduce(weighed_2RK, axis=1) * (1.0 / weighed_2RK.shape[1])
        usual_2K = self._usual_2_2K[kind]
        self._usual_2_2K[kind] = usual_2K * (1.0 - (1 - _USUAL_KEPT) * mean_2K[0]) + mean_2K
