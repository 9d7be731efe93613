"""The integers of a step with chunks, packed on the host so that one copy brings them to the device.

    rows     | decode rows | chunk 0 | chunk 1 | ... | padding |      ids, positions, slots of each
    ids      | -1: sampled by the device | of the chunks | 0     |

Where they lie depends on a `PromptShape` alone, so a graph that was captured for one finds those of any step in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep, HostStep
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.runner import DecodeRows, Segment

# Parts begin at multiples of so many integers: kernels are compiled anew for pointers that are aligned differently.
_ALIGNMENT = 4


class PromptShape(NamedTuple):
    """Numbers of rows, of decode rows among them and of chunks, each with padding where a graph serves the step."""

    num_rows: int
    num_decodes: int
    num_chunks: int


class SampledRows(NamedTuple):
    """Rows of hidden states from which tokens are sampled, and the slots and positions of these tokens: int32 [N] each.
    ring_index_1: row of the token ring that the tokens go to."""

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    ring_index_1: torch.Tensor


class PromptBuffer:
    """int32 memory on the device for the numbers of one step; steps follow each other on one stream."""

    def __init__(self, device: Device, *, max_slots: int, max_rows: int, dummy_slot: int) -> None:
        self._device = device
        self._dummy_slot = dummy_slot
        # Rows: ids, positions, slots. Decodes: KV lengths. Chunks: three. Sampled rows: three. Then what rounding adds,
        # the ring index, and the chunks that a graph of very few rows has room for.
        size = 3 * max_rows + max_slots + 3 * max_rows + 3 * max_slots + 32 * _ALIGNMENT
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device.torch_device)

    def views(self, shape: PromptShape) -> PromptViews:
        """The same memory for every step of the shape."""
        sizes, offsets = _offsets(shape)
        return PromptViews(shape, *(self._buffer[at : at + size] for at, size in zip(offsets, sizes, strict=False)))

    def upload(
        self,
        shape: PromptShape,
        step: HostStep,
        rows: DecodeRows,
        segments: Sequence[Segment],
        sampled: Sequence[int] = (),
        ring_index: int = 0,
    ) -> SampledRows:
        """Sends a step's numbers behind all work so far. sampled: indexes of the segments whose tokens are sampled,
        after those of the decode rows; all go to row `ring_index` of the token ring."""
        sizes, offsets = _offsets(shape)
        # As an index an empty tuple would take all of them.
        of_chunks = np.array(sampled, np.intp)
        num_sampled = len(rows.slots) + len(sampled)
        end = offsets[-1]
        stride = _rounded(num_sampled)
        packed = np.zeros(end + 3 * stride + 1, np.int32)
        self._fill([packed[at : at + size] for at, size in zip(offsets, sizes, strict=False)], step, rows, segments)
        starts = len(rows.slots) + np.cumsum(step.chunk_lens)
        of_sampled = packed[end:-1].reshape(3, stride)[:, :num_sampled]
        of_sampled[0] = np.concatenate((np.arange(len(rows.slots)), starts[of_chunks] - 1))
        of_sampled[1] = np.concatenate((rows.slots, step.chunk_slots[of_chunks]))
        of_sampled[2] = np.concatenate((rows.positions + 1, step.chunk_kv_lens[of_chunks]))
        packed[-1] = ring_index
        self._device.upload(packed, self._buffer)
        at, slots, positions = (self._buffer[end + i * stride :][:num_sampled] for i in range(3))
        return SampledRows(at, slots, positions, self._buffer[end + 3 * stride :][:1])

    def _fill(self, parts: Sequence[IntArray], step: HostStep, rows: DecodeRows, segments: Sequence[Segment]) -> None:
        ids, positions, slots, kv_lens, chunk_slots, row_starts, chunk_kv_lens = parts
        count, lens = len(rows.slots), step.chunk_lens
        starts = count + np.cumsum(lens, dtype=np.int32) - lens
        end = count + int(lens.sum())
        ids[:count], positions[:count], slots[:count] = -1, rows.positions, rows.slots
        if segments:
            ids[count:end] = np.concatenate([segment.ids for segment in segments])
        positions[count:end] = np.arange(count, end, dtype=np.int32) + np.repeat(
            step.chunk_kv_lens - lens - starts, lens
        )
        slots[count:end] = np.repeat(step.chunk_slots, lens)
        slots[end:] = self._dummy_slot
        kv_lens[:count] = rows.positions + 1
        # Rows of padding are a chunk of KV length 0; chunks of padding have no rows.
        num_chunks = len(lens)
        chunk_slots[:num_chunks], chunk_slots[num_chunks:] = step.chunk_slots, self._dummy_slot
        chunk_kv_lens[:num_chunks] = step.chunk_kv_lens
        row_starts[:num_chunks], row_starts[num_chunks], row_starts[num_chunks + 1 :] = starts, end, len(ids)


class PromptViews:
    """A step's numbers on the device; of all rows, of decode rows, of chunks."""

    def __init__(
        self,
        shape: PromptShape,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        decode_kv_lens: torch.Tensor,
        chunk_slots: torch.Tensor,
        chunk_row_starts: torch.Tensor,
        chunk_kv_lens: torch.Tensor,
    ) -> None:
        self.positions, self.slots = positions, slots
        self._shape = shape
        self._ids = ids
        self._decode_kv_lens = decode_kv_lens
        self._chunks = (chunk_slots, chunk_row_starts, chunk_kv_lens)

    def clamp(self, masks: SlotMasks) -> None:
        """Brings decode rows back to the length that their slots have."""
        masks.clamp(self.slots, self.positions, self._decode_kv_lens, self._ids)

    def ids(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """int32 [rows]. Decode rows take what was sampled for their slot last."""
        return torch.where(self._ids < 0, last_tokens.index_select(0, self.slots), self._ids)

    def attention(self, page_tables: torch.Tensor, max_chunk_len: int) -> DeviceStep:
        """Inputs of attention."""
        chunk_slots, chunk_row_starts, chunk_kv_lens = self._chunks
        return DeviceStep(
            page_tables=page_tables,
            row_slots=self.slots,
            row_positions=self.positions,
            decode_slots=self.slots[: self._shape.num_decodes],
            decode_kv_lens=self._decode_kv_lens,
            chunk_slots=chunk_slots,
            chunk_row_starts=chunk_row_starts,
            chunk_kv_lens=chunk_kv_lens,
            max_chunk_len=max_chunk_len,
        )


def _offsets(shape: PromptShape) -> tuple[list[int], list[int]]:
    """Sizes of the parts of `PromptViews`, their offsets, and the offset behind the last."""
    num_rows, num_decodes, num_chunks = shape
    sizes = [num_rows, num_rows, num_rows, num_decodes, num_chunks, num_chunks + 1, num_chunks]
    return sizes, [0, *accumulate(_rounded(size) for size in sizes)]


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
