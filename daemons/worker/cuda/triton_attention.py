"""Attention by the project's own kernels: decodes are scheduled on the device, so nothing is planned on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixmesh.daemons.worker.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention import DeviceAttention, DeviceStep, HostStep, StepAttention
from radixmesh.kernels.decode_attention import DecodeWorkspace, paged_decode, plan_decode
from radixmesh.kernels.extend_attention import paged_extend


class TritonAttention(DeviceAttention):
    """windows: those of the model's layers. is_deterministic: chunks are computed row by row, as decodes are."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        page_size: int,
        windows: Sequence[int | None],
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        is_deterministic: bool,
    ) -> None:
        self.is_batch_invariant = is_deterministic
        self.shape = shape
        self.page_size = page_size
        self.workspace = DecodeWorkspace(
            max_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, device, dtype, windows=tuple(set(windows))
        )

    def plan(self, step: HostStep) -> None:
        return

    def begin(self, step: DeviceStep) -> StepAttention:
        if self.is_batch_invariant and step.num_chunks:
            step = _as_decodes(step)
        if step.num_decodes:
            plan_decode(step.decode_kv_lens, self.workspace)
        return _TritonStep(self, step)


class _TritonStep(StepAttention):
    def __init__(self, attention: TritonAttention, step: DeviceStep) -> None:
        self._attention = attention
        self._step = step

    def attend(
        self, query_THd: torch.Tensor, keys_SKd: torch.Tensor, values_SKd: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        step, attention = self._step, self._attention
        out_THd = torch.empty_like(query_THd)
        num_decodes = step.num_decodes
        if num_decodes:
            paged_decode(
                query_THd[:num_decodes],
                keys_SKd,
                values_SKd,
                step.page_tables,
                step.decode_slots,
                step.decode_kv_lens,
                attention.page_size,
                attention.shape.scale,
                window,
                attention.workspace,
                out=out_THd[:num_decodes],
            )
        if step.num_chunks:
            paged_extend(
                query_THd[num_decodes:],
                keys_SKd,
                values_SKd,
                step.page_tables,
                step.chunk_slots,
                step.chunk_row_starts,
                step.chunk_kv_lens,
                attention.page_size,
                attention.shape.scale,
                window,
                step.max_chunk_len,
                out=out_THd[num_decodes:],
            )
        return out_THd


def _as_decodes(step: DeviceStep) -> DeviceStep:
    """Every row of a chunk as a decode of its own: the bits of a row are then those that a decode would give it."""
    starts, lens = step.chunk_row_starts, step.chunk_row_starts.diff()
    where, num_rows = starts.device, step.num_chunk_rows
    # With its size given, nothing has to be read from the device.
    chunk_of_row = torch.arange(step.num_chunks, device=where).repeat_interleave(lens, output_size=num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32, device=where)
    firsts = step.chunk_kv_lens - lens + 1 - starts[:-1]
    return DeviceStep(
        page_tables=step.page_tables,
        decode_slots=torch.cat((step.decode_slots, step.chunk_slots[chunk_of_row])),
        decode_kv_lens=torch.cat((step.decode_kv_lens, rows + firsts[chunk_of_row].to(torch.int32))),
        chunk_slots=step.chunk_slots[:0],
        chunk_row_starts=step.chunk_row_starts[:1],
        chunk_kv_lens=step.chunk_kv_lens[:0],
        num_chunk_rows=0,
        max_chunk_len=0,
    )
