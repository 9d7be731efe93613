"""The inputs of a step of decodes alone, packed on the host; the device fetches all of them in one kernel.

    [ number of entries | ring index | slots | positions | KV lengths | new tokens | entries (index, page) ... ]

The offset of each part depends on the number of rows alone, so that a graph captured for so many rows finds them.
Parts begin at multiples of 16 bytes, because kernels are specialised by the alignment of their pointers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.runner import DecodeRows
from radixmesh.daemons.worker.step_handle import DeviceEvent
from radixmesh.kernels.fetch_step_inputs import fetch_step_inputs

# Staging slots: the host may launch so many steps ahead before it waits for one of them to be free again.
_STAGING_SLOTS = 16
_ALIGNED = 4  # int32 numbers.
_LINE = 32  # int32 numbers of a cache line: no two staging slots share one.
_RING_INDEX, _HEAD = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeViews:
    """The inputs of a step on the device, int32. tokens: -1 but for rows whose slot was just taken."""

    slots: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    tokens: torch.Tensor
    entries_E2: torch.Tensor
    num_entries_1: torch.Tensor
    ring_index_1: torch.Tensor

    def attention(self, page_tables: torch.Tensor) -> DeviceStep:
        """Inputs of attention."""
        nothing = self.slots[:0]
        return DeviceStep(
            page_tables=page_tables,
            row_slots=self.slots,
            row_positions=self.positions,
            decode_slots=self.slots,
            decode_kv_lens=self.kv_lens,
            chunk_slots=nothing,
            chunk_row_starts=nothing,
            chunk_kv_lens=nothing,
            max_chunk_len=0,
        )


class DecodeBuffer:
    """Device memory for the inputs of one step at a time, and staging slots on the host; steps run on one stream.

    Each `stage` is fetched by one run, or replay, of a step that is launched after it, in the same order.
    max_entries: most page table entries that one step may bring with it.
    """

    def __init__(self, device: Device, *, max_rows: int, dummy_slot: int) -> None:
        self.max_entries = 4 * max_rows + 1024
        self._dummy_slot = dummy_slot
        size = _aligned(_HEAD + 4 * _aligned(max_rows) + 2 * self.max_entries, _LINE)
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device.torch_device)
        self._staging = device.host_ints(_STAGING_SLOTS, size)
        self._ints: list[IntArray] = [slot.numpy() for slot in self._staging]
        self._next_index = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._num_staged = 0
        self._done: list[DeviceEvent | None] = [None] * _STAGING_SLOTS
        self._views: dict[int, DecodeViews] = {}

    def fetch(self, num_rows: int) -> DecodeViews:
        """Launches the fetch of the step's inputs, part of a step of so many rows, behind all work so far."""
        fetch_step_inputs(self._staging, self._next_index, self._buffer, _HEAD + 4 * _aligned(num_rows))
        return self.views(num_rows)

    def views(self, num_rows: int) -> DecodeViews:
        """The inputs of a step of so many rows, padding included: the same memory for every such step."""
        if num_rows not in self._views:
            size = _aligned(num_rows)
            parts = [self._buffer[_HEAD + part * size :][:num_rows] for part in range(4)]
            self._views[num_rows] = DecodeViews(
                slots=parts[0],
                positions=parts[1],
                kv_lens=parts[2],
                tokens=parts[3],
                entries_E2=self._buffer[_HEAD + 4 * size :][: 2 * self.max_entries].view(-1, 2),
                num_entries_1=self._buffer[:1],
                ring_index_1=self._buffer[_RING_INDEX : _RING_INDEX + 1],
            )
        return self._views[num_rows]

    def fence(self, done: DeviceEvent) -> None:
        """The staging slot that was filled last is in use until the event `done`."""
        self._done[(self._num_staged - 1) % _STAGING_SLOTS] = done

    def stage(self, rows: DecodeRows, num_rows: int, tokens: IntArray, entries: IntArray, ring_index: int) -> None:
        """Fills the next staging slot with a step's inputs; waits for the device where all of them are in use.

        num_rows: with rows of padding, which belong to the dummy slot. tokens int32 [rows]: a new last token, or -1.
        entries int32 [at most max_entries, 2]: index in the flat page tables, and page. ring_index: where in the
        token ring the step's tokens go.
        """
        count, size = len(rows.slots), _aligned(num_rows)
        index = self._num_staged % _STAGING_SLOTS
        done, self._done[index] = self._done[index], None
        if done is not None:
            done.wait()
        ints = self._ints[index]
        ints[0], ints[_RING_INDEX] = len(entries), ring_index
        first = _HEAD + 4 * size
        slots, positions, kv_lens, new_tokens = ints[_HEAD:first].reshape(4, size)
        slots[:count], slots[count:] = rows.slots, self._dummy_slot
        positions[:count], positions[count:] = rows.positions, 0
        np.add(rows.positions, 1, out=kv_lens[:count], casting="same_kind")
        kv_lens[count:] = 0
        new_tokens[:count], new_tokens[count:] = tokens, -1
        end = first + 2 * len(entries)
        ints[first:end] = entries.reshape(-1)
        self._num_staged += 1


def _aligned(count: int, of: int = _ALIGNED) -> int:
    return -(-count // of) * of
