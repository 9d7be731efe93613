"""A ring of sampled tokens in host memory. The device writes each step's tokens to a row of its own:

    ring       step n   step n + 1   ...   16 rows, one a step

A row is used again only when its step is done; tokens that were not asked for by then are copied out of it first.
"""

from __future__ import annotations

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle

_NUM_STEPS = 16


class TokenRing:
    """rows: int32 [num_steps, max_rows] of host memory that the device writes."""

    def __init__(self, device: Device, *, max_rows: int, num_steps: int = _NUM_STEPS) -> None:
        self.rows = device.host_ints(num_steps, max_rows)
        self._ints: IntArray = self.rows.numpy()
        self._fetched: list[StepHandle[IntArray] | None] = [None] * num_steps
        self._index = 0

    def take(self) -> int:
        """The ring index of the next step's tokens: their row of `rows`."""
        self._index = (self._index + 1) % len(self._fetched)
        before, self._fetched[self._index] = self._fetched[self._index], None
        if before is not None:
            before.result()
        return self._index

    def fetch(self, count: int, done: DeviceEvent) -> StepHandle[IntArray]:
        """The first `count` tokens of the row that was taken last, int32, the caller's to keep; on the host when the
        event `done` is."""
        row = self._ints[self._index, :count]

        def copy() -> IntArray:
            done.wait()
            return row.copy()

        fetched = self._fetched[self._index] = StepHandle(done, copy)
        return fetched
