"""FlashInfer's kernels behind the seam of attention on a device."""

from __future__ import annotations

import numpy as np
import torch

from radixmesh.daemons.worker.cuda.attention import DeviceAttention, DeviceStep, HostStep, StepAttention
from radixmesh.daemons.worker.cuda.flashinfer_attention import FlashInferAttention


class FlashInferBackend(DeviceAttention):
    """Decode rows are padded to the step's number with rows of the dummy slot, of one token each."""

    is_batch_invariant = False

    def __init__(self, kernels: FlashInferAttention, dummy_slot: int) -> None:
        self.kernels = kernels
        self._dummy_slot = dummy_slot

    def plan(self, step: HostStep) -> str:
        if step.num_rows:
            slots = np.full(step.num_rows, self._dummy_slot, np.int32)
            kv_lens = np.ones(step.num_rows, np.int32)
            count = len(step.decode_slots)
            slots[:count], kv_lens[:count] = step.decode_slots, step.decode_kv_lens
            self.kernels.plan_decode(slots, kv_lens)
        if len(step.chunk_slots):
            self.kernels.plan_extend(step.chunk_slots, step.chunk_lens, step.chunk_kv_lens)
        return ""

    def begin(self, step: DeviceStep, variant: str) -> StepAttention:
        return _FlashInferStep(self.kernels, step)


class _FlashInferStep(StepAttention):
    def __init__(self, kernels: FlashInferAttention, step: DeviceStep) -> None:
        self._kernels = kernels
        self._step = step

    def attend(
        self, query_THd: torch.Tensor, keys_SKd: torch.Tensor, values_SKd: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        out_THd = torch.empty(query_THd.shape, dtype=query_THd.dtype, device=query_THd.device)
        count = self._step.num_decodes
        if count:
            self._kernels.decode(query_THd[:count], keys_SKd, values_SKd, window, out=out_THd[:count])
        if self._step.num_chunks:
            self._kernels.extend(query_THd[count:], keys_SKd, values_SKd, window, out=out_THd[count:])
        return out_THd
