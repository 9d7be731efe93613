"""The numbers of a step of decodes alone, packed on the host, from where the device fetches all of them at once.

    [ number of entries | turn | slots | positions | KV lengths | new tokens | entries (place, page) ... ]

Where each lies depends on the number of rows alone: a graph of so many rows finds them there. Parts begin at multiples
of 16 bytes, by which kernels are specialised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep
from radixmesh.daemons.worker.cuda.device import Device, Mark
from radixmesh.daemons.worker.runner import DecodeRows
from radixmesh.kernels.receive import receive

# Steps may be launched so far ahead without the host waiting for memory to pack the next one's numbers in.
_POSTS = 16
_ALIGNED = 4  # Numbers.
_LINE = 32  # Numbers of a line of a cache, of which two posts have none together.
_TURN, _HEAD = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeViews:
    """A step's numbers on the device, int32. tokens: of rows whose slot was just taken, -1 of the others."""

    slots: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    tokens: torch.Tensor
    entries_E2: torch.Tensor
    num_entries_1: torch.Tensor
    turn_1: torch.Tensor

    def attention(self, page_tables: torch.Tensor) -> DeviceStep:
        """What attention needs."""
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
    """Memory on the device for one step at a time: steps follow each other on one stream.

    Each `send` is received by one run, or replay, of a step that was launched after it, in their order.
    max_entries: of page tables, that one step may bring with it.
    """

    def __init__(self, device: Device, *, max_rows: int, dummy_slot: int) -> None:
        self.max_entries = 4 * max_rows + 1024
        self._dummy_slot = dummy_slot
        size = _aligned(_HEAD + 4 * _aligned(max_rows) + 2 * self.max_entries, _LINE)
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device.torch_device)
        self._posts = device.host_ints(_POSTS, size)
        self._ints: list[IntArray] = [post.numpy() for post in self._posts]
        self._next_post = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._num_sent = 0
        self._over: list[Mark | None] = [None] * _POSTS
        self._views: dict[int, DecodeViews] = {}

    def receive(self, num_rows: int) -> DecodeViews:
        """Part of a step of so many rows: has the device fetch its numbers, behind all work so far."""
        receive(self._posts, self._next_post, self._buffer, _HEAD + 4 * _aligned(num_rows))
        return self.views(num_rows)

    def views(self, num_rows: int) -> DecodeViews:
        """Of a step of so many rows, padding included: the same memory for every such step."""
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
                turn_1=self._buffer[_TURN : _TURN + 1],
            )
        return self._views[num_rows]

    def fence(self, over: Mark) -> None:
        """What was sent last is in use until then."""
        self._over[(self._num_sent - 1) % _POSTS] = over

    def send(self, rows: DecodeRows, num_rows: int, tokens: IntArray, entries: IntArray, turn: int) -> None:
        """Leaves a step's numbers for the device; waits where it is all posts behind.

        num_rows: with rows of padding, of the dummy slot. tokens int32 [rows]: new ones, or -1. entries int32
        [at most max_entries, 2]: place and page.
        """
        count, size = len(rows.slots), _aligned(num_rows)
        place = self._num_sent % _POSTS
        over, self._over[place] = self._over[place], None
        if over is not None:
            over.wait()
        ints = self._ints[place]
        ints[0], ints[_TURN] = len(entries), turn
        first = _HEAD + 4 * size
        slots, positions, kv_lens, new_tokens = ints[_HEAD:first].reshape(4, size)
        slots[:count], slots[count:] = rows.slots, self._dummy_slot
        positions[:count], positions[count:] = rows.positions, 0
        np.add(rows.positions, 1, out=kv_lens[:count], casting="same_kind")
        kv_lens[count:] = 0
        new_tokens[:count], new_tokens[count:] = tokens, -1
        end = first + 2 * len(entries)
        ints[first:end] = entries.reshape(-1)
        self._num_sent += 1


def _aligned(count: int, of: int = _ALIGNED) -> int:
    return -(-count // of) * of
