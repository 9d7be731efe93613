"""Attention by plain torch, sequence after sequence: slow, on any device, and what the others are compared with."""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention, DeviceStep, HostStep, StepAttention
from radixmesh.kernels.attention.split_pieces import with_tail
from radixmesh.kernels.kv_fp8 import take_rows


class TorchAttention(DeviceAttention):
    """float32 inside; reads lengths on the host, so it cannot be captured."""

    is_batch_invariant = False

    def __init__(self, shape: AttentionShape, *, page_size: int) -> None:
        self.shape = shape
        self.page_size = page_size

    def plan(self, step: HostStep) -> str:
        return ""

    def begin(self, step: DeviceStep, variant: str) -> StepAttention:
        return _TorchStep(self, step)


class _TorchStep(StepAttention):
    def __init__(self, attention: TorchAttention, step: DeviceStep) -> None:
        self._attention = attention
        self._step = step
        # (first row, rows, slot, kv length) of every sequence.
        decodes = zip(step.decode_slots.tolist(), step.decode_kv_lens.tolist(), strict=True)
        self._sequences = [(row, 1, slot, kv_len) for row, (slot, kv_len) in enumerate(decodes) if kv_len]
        starts = step.chunk_row_starts.tolist()
        chunks = zip(step.chunk_slots.tolist(), step.chunk_kv_lens.tolist(), strict=True)
        for index, (slot, kv_len) in enumerate(chunks):
            if kv_len:
                self._sequences.append((starts[index], starts[index + 1] - starts[index], slot, kv_len))

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
        out_THv = query_THd.new_zeros(*query_THd.shape[:2], values_SKd.shape[2])
        shape, size = self._attention.shape, self._attention.page_size
        for first, num_rows, slot, kv_len in self._sequences:
            positions = torch.arange(kv_len, device=query_THd.device)
            kv_indices = self._step.page_tables[slot, positions // size].long() * size + positions % size
            if self._step.tails is not None:
                kv_indices = with_tail(kv_indices, positions, self._step.tails, first)
            keys_LHd = take_rows(keys_SKd, kv_indices).repeat_interleave(shape.group_size, dim=1)
            values_LHd = take_rows(values_SKd, kv_indices).repeat_interleave(shape.group_size, dim=1)
            query = query_THd[first : first + num_rows].float()
            scores_HTL = torch.einsum("thd,lhd->htl", query, keys_LHd) * shape.scale
            if shape.softcap is not None:
                scores_HTL = (scores_HTL / shape.softcap).tanh() * shape.softcap
            own = torch.arange(kv_len - num_rows, kv_len, device=query_THd.device)[:, None]
            is_seen = positions[None, :] <= own
            if window is not None:
                is_seen &= positions[None, :] > own - window
            if attention_chunk is not None:
                is_seen &= positions[None, :] >= own // attention_chunk * attention_chunk
            scores_HTL = scores_HTL.masked_fill(~is_seen, float("-inf"))
            if sinks_H is not None:
                scores_HTL = torch.cat((scores_HTL, sinks_H.float()[:, None, None].expand(-1, num_rows, 1)), dim=-1)
            out = torch.einsum("htl,lhd->thd", scores_HTL.softmax(dim=-1)[..., :kv_len], values_LHd)
            out_THv[first : first + num_rows] = out.to(query_THd.dtype)
        return out_THv
