"""A tree of drafts that a network grows, level by level, as EAGLE-2 does (Li et al. 2024).

    grow        the drafts that may follow each row of the frontier become candidates; the best of them are the next one
    best        of all candidates those with the highest confidence: never a draft without the one that it follows

Confidence of a draft is the sum of the network's log probabilities on its path. Sampled rows count them with the noise
by which the target will sample, so that what is likely is what that noise is about to pick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.penalties import adjust_logits
from radixmesh.daemons.worker.sampling.philox import NoiseKey, gumbel_noise
from radixmesh.daemons.worker.sampling.sampler import candidates
from radixmesh.daemons.worker.speculation.draft_tree import DraftTree


class Ranked(NamedTuple):
    """Ids that may come next, the likeliest first, and the logs of their probabilities."""

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]


class GrowingTree:
    """Candidates are numbered from 1 in the order in which they come; 0 is the row's last token."""

    def __init__(self, topk: int) -> None:
        self.frontier = [0]
        self._topk = topk
        self._ids, self._parents, self._scores = [0], [0], [0.0]

    def grow(self, ranked: Sequence[Ranked]) -> None:
        """ranked: of each row of the frontier."""
        first = len(self._ids)
        for parent, following in zip(self.frontier, ranked, strict=True):
            self._ids += following.ids.tolist()
            self._parents += [parent] * len(following.ids)
            self._scores += (self._scores[parent] + following.scores).tolist()
        self.frontier = sorted(range(first, len(self._ids)), key=self._order)[: self._topk]

    def path(self, row: int) -> list[int]:
        """Candidates from the first draft to this one."""
        found = []
        while row:
            found.append(row)
            row = self._parents[row]
        return found[::-1]

    def ids(self, rows: Sequence[int]) -> IntArray:
        return np.array([self._ids[row] for row in rows], np.int32)

    def parent(self, row: int) -> int:
        return self._parents[row]

    def best(self, most: int) -> DraftTree:
        """A draft's confidence is at most that of the one it follows, and ties go to the earlier one."""
        chosen = sorted(range(1, len(self._ids)), key=self._order)[:most]
        new_rows = {0: 0, **{row: number for number, row in enumerate(chosen, start=1)}}
        return DraftTree.grown([self._ids[row] for row in chosen], [new_rows[self._parents[row]] for row in chosen])

    def _order(self, row: int) -> tuple[float, int]:
        return -self._scores[row], row


def ranked_rows(rows: FloatArray, inputs: Sequence[SampleInput], most: int) -> list[Ranked]:
    """Of each row of logits, float32 [rows, vocabulary], the `most` ids that the sampler is likeliest to take."""
    found: list[Ranked] = []
    keys: list[NoiseKey] = []
    waiting: list[int] = []
    for logits, sample in zip(rows, inputs, strict=True):
        row = adjust_logits(logits, sample.sampling, sample.prompt_ids, sample.output_ids, sample.suppressed_ids)
        if not np.isfinite(row.max()):
            found.append(Ranked(np.empty(0, np.int64), np.empty(0)))
        elif sample.sampling.is_greedy:
            found.append(Ranked(np.arange(len(row)), row.astype(np.float64)))
        else:
            ids, scores = candidates(row, sample.sampling)
            keys.append(NoiseKey(sample.sampling.seed or 0, sample.position, ids))
            waiting.append(len(found))
            found.append(Ranked(ids, scores))
    for index, noise in zip(waiting, gumbel_noise(keys) if keys else (), strict=True):
        found[index] = Ranked(found[index].ids, found[index].scores + noise)
    return [_likeliest(row, most) for row in found]


def _likeliest(row: Ranked, most: int) -> Ranked:
    """The best of unnormalised scores, normalised."""
    if not len(row.ids):
        return row
    kept = np.argpartition(-row.scores, most)[:most] if most < len(row.ids) else np.arange(len(row.ids))
    kept = kept[np.lexsort((row.ids[kept], -row.scores[kept]))]
    highest = row.scores.max()
    total = highest + np.log(np.exp(row.scores - highest).sum())
    kept = kept[np.isfinite(row.scores[kept])]
    return Ranked(row.ids[kept], row.scores[kept] - total)
