"""A step's integers, packed on the host so that one copy brings them to the device, and seen there as views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.attention import DeviceStep, HostStep
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.runner import DecodeRows, Segment


class StepBuffer:
    """int32 memory on the device for the numbers of one step; steps follow each other on one stream.

    The decode rows come first, at places that graphs know: [max_rows] slots, then [max_rows] positions, then [max_rows]
    KV lengths. What is particular to a step with chunks follows.
    """

    def __init__(self, device: Device, *, max_rows: int, max_tokens: int, dummy_slot: int) -> None:
        self.max_tokens = max_tokens
        self._device = device
        self._max_rows = max_rows
        self._dummy_slot = dummy_slot
        # Chunk rows: ids, positions, slots; chunks: slots, starts, lengths, last rows; each at most a token's worth.
        self._buffer = torch.zeros(3 * max_rows + 7 * max_tokens + 64, dtype=torch.int32, device=device.torch_device)
        self._head = np.zeros(3 * max_rows, np.int32)

    def decode_views(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """slots, positions, KV lengths of the first rows: the same memory for every step."""
        size = self._max_rows
        return self._buffer[:num_rows], self._buffer[size : size + num_rows], self._buffer[2 * size :][:num_rows]

    def upload(self, step: HostStep, rows: DecodeRows, segments: Sequence[Segment]) -> StepViews:
        """Sends a step's numbers behind all work so far."""
        size, count = self._max_rows, len(rows.slots)
        head = self._head.copy()
        head[:size] = self._dummy_slot
        head[:count], head[size : size + count] = rows.slots, rows.positions
        head[2 * size : 2 * size + count] = step.decode_kv_lens
        if not segments:
            self._device.upload(head, self._buffer)
            return StepViews(self, step, {})
        lens = step.chunk_lens
        starts = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(lens, out=starts[1:])
        firsts = np.repeat(step.chunk_kv_lens - lens - starts[:-1], lens)
        parts = {
            "ids": np.concatenate([segment.ids for segment in segments]),
            "positions": np.arange(starts[-1], dtype=np.int32) + firsts,
            "slots": np.repeat(step.chunk_slots, lens),
            "chunk_slots": step.chunk_slots,
            "chunk_row_starts": starts,
            "chunk_kv_lens": step.chunk_kv_lens,
        }
        places, first = {}, len(head)
        for name, part in parts.items():
            places[name] = (first, first + len(part))
            first += len(part)
        self._device.upload(np.concatenate([head, *parts.values()]).astype(np.int32, copy=False), self._buffer)
        return StepViews(self, step, {name: self._buffer[a:b] for name, (a, b) in places.items()})


class StepViews:
    """A step's numbers on the device. `chunks`: by name, those of the chunk rows and the chunks."""

    def __init__(self, buffer: StepBuffer, step: HostStep, chunks: dict[str, torch.Tensor]) -> None:
        self._step = step
        self._chunks = chunks
        self.decode_slots, self.decode_positions, self.decode_kv_lens = buffer.decode_views(step.num_rows)

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def rows(self, last_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, positions, slots of all rows, int32 [T]. Decode rows take what was drawn for their slot last."""
        ids = last_tokens.index_select(0, self.decode_slots)
        if not self._chunks:
            return ids, self.decode_positions, self.decode_slots
        chunks = self._chunks
        return (
            torch.cat((ids, chunks["ids"])),
            torch.cat((self.decode_positions, chunks["positions"])),
            torch.cat((self.decode_slots, chunks["slots"])),
        )

    def attention(self, page_tables: torch.Tensor) -> DeviceStep:
        """What attention needs."""
        nothing = self.decode_slots[:0]
        return DeviceStep(
            page_tables=page_tables,
            decode_slots=self.decode_slots,
            decode_kv_lens=self.decode_kv_lens,
            chunk_slots=self._chunks.get("chunk_slots", nothing),
            chunk_row_starts=self._chunks.get("chunk_row_starts", nothing),
            chunk_kv_lens=self._chunks.get("chunk_kv_lens", nothing),
            num_chunk_rows=int(self._step.chunk_lens.sum()),
            max_chunk_len=int(self._step.chunk_lens.max(initial=0)),
        )


def host_step(rows: DecodeRows, segments: Sequence[Segment], num_rows: int, admissions: int = 0) -> HostStep:
    """Lengths of a step. `num_rows`: decode rows with padding."""
    return HostStep(
        num_rows=num_rows,
        page_tables=rows.page_tables,
        admissions=admissions,
        decode_slots=rows.slots,
        decode_kv_lens=rows.positions + 1,
        chunk_slots=_ints(segment.slot for segment in segments),
        chunk_lens=_ints(len(segment.ids) for segment in segments),
        chunk_kv_lens=_ints(segment.start + len(segment.ids) for segment in segments),
    )


def _ints(values: object) -> IntArray:
    return np.fromiter(values, np.int32)  # type: ignore[call-overload, no-any-return]
