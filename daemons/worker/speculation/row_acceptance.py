"""Acceptance of drafts by row and by position: how likely the n-th draft of a row is right, with those before it.

    by slot       of the last drafts at a position how many were right, where those before it were
    usual         the same of all rows, greedy ones and sampled ones apart: what a row that begins is taken for
    at depth n    between what is usual at n, and what the row has at n - 1: rows differ at all positions alike

What a row told counts less with each draft since, and with each step in which it drafted nothing: its text goes on.
S slots, R rows, K positions.
"""

from __future__ import annotations

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
    """Used by one thread."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._positions = np.arange(1, max_drafts + 1, dtype=np.int32)
        self._told_SK, self._right_SK = np.zeros((2, num_slots, max_drafts), np.float64)
        self._usual_told_2K = np.full((2, max_drafts), 1.0)
        self._usual_right_2K = np.full((2, max_drafts), _FIRST)
        self._kind_S: npt.NDArray[np.intp] = np.zeros(num_slots, np.intp)
        # The step, of those that are observed, in which a slot told something last.
        self._told_at_S = np.zeros(num_slots, np.int64)
        self._step = 0

    def admitted(self, slot: int, *, is_sampled: bool) -> None:
        """Another request took the slot: nothing is known of it but whether it is sampled."""
        self._told_SK[slot] = self._right_SK[slot] = 0.0
        self._kind_S[slot], self._told_at_S[slot] = int(is_sampled), self._step

    def passed(self) -> None:
        """A step is over."""
        self._step += 1

    def observe(self, slots: IntArray, counts: IntArray, drafted: IntArray) -> None:
        """Rows yielded `counts` tokens, at least one, and had so many drafts, int32 [R] each. Tells of the positions
        up to the first wrong draft."""
        right_RK = self._positions < counts[:, None]
        told_RK = (self._positions <= counts[:, None]) & (self._positions <= drafted[:, None])
        right_RK &= told_RK
        before_RK, right_before_RK = self._told_SK[slots], self._right_SK[slots]
        surprise_RK = np.abs(right_RK - (right_before_RK + 0.5) / (before_RK + 1.0))
        kept_RK = 1.0 - told_RK * np.maximum(_LOST * surprise_RK, _LEAST_LOST)
        kept_RK *= self._since(slots)[:, None]
        self._told_SK[slots] = before_RK * kept_RK + told_RK
        self._right_SK[slots] = right_before_RK * kept_RK + right_RK
        self._told_at_S[slots] = self._step
        # Requests differ more than the drafts of one: its first ones say more of what is usual.
        weights_RK = told_RK.astype(np.float64) * np.maximum(_PRIOR / (before_RK + _PRIOR), _LEAST_WEIGHT)
        kinds = self._kind_S[slots]
        first = int(kinds[0]) if len(kinds) else 0
        if (kinds == first).all():
            self._add_usual(first, weights_RK, right_RK)
            return
        for kind in (0, 1):
            self._add_usual(kind, weights_RK[kinds == kind], right_RK[kinds == kind])

    def by_position(self, slots: IntArray) -> Floats:
        """[R, K]: how likely the n-th draft of a row and all before it are right. No row's numbers rise."""
        usual_RK = (self._usual_right_2K / self._usual_told_2K)[self._kind_S[slots]]
        since_R1 = self._since(slots)[:, None]
        told_KR, right_KR = (self._told_SK[slots] * since_R1).T, (self._right_SK[slots] * since_R1).T
        likely_KR = np.empty_like(told_KR)
        prior_R = usual_RK[:, 0]
        for number in range(len(likely_KR)):
            if number:
                prior_R = 0.5 * (usual_RK[:, number] + likely_KR[number - 1])
            likely_KR[number] = (right_KR[number] + _PRIOR * prior_R) / (told_KR[number] + _PRIOR)
        return np.cumprod(likely_KR, axis=0, dtype=np.float64).T

    def _since(self, slots: IntArray) -> Floats:
        """Weight of what a row has told: it has drafted nothing for a while."""
        part_R: Floats = np.exp2((self._told_at_S[slots] - self._step) / _HALF_LIFE)
        return part_R

    def _add_usual(self, kind: int, weights_RK: Floats, right_RK: npt.NDArray[np.bool_]) -> None:
        """A step counts once, however many rows it has."""
        if not len(weights_RK):
            return
        told_K = weights_RK.mean(axis=0)
        kept_K = 1 - (1 - _USUAL_KEPT) * told_K
        self._usual_told_2K[kind] = self._usual_told_2K[kind] * kept_K + told_K
        self._usual_right_2K[kind] = self._usual_right_2K[kind] * kept_K + (weights_RK * right_RK).mean(axis=0)
