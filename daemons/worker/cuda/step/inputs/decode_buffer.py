"""The inputs of a step of decodes alone that yield one token each: slots, positions, KV lengths, new last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.step.inputs.staging_buffer import StagingBuffer
from radixmesh.daemons.worker.runner import DecodeRows
from radixmesh.daemons.worker.step_handle import DeviceEvent

_COLUMNS = 4


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
    """A staging buffer with the columns of such steps."""

    def __init__(self, device: Device, *, max_rows: int, dummy_slot: int) -> None:
        self._staging = StagingBuffer(device, max_rows=max_rows, num_columns=_COLUMNS)
        self.max_entries = self._staging.max_entries
        self._dummy_slot = dummy_slot
        self._views: dict[int, DecodeViews] = {}

    def fetch(self, num_rows: int) -> DecodeViews:
        """Launches the fetch of the step's inputs, part of a step of so many rows, behind all work so far."""
        self._staging.fetch(num_rows)
        return self.views(num_rows)

    def views(self, num_rows: int) -> DecodeViews:
        """The inputs of a step of so many rows, padding included: the same memory for every such step."""
        if num_rows not in self._views:
            parts = [column[:num_rows] for column in self._staging.columns(num_rows)]
            self._views[num_rows] = DecodeViews(
                slots=parts[0],
                positions=parts[1],
                kv_lens=parts[2],
                tokens=parts[3],
                entries_E2=self._staging.entries_E2(num_rows),
                num_entries_1=self._staging.num_entries_1,
                ring_index_1=self._staging.ring_index_1,
            )
        return self._views[num_rows]

    def fence(self, done: DeviceEvent) -> None:
        """The staging slot that was filled last is in use until the event `done`."""
        self._staging.fence(done)

    def stage(
        self, rows: DecodeRows, num_rows: int, tokens: IntArray | None, entries: IntArray, ring_index: int
    ) -> None:
        """Fills the next staging slot with a step's inputs; waits for the device where all of them are in use.

        num_rows: with rows of padding, which belong to the dummy slot. tokens int32 [rows]: a new last token, or -1;
        None: no row has one.
        entries, ring_index: as of `StagingBuffer.stage`.
        """
        count = len(rows.slots)
        slots, positions, kv_lens, new_tokens = self._staging.stage(num_rows, entries, ring_index)
        slots[:count], positions[:count] = rows.slots, rows.positions
        np.add(rows.positions, 1, out=kv_lens[:count], casting="same_kind")
        if count < len(slots):
            slots[count:], positions[count:], kv_lens[count:] = self._dummy_slot, 0, 0
        new_tokens[:] = -1
        if tokens is not None:
            new_tokens[:count] = tokens
