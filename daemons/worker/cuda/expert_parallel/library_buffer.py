"""The calls that the buffers of DeepEP and NIXL EP have in common: NIXL's kernels come from DeepEP's."""

from __future__ import annotations

import threading
from typing import Any

import torch

from radixmesh.daemons.worker.cuda.expert_parallel.buffer_dispatch import BufferShape, Receive, receiver


class LibraryBuffer:
    """Most of a `LowLatencyBuffer`. _buffer: the library's own, connected."""

    buffer: Any
    _shape: BufferShape

    def dispatch(
        self, x_TD: torch.Tensor, slots_TA: torch.Tensor, *, is_split: bool
    ) -> tuple[torch.Tensor, torch.Tensor, object, Receive]:
        shape = self._shape
        x_PXD, counts_P, handle, _, hook = self.buffer.low_latency_dispatch(
            x_TD, slots_TA, shape.max_rows, shape.num_slots, use_fp8=False, return_recv_hook=is_split
        )
        return x_PXD, counts_P, handle, receiver(hook if is_split else None, x_TD, slots_TA)

    def combine(
        self,
        results_PXD: torch.Tensor,
        slots_TA: torch.Tensor,
        weights_TA: torch.Tensor,
        handle: object,
        *,
        is_split: bool,
    ) -> tuple[torch.Tensor, Receive]:
        combined_TD, _, hook = self.buffer.low_latency_combine(
            results_PXD, slots_TA, weights_TA, handle, return_recv_hook=is_split
        )
        return combined_TD, receiver(hook if is_split else None, results_PXD, slots_TA, weights_TA)

    def destroy(self) -> None:
        # On a thread of its own: a rank that is gone may be waited for.
        threading.Thread(target=self.buffer.destroy, name="buffer-leaves", daemon=True).start()
