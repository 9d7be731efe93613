"""Masks of slots that follow grammars where steps verify drafts: with each mask those of the tokens that it forces.

The host knows the tokens of a step when the next one runs already, so what it finds forced is drafted a step later:
a chain is as long as two steps can take. Masks count only behind the very tokens of the chain, which the device
compares, so a chain that is late, or that sampling left, makes a row yield less, and never anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.step.device_drafter import DeviceDrafter
from radixmesh.daemons.worker.guided import chain
from radixmesh.daemons.worker.guided.chain import ChainMemory, ChainShape, ChainSink
from radixmesh.daemons.worker.guided.mask_memory import SharedMaskMemory
from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths
from radixmesh.kernels.sampling.forced import HEAD, HostChains, confirm_chains, propose_forced, take_chains
from radixmesh.kernels.sampling.masks import NO_MASK, HostMasks, apply_masks
from radixmesh.kernels.sampling.sample import TokenTarget


class SlotChains(ChainMemory, SharedMaskMemory):
    """Two chains of host memory for each slot, and as many for outputs that have left while a thread was at theirs.

    max_drafts: ids that a step drafts of what a grammar forces; 0: chains are single masks. num_processes: fill them,
    each those of every so many slots, in rows of its own that lie together; 0: threads of this process do. tokens_SL:
    prompt and output of all slots, set before the first step.
    """

    tokens_SL: torch.Tensor

    def __init__(
        self,
        device: Device,
        num_slots: int,
        max_rows: int,
        *,
        vocab_size: int,
        max_drafts: int,
        num_processes: int = 0,
    ) -> None:
        assert HEAD == chain.HEAD
        where = device.torch_device
        self._device, self._num_parts = device, max(1, num_processes)
        self.rows_a_part = 2 * -(-num_slots // self._num_parts)
        self.num_rows = self._num_parts * self.rows_a_part
        self._shape = ChainShape(self.num_rows, 2 * max_drafts + 1 if max_drafts else 0, -(-vocab_size // 32))
        self.descriptor = -1
        if num_processes:
            self._ints, self.descriptor = device.shared_ints(self._shape.num_ints, field="num_slots")
        else:
            self._ints = device.locked_ints(self._shape.num_ints, field="num_slots")
        super().__init__(self._ints.numpy(), self._shape)
        self._host = HostChains(*(torch.from_numpy(part) for part in (self.versions, self.heads, self.words)))
        part, num_parts = self.rows_a_part, self._num_parts
        self._free = [list(range(first + part - 1, first - 1, -1)) for first in range(0, num_parts * part, part)]
        self._lock = threading.Lock()
        self.masks_S = torch.full((num_slots + 1,), NO_MASK, dtype=torch.int32, device=where)
        self._taken_T = torch.full((max_rows,), NO_MASK, dtype=torch.int32, device=where)
        self._seen_T = torch.zeros(max_rows, dtype=torch.int32, device=where)
        self._is_guided: npt.NDArray[np.bool_] = np.zeros(num_slots + 1, np.bool_)
        self._admitting: dict[int, int] = {}
        self._unsent: dict[int, int] = {}

    @property
    def shape(self) -> Mapping[str, int]:
        return self._shape._asdict()

    def reported(self, rows: IntArray, positions: IntArray) -> None:
        """Nothing is left to do: the device reads them where they are."""

    def sink(self, admit: Admit) -> ChainSink:
        """For an output that is about to be admitted. Raises OVERLOADED where threads hold all memory."""
        with self._lock:
            free = self._free[admit.slot % self._num_parts]
            if not free:
                message = "too many grammars of outputs that are gone are still being followed: retry"
                raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {})
            output = free.pop()
        self.versions[output] = 0
        self._admitting[admit.slot] = output
        return _Output(self, output)

    def admitted(self, admit: Admit) -> None:
        """A request took a slot; it follows a grammar if its sink was asked for just before."""
        output = self._admitting.pop(admit.slot, NO_MASK)
        if output != NO_MASK or self._is_guided[admit.slot]:
            self._is_guided[admit.slot] = output != NO_MASK
            self._unsent[admit.slot] = output

    def send(self) -> None:
        """Brings the slots admitted since to the device, behind all work so far."""
        if not self._unsent:
            return
        numbers = np.array(list(self._unsent.items()), np.int32).T
        self._unsent.clear()
        sent = torch.empty(numbers.size, dtype=torch.int32, device=self._device.torch_device)
        self._device.upload(np.ascontiguousarray(numbers).reshape(-1), sent)
        slots, outputs = sent.view(numbers.shape)
        self.masks_S.index_copy_(0, slots.long(), outputs)

    def is_guided(self, slots: IntArray) -> bool:
        """One of the slots follows a grammar."""
        return bool(self._is_guided[slots].any())

    def apply(
        self,
        logits_TV: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        highest_TS: torch.Tensor | None = None,
    ) -> None:
        """Masks the positions whose mask is there by now, in place. highest_TS: as in apply_masks()."""
        taken_T = self.taken(len(slots))
        take_chains(slots, positions, self.masks_S, self._host, self.tokens_SL, taken_T, self._seen_T)
        apply_masks(logits_TV, taken_T, HostMasks(self._host.words_MW, self._host.versions_M2), highest_TS)

    def settle(
        self, slots: torch.Tensor, positions: torch.Tensor, target: TokenTarget, tokens_SL: torch.Tensor
    ) -> None:
        """Behind sampling: tokens that a mask forbids give way, and masks that have changed meanwhile count as late."""
        confirm_chains(self.taken(len(slots)), self._seen_T, slots, self.masks_S, self._host, target)

    def taken(self, num_positions: int) -> torch.Tensor:
        """Of the last apply(): masks of so many positions, int32."""
        return self._taken_T[:num_positions]

    def warm_up(self, dtype: torch.dtype, vocab_size: int, tokens_SL: torch.Tensor) -> None:
        """Compiles the kernels for logits of `dtype`, with a row of the dummy slot."""
        dummy = torch.full((1,), len(self._is_guided) - 1, dtype=torch.int32, device=self._device.torch_device)
        zero = torch.zeros_like(dummy)
        target = TokenTarget(
            ring_RT=zero[None].clone(), ring_index_1=zero, last_tokens_S=torch.zeros_like(self.masks_S)
        )
        logits_TV = torch.zeros(1, vocab_size, dtype=dtype, device=dummy.device)
        for highest_TS in (None, torch.zeros(1, vocab_size, dtype=torch.int64, device=dummy.device)):
            self.apply(logits_TV, dummy, zero.clone(), highest_TS)
        self.settle(dummy, zero, target, tokens_SL)

    def release(self, output: int) -> None:
        with self._lock:
            self._free[output // self.rows_a_part].append(output)


class _Output(ChainSink):
    def __init__(self, chains: SlotChains, output: int) -> None:
        super().__init__(chains, output)
        self._chains = chains

    def release(self) -> None:
        self._chains.release(self.row)


class ForcedDrafts(DeviceDrafter):
    """Drafts of slots that follow grammars; those of others are `free`'s, None: they have none."""

    def __init__(self, chains: SlotChains, free: DeviceDrafter | None, vocab_size: int) -> None:
        self._chains, self._free, self._vocab_size = chains, free, vocab_size

    def propose(self, inputs: DraftInputs, state: SlotLengths) -> None:
        if self._free is not None:
            self._free.propose(inputs, state)
        chains, has_others = self._chains, self._free is not None
        propose_forced(inputs, state, chains.masks_S, chains._host, self._vocab_size, has_others=has_others)
