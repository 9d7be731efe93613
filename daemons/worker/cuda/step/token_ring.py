"""A ring of sampled tokens in host memory. The device writes each step's tokens to a row of its own:

    ring       step n   step n + 1   ...   16 rows, one a step

A row is used again only when its step is done; tokens that were not asked for by then are copied out of it first.
"""

from __future__ import annotations

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import Device, DeviceEvent

_NUM_STEPS = 16


class FetchedTokens:
    """Tokens of one step, on the host when the event `done` is."""

    def __init__(self, done: DeviceEvent, row: IntArray) -> None:
        self._done = done
        self._row = row
        self._tokens: IntArray | None = None

    def tokens(self) -> IntArray:
        """int32 [rows], the caller's to keep; waits for them."""
        if self._tokens is None:
            self._done.wait()
            self._tokens = self._row.copy()
        return self._tokens


class TokenRing:
    """rows: int32 [num_steps, max_rows] of host memory that the device writes."""

    def __init__(self, device: Device, *, max_rows: int, num_steps: int = _NUM_STEPS) -> None:
        self.rows = device.host_ints(num_steps, max_rows)
        self._ints: IntArray = self.rows.numpy()
        self._fetched: list[FetchedTokens | None] = [None] * num_steps
        self._index = 0

    def take(self) -> int:
        """The ring index of the next step's tokens: their row of `rows`."""
        self._index = (self._index + 1) % len(self._fetched)
        before, self._fetched[self._index] = self._fetched[self._index], None
        if before is not None:
            before.tokens()
        return self._index

    def fetch(self, count: int, done: DeviceEvent) -> FetchedTokens:
        """The first `count` tokens of the row that was taken last, there when the event `done` is."""
        fetched = FetchedTokens(done, self._ints[self._index, :count])
        self._fetched[self._index] = fetched
        return fetched
