"""Attention written as its definition: gather all keys, one softmax. The reading that the others are held to."""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cpu.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlacement,
    AttentionShape,
    BatchAttention,
)
from radixmesh.daemons.worker.models.row_maths import soft_capped


class NaiveAttention(AttentionBackend):
    """One segment after the other, each with the whole matrix of scores: memory grows with length x context."""

    is_batch_invariant = False

    def __init__(self, shape: AttentionShape, placement: AttentionPlacement) -> None:
        self._shape = shape
        self._device = placement.device

    def begin(self, batch: AttentionBatch) -> BatchAttention:
        return _NaiveStep(self._shape, batch, self._device)


class _NaiveStep(BatchAttention):
    def __init__(self, shape: AttentionShape, batch: AttentionBatch, device: torch.device) -> None:
        self._shape = shape
        self._batch = batch
        self._device = device

    def attend(
        self,
        query_THD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        out_THD = torch.zeros_like(query_THD)
        row = 0
        for segment in self._batch.segments:
            rows = slice(row, row + segment.length)
            slots = torch.from_numpy(segment.kv_slots).to(self._device)
            positions = torch.arange(segment.start, segment.start + segment.length, device=self._device)
            out_THD[rows] = self._attend(
                query_THD[rows], keys_SKD[slots], values_SKD[slots], positions, window, sinks_H, chunk
            )
            row += segment.length
        return out_THD

    def _attend(
        self,
        q_THD: torch.Tensor,
        k_LKD: torch.Tensor,
        v_LKD: torch.Tensor,
        at_T: torch.Tensor,
        window: int | None,
        sinks_H: torch.Tensor | None,
        chunk: int | None,
    ) -> torch.Tensor:
        groups = self._shape.group_size
        k_LHD = k_LKD.float().repeat_interleave(groups, dim=1)
        v_LHD = v_LKD.float().repeat_interleave(groups, dim=1)
        scores_HTL = torch.einsum("thd,lhd->htl", q_THD.float() * self._shape.scale, k_LHD)
        if self._shape.softcap is not None:
            scores_HTL = soft_capped(scores_HTL, self._shape.softcap)
        key_at_L = torch.arange(k_LKD.shape[0], device=at_T.device)
        hidden_TL = key_at_L[None, :] > at_T[:, None]
        if window is not None:
            hidden_TL |= key_at_L[None, :] <= at_T[:, None] - window
        if chunk is not None:
            hidden_TL |= key_at_L[None, :] < at_T[:, None] // chunk * chunk
        scores_HTL = scores_HTL.masked_fill(hidden_TL, float("-inf"))
        if sinks_H is not None:
            sinks_HT1 = sinks_H.float()[:, None, None].expand(-1, scores_HTL.shape[1], 1)
            scores_HTL = torch.cat((scores_HTL, sinks_HT1), dim=-1)
        probabilities_HTL = scores_HTL.softmax(dim=-1)[:, :, : k_LKD.shape[0]]
        return torch.einsum("htl,lhd->thd", probabilities_HTL, v_LHD).to(q_THD.dtype)
