"""One vector of a prompt for embed tasks: its hidden states after the final norm, pooled over any chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import FloatArray
from radixmesh.daemons.worker.registry import Registry
from radixmesh.daemons.worker.runner import Segment

# Rows whose running sums are in memory at a time.
_SUMMED_ROWS = 128


class HiddenPool(ABC):
    """Takes the chunks of each slot's prompt in order, and gives the vector with the last one."""

    @abstractmethod
    def wanted_rows(self, segment: Segment) -> range:
        """Rows of the segment whose hidden states `add` needs; where it needs none it is not called."""

    @abstractmethod
    def add(self, segment: Segment, hidden_WD: FloatArray) -> FloatArray | None:
        """float32 [hidden] with the last chunk of a prompt, else None. hidden_WD: float32 of the wanted rows."""


class MeanPool(HiddenPool):
    """The mean over all positions, added one after the other in float64: chunks change none of its bits."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, npt.NDArray[np.float64]]] = {}

    def wanted_rows(self, segment: Segment) -> range:
        return range(len(segment.ids))

    def add(self, segment: Segment, hidden_WD: FloatArray) -> FloatArray | None:
        num_added, sum_D = self._sums.pop(segment.slot, (0, np.zeros(0)))
        if segment.start == 0:  # Also where a prompt that was aborted has left its sum in the slot.
            num_added, sum_D = 0, np.zeros(hidden_WD.shape[1])
        assert num_added == segment.start, f"slot {segment.slot} goes on at {segment.start} after {num_added} positions"
        num_added, sum_D = num_added + len(hidden_WD), _added_in_order(sum_D, hidden_WD)
        if segment.is_last_chunk:
            return (sum_D / num_added).astype(np.float32)
        self._sums[segment.slot] = (num_added, sum_D)
        return None


class LastPool(HiddenPool):
    """The state of the last position."""

    def wanted_rows(self, segment: Segment) -> range:
        length = len(segment.ids)
        return range(length - 1, length) if segment.is_last_chunk else range(0)

    def add(self, segment: Segment, hidden_WD: FloatArray) -> FloatArray | None:
        last_D: FloatArray = hidden_WD[0]
        return last_D


class FirstPool(HiddenPool):
    """The state of the first position: [CLS] of BERT's kin."""

    def __init__(self) -> None:
        self._first: dict[int, FloatArray] = {}

    def wanted_rows(self, segment: Segment) -> range:
        # Any row of the last chunk, so that it is asked.
        return range(1) if segment.start == 0 or segment.is_last_chunk else range(0)

    def add(self, segment: Segment, hidden_WD: FloatArray) -> FloatArray | None:
        if segment.start == 0:
            self._first[segment.slot] = hidden_WD[0].copy()
        return self._first.pop(segment.slot) if segment.is_last_chunk else None


def hidden_pools() -> Registry[HiddenPool]:
    """The poolings by name."""
    creators: Mapping[str, Callable[[], HiddenPool]] = {"mean": MeanPool, "last": LastPool, "cls": FirstPool}
    return Registry("embed pooling", creators)


def _added_in_order(sum_D: npt.NDArray[np.float64], rows_WD: FloatArray) -> npt.NDArray[np.float64]:
    """sum + rows[0] + rows[1] + ... An accumulation has one order; a plain sum may pair its terms by their number."""
    for first in range(0, len(rows_WD), _SUMMED_ROWS):
        sum_D = np.add.accumulate(np.vstack((sum_D, rows_WD[first : first + _SUMMED_ROWS])), axis=0)[-1]
    return sum_D
