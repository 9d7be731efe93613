"""Shapes of the steps that verify drafts: which are captured, and which one a step runs in.

    plain     a position a row            where steps may draft nothing
    ragged    positions of all rows       rows have any number of them: chains found in a row's own text, or by the host
    even      as many of each row         chains of a network, which drafts them for all rows at once, level by level
    whole     all drafts of each row      trees, and steps that draft in any case

A captured step of 64 rows and 128 positions has room for any rows with 64 drafts between them: a ragged step needs no
other graphs than those of some numbers of positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.speculation.adaptive import RowLengths
from radixmesh.daemons.worker.speculation.step_costs import Size

_LEAST_RATIO = 1.2
"""From one number of positions that is captured to the next: steps between them have padding."""


class DraftLayout(Enum):
    RAGGED = auto()
    EVEN = auto()
    WHOLE = auto()


class StepShape(NamedTuple):
    """num_rows: with padding. num_positions: the most of a row. size: positions of all rows."""

    num_rows: int
    num_positions: int
    size: int

    @classmethod
    def even(cls, num_rows: int, num_positions: int) -> StepShape:
        """Each row has as many."""
        return cls(num_rows, num_positions, num_rows * num_positions)

    @property
    def variant(self) -> str:
        """Of its graph, among those of so many rows."""
        return f"{self.num_positions}:{self.size}"


class VerifyShapes:
    """graph_rows: sizes of the steps that are captured, ascending; none where nothing is. has_plain: steps may draft
    nothing."""

    def __init__(self, graph_rows: Sequence[int], max_drafts: int, layout: DraftLayout, *, has_plain: bool) -> None:
        self.layout, self._max_drafts = layout, max_drafts
        self.captured: list[StepShape] = []
        # Looked up once for each number of rows: there are some dozens of shapes.
        self._fitting: dict[tuple[int, int], list[StepShape]] = {}
        if has_plain:
            self.captured += [StepShape.even(size, 1) for size in graph_rows]
        if layout is DraftLayout.RAGGED:
            most = max(graph_rows, default=0)
            sizes = ragged_sizes(graph_rows, max_drafts)
            self.captured += [StepShape(min(size, most), 1 + max_drafts, size) for size in sizes]
            return
        self.captured += [StepShape.even(size, 1 + max_drafts) for size in graph_rows]
        for num_drafts in self.num_drafts[:-1]:
            self.captured += [StepShape.even(size, 1 + num_drafts) for size in _coarse(graph_rows)]

    @property
    def num_drafts(self) -> list[int]:
        """Of each row, in a step where all have as many, ascending."""
        return even_drafts(self._max_drafts) if self.layout is DraftLayout.EVEN else [self._max_drafts]

    def sizes(self, num_rows: int) -> list[Size]:
        """Numbers of drafts that steps of so many rows may have, as `DraftLengths.use_sizes` takes them."""
        if self.layout is not DraftLayout.RAGGED:
            return [Size(1 + num_drafts, num_rows * num_drafts) for num_drafts in self.num_drafts]
        most, found = num_rows * self._max_drafts, list[Size]()
        for shape in self._drafting(num_rows):
            found.append(Size(shape.size, min(shape.size - num_rows, most)))
            if found[-1].num_drafts == most:
                return found
        return [Size(num_rows + most, most)]

    def of(self, num_rows: int, chosen: RowLengths | None) -> StepShape:
        """Of a step of so many rows. chosen: their drafts, by one of sizes(); None: they have none. A shape that is not
        captured has no padding."""
        if chosen is None:
            return self._smallest(num_rows, 1) or StepShape.even(num_rows, 1)
        if self.layout is not DraftLayout.RAGGED:
            num_positions = 1 + chosen.size.num_drafts // num_rows
            return self._smallest(num_rows, num_positions) or StepShape.even(num_rows, num_positions)
        size = num_rows + int(chosen.by_row.sum())
        exact = StepShape(num_rows, 1 + self._max_drafts, size)
        return next((shape for shape in self._drafting(num_rows) if shape.size >= size), exact)

    def _smallest(self, num_rows: int, num_positions: int) -> StepShape | None:
        return next(iter(self._of_positions(num_rows, num_positions)), None)

    def _drafting(self, num_rows: int) -> list[StepShape]:
        """Captured ragged steps with room for so many rows, and drafts of them, ascending."""
        return self._of_positions(num_rows, 1 + self._max_drafts)

    def _of_positions(self, num_rows: int, num_positions: int) -> list[StepShape]:
        key = num_rows, num_positions
        if key not in self._fitting:
            fitting = [shape for shape in self.captured if shape.num_positions == num_positions]
            fitting = [shape for shape in fitting if shape.num_rows >= num_rows]
            if num_positions > 1:
                fitting = [shape for shape in fitting if shape.size > num_rows]
            self._fitting[key] = sorted(fitting, key=lambda shape: shape.size)
        return self._fitting[key]


def first_positions(shape: StepShape, num_rows: int, num_drafts: int | IntArray) -> IntArray:
    """The first positions of a ragged step's rows, of which the first num_rows have so many drafts. Positions that are
    left go to rows from the last one on, padding that is: no row has more than there may be."""
    sizes = np.zeros(shape.num_rows, np.int32)
    sizes[:num_rows] = np.add(num_drafts, 1)
    left = shape.size - int(sizes.sum())
    assert left >= 0, (shape, num_drafts)
    if left:
        room = (shape.num_positions - sizes)[::-1]
        sizes += np.clip(left - np.cumsum(room) + room, 0, room)[::-1].astype(np.int32)
    return np.cumsum(sizes, dtype=np.int32) - sizes


def even_drafts(max_drafts: int) -> list[int]:
    """Numbers of drafts of each row of an even step: powers of two, and all."""
    return [*(1 << power for power in range(max_drafts.bit_length()) if 1 << power < max_drafts), max_drafts]


def ragged_sizes(graph_rows: Iterable[int], max_drafts: int) -> list[int]:
    """Numbers of positions of ragged steps, ascending: of those of plain steps and of steps with all drafts, for which
    GEMMs are tuned in any case, some that lie apart."""
    sizes = sorted({size * width for size in graph_rows for width in (1, 1 + max_drafts)}, reverse=True)
    kept: list[int] = []
    for size in sizes:
        if size > 1 and (not kept or kept[-1] >= _LEAST_RATIO * size):
            kept.append(size)
    return kept[::-1]


def even_sizes(graph_rows: Sequence[int], max_drafts: int) -> list[int]:
    """Numbers of positions of even steps with drafts, but not all of them."""
    return [size * (1 + num_drafts) for size in _coarse(graph_rows) for num_drafts in even_drafts(max_drafts)[:-1]]


def _coarse(graph_rows: Sequence[int]) -> list[int]:
    """Rows of the even steps that are captured between plain ones and those with all drafts: powers of two, as each
    graph takes time at the start and memory."""
    return [size for size in graph_rows if size.bit_count() == 1 or size == graph_rows[-1]]
