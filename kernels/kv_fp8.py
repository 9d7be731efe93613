"""Keys and values stored as FP8 (e4m3): conversion, and rows moved in a pool of that dtype.

number = stored x scale, with a scale for a tensor or for each head; larger numbers than 448 x scale become that one.
Micikevicius et al., FP8 Formats for Deep Learning (2022).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KV_FP8 = torch.float8_e4m3fn
KV_FP8_MAX = 448.0


class KvScales(NamedTuple):
    """float32 [K] each, of the KV heads of a layer: scales of keys and of values."""

    keys_K: torch.Tensor
    values_K: torch.Tensor


def to_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest, clamped to the largest; NaN stays. By itself torch's conversion gives NaN or the largest,
    depending on its version."""
    return rows.float().clamp(-KV_FP8_MAX, KV_FP8_MAX).to(KV_FP8)


def put_rows(tokens_SKd: torch.Tensor, places_N: torch.Tensor, rows_NKd: torch.Tensor) -> None:
    """Writes rows [N, K, d] to indices of a pool plane, converted to its dtype."""
    if tokens_SKd.dtype != KV_FP8:
        tokens_SKd[places_N] = rows_NKd.to(tokens_SKd.dtype)
        return
    # Indexed writes of FP8 are not in every version of torch: the same bits as bytes are.
    tokens_SKd.view(torch.uint8)[places_N] = to_fp8(rows_NKd).view(torch.uint8)


def take_rows(tokens_SKd: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, K, d]: rows of a pool plane as they are stored, without their scales."""
    if tokens_SKd.dtype != KV_FP8:
        return tokens_SKd[places_N].float()
    return tokens_SKd.view(torch.uint8)[places_N].view(KV_FP8).float()
