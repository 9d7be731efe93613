"""A layer's attention over the KV pool on a CPU: the step's keys and values are written, then all rows attend.

Legend: T rows, H heads, K kv heads, d head_dim, S tokens of the pool.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.model import ModelBatch
from radixmesh.kernels.kv_fp8 import KV_FP8, KvScales, put_rows


def attend_cached(
    batch: ModelBatch,
    layer: int,
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor,
    *,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """[T, H, d] in the dtype of the queries. window, sinks_H, chunk: as of `BatchAttention.attend`.

    In a pool of FP8 every number is quantised when it is written, and scales are applied around the attention: to
    queries, which is the same as to keys, and to the result, which is the same as to values. All of it is row by row,
    so a row's bits still depend on its own sequence alone.
    """
    keys_SKd, values_SKd = batch.kv.tokens("keys", layer), batch.kv.tokens("values", layer)
    places_N, num_rows = batch.kv_slots_N, batch.num_rows
    scales = batch.kv.scales(layer)
    if scales is not None:
        k_TKd = k_TKd.float() * scales.keys_K.reciprocal()[:, None]
        v_TKd = v_TKd.float() * scales.values_K.reciprocal()[:, None]
    if keys_SKd.dtype == KV_FP8:
        put_rows(keys_SKd, places_N, k_TKd[:num_rows])
        put_rows(values_SKd, places_N, v_TKd[:num_rows])
    else:
        keys_SKd.index_copy_(0, places_N, k_TKd[:num_rows].to(keys_SKd.dtype))
        values_SKd.index_copy_(0, places_N, v_TKd[:num_rows].to(values_SKd.dtype))
    if scales is None:
        return batch.attention.attend(q_THd, keys_SKd, values_SKd, window, sinks_H, chunk)
    of_keys_H1, of_values_H1 = _by_query_head(scales, q_THd.shape[1])
    o_THd = batch.attention.attend(q_THd.float() * of_keys_H1, keys_SKd, values_SKd, window, sinks_H, chunk)
    return (o_THd * of_values_H1).to(q_THd.dtype)


def _by_query_head(scales: KvScales, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    group = num_heads // len(scales.keys_K)
    keys_H, values_H = (scale_K.repeat_interleave(group) for scale_K in scales)
    return keys_H[:, None], values_H[:, None]
