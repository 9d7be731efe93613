"""Attention over a pool that is not as the queries are: of another dtype, or with rows stored longer than heads are.

    query  [T, H, d] of the model's dtype --> inner's dtype, zeros up to the stored size --> inner --> first d, model's
    keys   [S, K, d] of the pool ------------------------> the same memory [S, K, stored]

Zeros in queries and keys add nothing to scores, those in values give outputs that are cut off; the scale stays that of
d. So any attention serves any head_dim up to one that it has kernels for.

Legend: T rows, H heads, K kv heads, d head_dim, S tokens of the pool.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cuda.attention.backend import DeviceAttention, DeviceStep, HostStep, StepAttention


class PoolAttention(DeviceAttention):
    """inner: made for queries of `query_dtype` and for heads of the pool's stored size."""

    def __init__(self, inner: DeviceAttention, query_dtype: torch.dtype) -> None:
        self._query_dtype = query_dtype
        self.inner = inner
        self.is_batch_invariant = inner.is_batch_invariant
        self.captures_chunks = inner.captures_chunks
        self.needs_exact_lengths = inner.needs_exact_lengths

    def reserve(self, num_rows: int) -> None:
        self.inner.reserve(num_rows)

    def reserve_trees(self, num_rows: int, num_positions: int) -> None:
        self.inner.reserve_trees(num_rows, num_positions)

    def variants(self, num_rows: int) -> tuple[str, ...]:
        return self.inner.variants(num_rows)

    def forget(self) -> None:
        self.inner.forget()

    def plan(self, step: HostStep) -> str:
        return self.inner.plan(step)

    def begin(self, step: DeviceStep, variant: str) -> StepAttention:
        return _PoolStep(self.inner.begin(step, variant), self._query_dtype)


class _PoolStep(StepAttention):
    def __init__(self, inner: StepAttention, query_dtype: torch.dtype) -> None:
        self._query_dtype = query_dtype
        self._inner = inner

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
        head_dim, stored_dim = query_THd.shape[2], keys_SKd.stride(1)
        if values_SKd.shape[2] < head_dim:
            # Latents, of which values are a part: no kernel has them padded.
            return self._inner.attend(query_THd.to(self._query_dtype), keys_SKd, values_SKd, window).to(query_THd.dtype)
        if head_dim == stored_dim:
            query = query_THd.to(self._query_dtype)
        else:
            query = query_THd.new_zeros(*query_THd.shape[:2], stored_dim, dtype=self._query_dtype)
            query[..., :head_dim] = query_THd
        out = self._inner.attend(
            query,
            _stored(keys_SKd),
            _stored(values_SKd),
            window,
            sinks_H=sinks_H,
            attention_chunk=attention_chunk,
        )
        return out[..., :head_dim].to(query_THd.dtype)


def _stored(plane_SKd: torch.Tensor) -> torch.Tensor:
    """With the padding of its rows."""
    num_tokens, num_heads, _ = plane_SKd.shape
    size = plane_SKd.stride(1)
    return plane_SKd.as_strided((num_tokens, num_heads, size), (num_heads * size, size, 1))
