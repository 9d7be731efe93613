"""FlashInfer's kernels behind the seam of attention on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention, DeviceStep, HostStep, StepAttention
from radixmesh.daemons.worker.cuda.attention.prefix_watch import LEAST_SHARED_ROWS, PrefixWatch
from radixmesh.daemons.worker.cuda.flashinfer.attention import FlashInferAttention
from radixmesh.daemons.worker.cuda.flashinfer.shared_prefix import FlashInferSharedPrefix
from radixmesh.daemons.worker.cuda.step.inputs.row_order import RowOrder
from radixmesh.kernels.attention.prefix_groups import PrefixGroup

_SHARED = "shared"


class FlashInferBackend(DeviceAttention):
    """Decode rows are padded to the step's number with rows of the dummy slot, of one token each.

    shared: for steps whose rows share a prefix; None: every row reads its own.
    """

    is_batch_invariant = False
    needs_exact_lengths = True

    def __init__(
        self,
        kernels: FlashInferAttention,
        shared: FlashInferSharedPrefix | None,
        *,
        dummy_slot: int,
        page_size: int,
        order: RowOrder,
    ) -> None:
        self.kernels = kernels
        self.shared = shared
        self.order = order
        self._dummy_slot = dummy_slot
        self._watch = PrefixWatch(page_size)

    def variants(self, num_rows: int) -> tuple[str, ...]:
        return ("", _SHARED) if self.shared is not None and num_rows >= LEAST_SHARED_ROWS else ("",)

    def plan(self, step: HostStep) -> str:
        variant = self._plan_decodes(step) if step.num_rows else ""
        if len(step.chunk_slots):
            self.kernels.plan_extend(step.chunk_slots, step.chunk_lens, step.chunk_kv_lens)
        return variant

    def begin(self, step: DeviceStep, variant: str) -> StepAttention:
        return _FlashInferStep(self, step, is_shared=variant == _SHARED)

    def _plan_decodes(self, step: HostStep) -> str:
        slots = np.full(step.num_rows, self._dummy_slot, np.int32)
        kv_lens = np.ones(step.num_rows, np.int32)
        count = len(step.decode_slots)
        slots[:count], kv_lens[:count] = step.decode_slots, step.decode_kv_lens
        groups = self._watch.look(step).groups if self.shared is not None else []
        # A step of padding alone is about to be captured, in each of its variants.
        if groups or (not count and len(self.variants(step.num_rows)) > 1):
            self._plan_shared(slots, kv_lens, groups)
        if groups:
            return _SHARED
        self.kernels.plan_decode(slots, kv_lens)
        return ""

    def _plan_shared(self, slots: IntArray, kv_lens: IntArray, groups: Sequence[PrefixGroup]) -> None:
        assert self.shared is not None
        order = _grouped(groups, len(slots))
        self.order.send(order)
        sizes = np.array([len(group.rows) for group in groups], np.int32)
        lengths = np.array([group.length for group in groups], np.int32)
        self.shared.plan(slots[order], kv_lens[order], sizes, lengths)


class _FlashInferStep(StepAttention):
    def __init__(self, backend: FlashInferBackend, step: DeviceStep, *, is_shared: bool) -> None:
        self._backend = backend
        self._step = step
        self._is_shared = is_shared

    def attend(
        self,
        query_THd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        window: int | None,
        *,
        sinks_H: torch.Tensor | None = None,
        attention_chunk: int | None = None,
    ) -> torch.Tensor:
        assert sinks_H is None and attention_chunk is None, "refused when the model was loaded"
        out_THd = torch.empty(query_THd.shape, dtype=query_THd.dtype, device=query_THd.device)
        count, kernels = self._step.num_decodes, self._backend.kernels
        if count and self._is_shared:
            shared, order = self._backend.shared, self._backend.order
            assert shared is not None and window is None
            order.unsort(shared.decode(order.sort(query_THd[:count]), keys_SKd, values_SKd), out_THd[:count])
        elif count:
            kernels.decode(query_THd[:count], keys_SKd, values_SKd, window, out=out_THd[:count])
        if self._step.num_chunks:
            kernels.extend(query_THd[count:], keys_SKd, values_SKd, window, out=out_THd[count:])
        return out_THd


def _grouped(groups: Sequence[PrefixGroup], num_rows: int) -> IntArray:
    """All rows as indices, int32 [num_rows]: those of each group side by side, then the others."""
    is_left = np.ones(num_rows, np.bool_)
    for group in groups:
        is_left[group.rows] = False
    return np.concatenate([*(group.rows for group in groups), np.flatnonzero(is_left)]).astype(np.int32)
