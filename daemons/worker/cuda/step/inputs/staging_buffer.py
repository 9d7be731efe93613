"""The inputs of a step of decodes alone, packed on the host; the device fetches all of them in one kernel.

    [ number of entries | ring index | column 0 | column 1 | ... | entries (index, page) ... ]

The offset of each part depends on the number of rows alone, so that a graph captured for so many rows finds them.
Parts begin at multiples of 16 bytes, because kernels are specialised by the alignment of their pointers.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.step_handle import DeviceEvent
from radixmesh.kernels.fetch_step_inputs import fetch_step_inputs

# Staging slots: the host may launch so many steps ahead before it waits for one of them to be free again.
_STAGING_SLOTS = 16
_ALIGNED = 4  # int32 numbers.
_LINE = 32  # int32 numbers of a cache line: no two staging slots share one.
_RING_INDEX, _HEAD = 4, 8


class StagingBuffer:
    """Device memory for the inputs of one step at a time, and staging slots on the host; steps run on one stream.

    Each `stage` is fetched by one run, or replay, of a step that is launched after it, in the same order.
    max_entries: most page table entries that one step may bring with it.
    """

    def __init__(self, device: Device, *, max_rows: int, num_columns: int) -> None:
        self.max_entries = 4 * max_rows + 1024
        self._num_columns = num_columns
        size = _aligned(_HEAD + num_columns * _aligned(max_rows) + 2 * self.max_entries, _LINE)
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device.torch_device)
        self._staging = device.host_ints(_STAGING_SLOTS, size)
        self._ints: list[IntArray] = [slot.numpy() for slot in self._staging]
        self._next_index = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._num_staged = 0
        self._done: list[DeviceEvent | None] = [None] * _STAGING_SLOTS

    def fetch(self, num_rows: int) -> None:
        """Launches the fetch of the step's inputs, part of a step of so many rows, behind all work so far."""
        fetch_step_inputs(self._staging, self._next_index, self._buffer, _HEAD + self._num_columns * _aligned(num_rows))

    def columns(self, num_rows: int) -> torch.Tensor:
        """The columns of a step of so many rows, int32 [columns, >= rows] on the device: the same memory each time."""
        size = _aligned(num_rows)
        return self._buffer[_HEAD:][: self._num_columns * size].view(self._num_columns, size)

    def entries_E2(self, num_rows: int) -> torch.Tensor:
        """Room for all entries; the first `num_entries_1` count."""
        return self._buffer[_HEAD + self._num_columns * _aligned(num_rows) :][: 2 * self.max_entries].view(-1, 2)

    @property
    def num_entries_1(self) -> torch.Tensor:
        return self._buffer[:1]

    @property
    def ring_index_1(self) -> torch.Tensor:
        return self._buffer[_RING_INDEX : _RING_INDEX + 1]

    def fence(self, done: DeviceEvent) -> None:
        """The staging slot that was filled last is in use until the event `done`."""
        self._done[(self._num_staged - 1) % _STAGING_SLOTS] = done

    def stage(self, num_rows: int, entries: IntArray, ring_index: int) -> IntArray:
        """The columns of the next staging slot, int32 [columns, >= rows], for the caller to fill before the launch;
        waits for the device where all slots are in use.

        entries int32 [at most max_entries, 2]: index in the flat page tables, and page. ring_index: where in the token
        ring the step's tokens go.
        """
        size = _aligned(num_rows)
        index = self._num_staged % _STAGING_SLOTS
        done, self._done[index] = self._done[index], None
        if done is not None:
            done.wait()
        ints = self._ints[index]
        ints[0], ints[_RING_INDEX] = len(entries), ring_index
        first = _HEAD + self._num_columns * size
        ints[first : first + 2 * len(entries)] = entries.reshape(-1)
        self._num_staged += 1
        return ints[_HEAD:first].reshape(self._num_columns, size)


def _aligned(count: int, of: int = _ALIGNED) -> int:
    return -(-count // of) * of
