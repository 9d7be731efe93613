"""Captures of ranks that have met again: one graph at a time, between steps, while requests are served.

Graphs over a transport that connects anew are lost with a generation of the group, and to capture all of them takes
seconds for which every request would wait. Ranks capture together, because the transport registers memory then, and
replay together. So the choice is a function of what the plans' headers say since the ranks met: no rank votes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

# Steps that are padded to a larger graph before their own is captured. A capture takes as long as some ten steps, and
# many sizes are only passed through while requests end.
PADDED_STEPS = 64


class Choice(NamedTuple):
    """rows: of the graph that the step replays. is_new: it is captured ahead of the step."""

    rows: int
    is_new: bool


class LateCaptures:
    """sizes: rows of the graphs that there may be, ascending; none is captured yet."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._missing = list(sizes)
        self._largest = sizes[-1]
        self._captured: list[int] = []
        self._num_padded = Counter[int]()

    def choose(self, num_rows: int) -> Choice:
        """Of the next step, of so many rows, as many as the largest graph has at most. Called for each step that is
        replayed, in their order.

        The first graph is the largest: it serves all steps, and smaller ones reuse its memory.
        """
        if not self._captured:
            return self._add(self._largest)
        best = min(size for size in self._captured if size >= num_rows)
        wanted = min((size for size in self._missing if num_rows <= size < best), default=best)
        if wanted == best:
            return Choice(best, is_new=False)
        self._num_padded[wanted] += 1
        if self._num_padded[wanted] > PADDED_STEPS:
            return self._add(wanted)
        return Choice(best, is_new=False)

    def _add(self, size: int) -> Choice:
        self._missing.remove(size)
        self._captured.append(size)
        return Choice(size, is_new=True)
