"""Masks of the slots that follow grammars: threads of the host send them, beside the steps, to the device.

    host      token n known -> words of the mask of n + 1 -> copied to the device -> its position
    device                    forward of n + 1 --------------------------------> is the position there?  mask, sample
                                                                                            : nothing is yielded

A step is launched before the token that its masks depend on is known. The device looks once, in stream order behind the
forward, whether a mask is there, and waits for none. A mask is sent only when the token of the one before is on the
host, so the device has read that by then: one row of memory an output is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import MaskWords
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory, MaskSink, Rows, SharedMaskMemory
from radixmesh.kernels.sampling.masks import (
    NO_LENGTH,
    NO_MASK,
    GuidedSlots,
    HostMasks,
    apply_masks,
    clamp_positions,
    settle_masks,
    take_masks,
)
from radixmesh.kernels.sampling.sample import TokenTarget

_MAX_GAP = 16  # Rows: a copy's launch takes as long as copying a quarter of a megabyte.


class SlotMasks(MaskMemory, SharedMaskMemory):
    """A row of memory for each slot, and as many for outputs that have left while a thread was at their mask.

    Rows of the host's memory are copied to the same rows of the device's: reading megabytes of masks across the bus
    would take a part of every step.

    num_processes: fill the masks, each those of every so many slots, in rows of its own that lie together; 0: threads
    of this process fill them.
    """

    def __init__(
        self, device: Device, *, num_slots: int, max_rows: int, vocab_size: int, num_processes: int = 0
    ) -> None:
        where = device.torch_device
        self._device, self._num_parts = device, max(1, num_processes)
        rows_a_part = 2 * -(-num_slots // self._num_parts)
        self.num_rows = num_masks = self._num_parts * rows_a_part
        num_words = -(-vocab_size // 32)
        self.descriptor = -1
        if num_processes:
            self._words_MW, self.descriptor = device.shared_ints(num_masks, num_words, field="num_slots")
        else:
            self._words_MW = device.locked_ints(num_masks, num_words, field="num_slots")
        self.words: MaskWords = self._words_MW.numpy()
        self._host = HostMasks(
            words_MW=torch.zeros_like(self._words_MW, device=where),
            positions_M=device.host_ints(num_masks),
        )
        self.positions: IntArray = self._host.positions_M.numpy()
        self.rows_a_part = rows_a_part
        self._free = [list(range(first + rows_a_part - 1, first - 1, -1)) for first in range(0, num_masks, rows_a_part)]
        self._lock = threading.Lock()
        self._state = GuidedSlots(
            masks=torch.full((num_slots + 1,), NO_MASK, dtype=torch.int32, device=where),
            lengths=torch.full((num_slots + 1,), NO_LENGTH, dtype=torch.int32, device=where),
            last_tokens=torch.zeros(num_slots + 1, dtype=torch.int32, device=where),
        )
        self._taken_T = torch.zeros(max_rows, dtype=torch.int32, device=where)
        self._is_guided: npt.NDArray[np.bool_] = np.zeros(num_slots + 1, np.bool_)
        self._has_guided = False
        self._admitting: dict[int, int] = {}
        self._unsent: dict[int, tuple[int, int, int]] = {}

    def sink(self, admit: Admit) -> MaskSink:
        """For an output that is about to be admitted. Raises OVERLOADED where threads hold all memory."""
        with self._lock:
            free = self._free[admit.slot % self._num_parts]
            if not free:
                message = "too many grammars of outputs that are gone are still being followed: retry"
                raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {})
            row = free.pop()
        self.positions[row] = 0
        self._admitting[admit.slot] = row
        return _Row(self, row)

    def admitted(self, admit: Admit) -> None:
        """A request took a slot; it follows a grammar if its sink was asked for just before."""
        row = self._admitting.pop(admit.slot, NO_MASK)
        if row == NO_MASK and not self._is_guided[admit.slot]:
            return
        self._is_guided[admit.slot] = row != NO_MASK
        self._has_guided = bool(self._is_guided.any())
        ids = admit.output_ids if len(admit.output_ids) else admit.prompt_ids
        length = len(admit.prompt_ids) + len(admit.output_ids) if row != NO_MASK else NO_LENGTH
        self._unsent[admit.slot] = row, length, int(ids[-1])

    def send(self) -> None:
        """Brings the slots admitted since to the device, behind all work so far."""
        if not self._unsent:
            return
        numbers = np.array([(slot, *of_slot) for slot, of_slot in self._unsent.items()], np.int32).T
        self._unsent.clear()
        sent = torch.empty(numbers.size, dtype=torch.int32, device=self._device.torch_device)
        self._device.upload(np.ascontiguousarray(numbers).reshape(-1), sent)
        slots, *values = sent.view(numbers.shape)
        for target, of_slots in zip(self._state, values, strict=True):
            target.index_copy_(0, slots.long(), of_slots)

    def is_guided(self, slots: IntArray) -> bool:
        """One of the slots follows a grammar."""
        return self._has_guided and bool(self._is_guided[slots].any())

    def clamp(
        self, slots: torch.Tensor, positions: torch.Tensor, kv_lens: torch.Tensor, ids: torch.Tensor | None = None
    ) -> None:
        """Brings decode rows back to the length that their slots have. Part of captured steps."""
        clamp_positions(slots, positions, kv_lens, self._state.lengths, ids)

    def apply(
        self,
        logits_TV: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        highest_TS: torch.Tensor | None = None,
    ) -> None:
        """Masks the rows whose mask is there, in place; positions become exact. highest_TS: as in apply_masks()."""
        taken_T = self._taken_T[: len(slots)]
        take_masks(slots, positions, self._state, self._host, taken_T)
        apply_masks(logits_TV, taken_T, self._host, highest_TS)

    def settle(
        self, slots: torch.Tensor, positions: torch.Tensor, target: TokenTarget, tokens_SL: torch.Tensor
    ) -> None:
        """Behind sampling: advances the slots whose mask was there, and takes back the tokens of the others."""
        settle_masks(self._taken_T[: len(slots)], slots, positions, self._state, self._host, target, tokens_SL)

    def warm_up(self, dtype: torch.dtype, vocab_size: int, tokens_SL: torch.Tensor) -> None:
        """Compiles the kernels for logits of `dtype`, with a row of the dummy slot, and copies masks once."""
        if not self._has_guided:
            # The first use of the stream beside the steps is slow.
            self._device.send_beside(self._words_MW, self._host.words_MW, [(0, len(self.words))])
        dummy = torch.full((1,), len(self._is_guided) - 1, dtype=torch.int32, device=self._device.torch_device)
        zero = torch.zeros_like(dummy)
        target = TokenTarget(ring_RT=zero[None].clone(), ring_index_1=zero, last_tokens_S=self._state.last_tokens)
        logits_TV = torch.zeros(1, vocab_size, dtype=dtype, device=dummy.device)
        for highest_TS in (None, torch.zeros(1, vocab_size, dtype=torch.int64, device=dummy.device)):
            self.apply(logits_TV, dummy, zero.clone(), highest_TS)
        self.settle(dummy, zero, target, tokens_SL)

    @property
    def shape(self) -> Mapping[str, int]:
        return {"num_rows": self.num_rows, "num_words": self.words.shape[1]}

    def publish(self, rows: Rows, positions: Rows) -> None:
        self._device.send_beside(self._words_MW, self._host.words_MW, _runs_of(rows))
        self.positions[rows] = positions

    def reported(self, rows: IntArray, positions: IntArray) -> None:
        self.publish(rows, positions)

    def release(self, row: int) -> None:
        with self._lock:
            self._free[row // self.rows_a_part].append(row)


class _Row(MaskSink):
    def __init__(self, masks: SlotMasks, row: int) -> None:
        self.memory = self._masks = masks
        self.row = row
        self._words: MaskWords = masks.words[row]

    @property
    def words(self) -> MaskWords:
        return self._words

    def publish(self, position: int) -> None:
        self._masks.publish([self.row], [position])

    def release(self) -> None:
        self._masks.release(self.row)


def _runs_of(rows: Rows) -> list[tuple[int, int]]:
    """Ranges that hold all of the rows, each from its first to behind its last one. Rows between two that are near are
    copied along: those of others are copied once more, behind this, when their own masks are there."""
    ordered = np.sort(np.asarray(rows))
    ends = np.flatnonzero(np.diff(ordered) > _MAX_GAP)
    return list(zip(ordered[[0, *(ends + 1)]].tolist(), (ordered[[*ends, -1]] + 1).tolist(), strict=True))


def yielded(tokens: Sequence[int] | IntArray) -> tuple[IntArray, IntArray]:
    """Tokens of the rows that have one, and 1 or 0 for each row, from tokens of which -1 are none."""
    ids = np.asarray(tokens, np.int32)
    has_token = ids >= 0
    return ids[has_token], has_token.astype(np.int32)
