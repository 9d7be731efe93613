"""Progress of loading weights, told in the log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.tensor_index import DTYPE_TO_BYTES, TensorEntry
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice

_log = get_logger(__name__)

_EVERY_S = 2.0


class LoadProgress:
    """A line of log every two seconds, and none where all takes less. clock: seconds."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = total_bytes
        self.num_bytes = 0
        self._clock = clock
        self._started = self._told = clock()
        self._told_bytes = 0

    def read(self, num_bytes: int) -> None:
        """That many more bytes were read."""
        self.num_bytes += num_bytes
        now = self._clock()
        if now - self._told < _EVERY_S:
            return
        _log.info(
            "weights_loading",
            bytes=self.num_bytes,
            total_bytes=self.total_bytes,
            percent=round(100 * self.num_bytes / max(self.total_bytes, 1)),
            # Since the line before.
            bytes_per_s=round((self.num_bytes - self._told_bytes) / (now - self._told)),
            seconds=round(now - self._started, 1),
        )
        self._told, self._told_bytes = now, self.num_bytes


def stored_bytes(entry: TensorEntry, cut: TensorSlice | None = None) -> int:
    """Of a tensor in its file, or of a share."""
    if entry.parts:
        return sum(stored_bytes(part) for _, part in entry.parts)
    shape = list(entry.shape)
    if cut is not None:
        shape[cut.dim] = cut.length
    return math.prod(shape) * DTYPE_TO_BYTES[entry.dtype]
