"""Chains of ids that grammars force, each with the mask of its position, in memory that a device reads where it lies.

    output m     versions[m]  published, begun           chain of version v: c = 2 m + v % 2
    chain c      heads[c]     position, number of ids, ids ...
                 words        of its position, and behind each id: rows from c (1 + max_forced) on

The chain that is published stays as it is while the other one is written, but for what it is made longer by: the number
of its ids is written last. So a writer may end at any moment, and the next one goes on from what is published.
`kernels/sampling/forced.py` reads it, and trusts none of these numbers: another process may have written them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.guided.backend import MaskWords
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory, MaskSink, Rows

HEAD = 2
"""Numbers of a chain before its ids: position, and how many ids there are."""
_MOST_VERSION = (1 << 30) - 1
"""Versions that a process left which wrote nonsense are brought below it."""


class ChainShape(NamedTuple):
    """max_forced: most ids of a chain. num_words: of a mask."""

    num_rows: int
    max_forced: int
    num_words: int

    @property
    def num_ints(self) -> int:
        """Of the memory of all chains."""
        return self.num_rows * (2 + 2 * (HEAD + self.max_forced) + 2 * (1 + self.max_forced) * self.num_words)


class ChainMemory(MaskMemory):
    """ints: int32 [shape.num_ints], zeros. Each output has one writer at a time; outputs of one call differ."""

    def __init__(self, ints: IntArray, shape: ChainShape) -> None:
        self.words, self.versions, self.heads = _cut(ints, shape)
        self.max_forced = shape.max_forced
        self._fence = threading.Lock()

    def begin(self, rows: Rows) -> Rows:
        rows = np.asarray(rows, np.int32)
        self.versions[rows, 1] = begun = self._next(rows)
        self._in_order()
        indexes: IntArray = (2 * rows + begun % 2) * np.int32(1 + self.max_forced)
        return indexes

    def publish(self, rows: Rows, positions: Rows) -> None:
        rows = np.asarray(rows, np.int32)
        begun = self._next(rows)
        chains = 2 * rows + begun % 2
        self.heads[chains, 0], self.heads[chains, 1] = positions, 0
        self._in_order()
        self.versions[rows, 0] = begun
        self.told(rows, positions)

    def move(self, row: int, position: int, num_used: int, num_left: int) -> None:
        """Publishes so many ids that the output's chain has behind its first ones, for the token at `position`. Nobody
        is told."""
        published = int(self.versions[row, 0])
        chain, other, size = 2 * row + published % 2, 2 * row + (published + 1) % 2, 1 + self.max_forced
        self.versions[row, 1] = published + 1
        self._in_order()
        since = chain * size + num_used
        self.words[other * size : other * size + num_left + 1] = self.words[since : since + num_left + 1]
        self.heads[other, HEAD : HEAD + num_left] = self.heads[chain, HEAD + num_used : HEAD + num_used + num_left]
        self.heads[other, 0], self.heads[other, 1] = position, num_left
        self._in_order()
        self.versions[row, 0] = published + 1

    def mask(self, row: int, number: int) -> MaskWords:
        """Of the chain that is published, behind so many of its ids."""
        words: MaskWords = self.words[(2 * row + int(self.versions[row, 0]) % 2) * (1 + self.max_forced) + number]
        return words

    def grow(self, row: int, number: int, token: int) -> None:
        """The chain that is published has this id too, behind so many; mask(row, number + 1) is filled."""
        head = self.heads[2 * row + int(self.versions[row, 0]) % 2]
        head[HEAD + number] = token
        self._in_order()
        head[1] = number + 1

    def told(self, rows: Rows, positions: Rows) -> None:
        """Masks of these outputs were published, of the tokens at these positions."""
        return

    def _next(self, rows: IntArray) -> IntArray:
        begun: IntArray = (self.versions[rows, 0] & _MOST_VERSION) + np.int32(1)
        return begun

    def _in_order(self) -> None:
        """Stores before it come before those behind it, on any processor: a lock's instructions see to that."""
        with self._fence:
            pass


class ChainSink(MaskSink):
    """The chain of one output, of which this is the one writer. forced: its ids."""

    memory: ChainMemory

    def __init__(self, memory: ChainMemory, row: int) -> None:
        self.memory, self.row = memory, row
        self.forced: list[int] = []
        self.is_whole = False
        """Behind its last id the grammar has a choice."""
        self._is_there = False

    @property
    def words(self) -> MaskWords:
        words: MaskWords = self.memory.words[self.memory.begin([self.row])[0]]
        return words

    def publish(self, position: int) -> None:
        self.memory.publish([self.row], [position])
        self.published()

    def published(self) -> None:
        """A mask alone was, of this sink's row: the memory was told of it with those of others."""
        self.forced, self.is_whole, self._is_there = [], False, True

    def foresaw(self, tokens: Sequence[int]) -> bool:
        """The chain begins with these tokens, so that masks behind them are known."""
        return self._is_there and list(tokens) == self.forced[: len(tokens)]

    def go_on(self, position: int, num_tokens: int) -> None:
        """Publishes what is left behind tokens that it foresaw. The memory is still to be told."""
        self.forced = self.forced[num_tokens:]
        self.memory.move(self.row, position, num_tokens, len(self.forced))

    def may_grow(self) -> bool:
        """Nobody knows yet what it ends with, and there is room."""
        return self._is_there and not self.is_whole and len(self.forced) < self.memory.max_forced

    @property
    def last_mask(self) -> MaskWords:
        """Behind the last id."""
        return self.memory.mask(self.row, len(self.forced))

    @property
    def next_mask(self) -> MaskWords:
        """Memory for the mask behind one id more; of a chain that has room."""
        return self.memory.mask(self.row, len(self.forced) + 1)

    def grow(self, token: int) -> None:
        """next_mask is the mask behind this id."""
        self.memory.grow(self.row, len(self.forced), token)
        self.forced.append(token)


def _cut(ints: IntArray, shape: ChainShape) -> tuple[MaskWords, IntArray, IntArray]:
    """words, versions and heads: the same memory. Masks come first, at the start of a page."""
    num_masks, num_heads = 2 * shape.num_rows * (1 + shape.max_forced), 2 * shape.num_rows
    size = num_masks * shape.num_words
    return (
        ints[:size].reshape(num_masks, shape.num_words),
        ints[size : size + num_heads].reshape(shape.num_rows, 2),
        ints[size + num_heads :].reshape(num_heads, HEAD + shape.max_forced),
    )
