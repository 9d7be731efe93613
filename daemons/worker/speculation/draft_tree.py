"""Drafts of a row as a tree: several tokens may follow the same one, and at most one path of them is accepted.

    last token       0                rows      0  1  2  3  4  5
              a      |  d             ids       .  a  b  c  d  e
            b   c    |  e             parents  -1  0  1  1  0  4
                                      runs      [0  1  2] [3] [4  5]

Rows are in preorder: a row's descendants follow it before anything else does. So a tree falls into runs of rows, each
of which follows the one before it, and a chain is a tree of one run. A run behind its path is an ordinary piece of a
sequence: attention gets it with the KV slots of that path, in which no other branch is. That is the tree's mask, and it
leaves every key where it lies in a sequence without drafts, on which a row's bits depend.

SpecInfer (Miao et al. 2024) verifies trees of drafts; EAGLE-2 (Li et al. 2024) grows them by confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray


class TreeShape(NamedTuple):
    """topk: drafts that may follow a draft, and those of a level that others follow. num_steps: levels."""

    topk: int
    num_steps: int

    @property
    def tokens_per_row(self) -> int:
        """Of the network, behind the last token: the last level is only predicted."""
        return self.topk * (self.num_steps - 1)

    @property
    def num_candidates(self) -> int:
        """Drafts among which those of a row are chosen."""
        return self.topk + (self.num_steps - 1) * self.topk**2


class Run(NamedTuple):
    """Rows [first, first + length) of a tree, each the parent of the next. path: rows from the root to the last one."""

    first: int
    length: int
    path: IntArray


class DraftTree(NamedTuple):
    """ids int32 [n]: drafts. parents int32 [n + 1]: of the row's last token, -1, and of the drafts: the row that each
    follows, 0 for the last token and n for the n-th draft. In preorder."""

    ids: IntArray
    parents: IntArray

    @staticmethod
    def chain(ids: IntArray) -> DraftTree:
        """Each draft follows the one before it."""
        return DraftTree(ids, np.arange(-1, len(ids), dtype=np.int32))

    @staticmethod
    def grown(ids: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """From drafts in any order in which a parent comes before its children; parents: as those of a tree, of the
        drafts alone. Of drafts with one parent the first one begins the longer run."""
        children: list[list[int]] = [[] for _ in range(len(ids) + 1)]
        for row, parent in enumerate(parents, start=1):
            assert 0 <= parent < row, (row, parent)
            children[parent].append(row)
        order, waiting = [], [0]
        while waiting:
            row = waiting.pop()
            order.append(row)
            waiting.extend(reversed(children[row]))
        new_rows = np.empty(len(order), np.int32)
        new_rows[order] = np.arange(len(order))
        of_drafts = [new_rows[parents[row - 1]] for row in order[1:]]
        return DraftTree(np.array([ids[row - 1] for row in order[1:]], np.int32), np.array([-1, *of_drafts], np.int32))

    @property
    def is_chain(self) -> bool:
        return bool((self.parents == np.arange(-1, len(self.ids))).all())

    def cut(self, most: int, vocab_size: int) -> DraftTree:
        """At most `most` drafts, without those outside the vocabulary, which have no embedding, and those behind."""
        ids = self.ids[:most]
        is_token = (ids >= 0) & (ids < vocab_size)
        if is_token.all():
            return self if len(ids) == len(self.ids) else DraftTree(ids, self.parents[: len(ids) + 1])
        is_kept = np.concatenate(([True], is_token))
        for row in range(1, len(is_kept)):
            is_kept[row] &= is_kept[self.parents[row]]
        new_rows = np.cumsum(is_kept) - 1
        parents = new_rows[self.parents[1 : len(is_kept)]][is_kept[1:]]
        return DraftTree(ids[is_kept[1:]], np.concatenate(([-1], parents)).astype(np.int32))


def runs(parents: IntArray) -> list[Run]:
    """Runs of a tree, in the order of their rows. parents: of all rows, the root's -1."""
    found, path = [], [0]
    first = 0
    for row in range(1, len(parents)):
        parent = int(parents[row])
        if parent != row - 1:
            found.append(Run(first, row - first, np.array(path, np.int32)))
            first = row
            del path[path.index(parent) + 1 :]
        path.append(row)
    found.append(Run(first, len(parents) - first, np.array(path, np.int32)))
    return found
