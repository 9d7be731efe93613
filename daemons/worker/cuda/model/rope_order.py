"""RoPE of any kind as the kernels compute it, by the order of the numbers within a head.

Kernels turn the pairs (x[i], x[i + d/2]) of a whole head. Scores do not change when queries and keys are reordered
alike, so the rows of their projections are reordered once such that every pair lies there; numbers without a pair lie
between, with an angle of 0.

Legend: P positions, H heads, K kv heads, d head_dim, h pairs that RoPE turns.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.daemons.worker.models.rope_config import RopeConfig
from radixmesh.kernels.fp8.quantized import GROUP, QuantizedMatrix
from radixmesh.kernels.rope_kv import RopeAngles


def head_order(head_dim: int, rope: RopeConfig | None) -> torch.Tensor | None:
    """int64 [d]: which number of a head comes at each index; None where all stay at theirs."""
    if rope is None or (not rope.is_interleaved and rope.rotary_dim in (None, head_dim)):
        return None
    rotary_dim = rope.rotary_dim or head_dim
    turned, rest = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    first, second = (turned[0::2], turned[1::2]) if rope.is_interleaved else turned.chunk(2)
    rest_first, rest_second = rest.chunk(2) if len(rest) else (rest, rest)
    return torch.cat((first, rest_first, second, rest_second))


def angle_table(head_dim: int, rope: RopeConfig | None, num_positions: int, device: torch.device) -> RopeAngles:
    """[P, d/2] each, for heads in `head_order`; angles of 0 without RoPE."""
    if rope is None:
        ones = torch.ones(num_positions, head_dim // 2, device=device)
        return RopeAngles(ones, torch.zeros_like(ones))
    cos, sin = RopeTable(head_dim, rope, device).all(num_positions)
    missing = head_dim // 2 - cos.shape[1]
    if missing:
        ones = cos.new_ones(len(cos), missing)
        cos, sin = torch.cat((cos, ones), dim=1), torch.cat((sin, torch.zeros_like(ones)), dim=1)
    return RopeAngles(cos.contiguous(), sin.contiguous())


def row_order(config: DecoderConfig, rope: RopeConfig | None, device: torch.device) -> torch.Tensor | None:
    """int64 [(H + K) d]: the same for all query and key heads side by side."""
    order_d = head_order(config.head_dim, rope)
    if order_d is None:
        return None
    starts = torch.arange(config.num_heads + config.num_kv_heads) * config.head_dim
    return (starts[:, None] + order_d).flatten().to(device)


def reorder(rows: torch.Tensor, order: torch.Tensor) -> None:
    """Reorders the first rows of a tensor, in place."""
    rows[: len(order)] = rows[order]


def reordered(matrix: QuantizedMatrix, order: torch.Tensor) -> QuantizedMatrix:
    """The same with a scale for each row: blocks of 128 rows may not stay together."""
    data, scales = matrix.data_NK.view(torch.uint8).clone(), matrix.scales
    if matrix.group_rows == GROUP:
        scales = scales.repeat_interleave(GROUP, 0)[: len(data)]
    scales = scales.clone()
    reorder(data, order)
    reorder(scales, order)
    return QuantizedMatrix(data.view(matrix.data_NK.dtype), scales.contiguous(), 1, matrix.is_grouped)
