"""Matrices and rows as FP8 numbers (e4m3) with float32 scales: what kernels take, and the plain maths of it.

N features out, K features in, T rows. A number is its FP8 number times the scale of its group. Matrices have groups of
1 x K (an output channel each), 128 x 128 (blocks), or 1 x 128; rows those of 1 x K or 1 x 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128
"""Features in of a group that is no whole row, and features out of a block."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """data_NK FP8, contiguous. scales float32, contiguous: that of weight [n, k] is
    scales[n // group_rows, k // 128], or scales[n // group_rows, 0] where a group is a whole row."""

    data_NK: torch.Tensor
    scales: torch.Tensor
    group_rows: int
    is_grouped: bool

    def __post_init__(self) -> None:
        num_out, num_in = self.data_NK.shape
        columns = -(-num_in // GROUP) if self.is_grouped else 1
        assert self.data_NK.dtype == FP8 and self.data_NK.is_contiguous(), (self.data_NK.dtype, self.data_NK.stride())
        assert self.group_rows in (1, GROUP), self.group_rows
        assert self.scales.shape == (-(-num_out // self.group_rows), columns), self.scales.shape
        assert self.scales.dtype == torch.float32 and self.scales.is_contiguous(), self.scales.dtype

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.data_NK.shape

    def dequantized(self) -> torch.Tensor:
        """float32 [N, K]."""
        num_out, num_in = self.shape
        scales = self.scales.repeat_interleave(self.group_rows, 0)[:num_out]
        return self.data_NK.float() * _over_columns(scales, num_in, self.is_grouped)


class QuantizedRows(NamedTuple):
    """P rows of memory, of which the first num_rows are rows. data_PK FP8, contiguous; scales_PG float32, a column for
    every 128 features (rounded up), or one where a group is a whole row; rows next to each other in a column."""

    data_PK: torch.Tensor
    scales_PG: torch.Tensor
    num_rows: int
    is_grouped: bool

    @property
    def data_TK(self) -> torch.Tensor:
        return self.data_PK[: self.num_rows]

    @property
    def scales_TG(self) -> torch.Tensor:
        return self.scales_PG[: self.num_rows]

    def dequantized(self) -> torch.Tensor:
        """float32 [T, K]."""
        return self.data_TK.float() * _over_columns(self.scales_TG, self.data_PK.shape[1], self.is_grouped)


def quantize_matrix(w_NK: torch.Tensor, *, is_grouped: bool) -> QuantizedMatrix:
    """A scale an output channel, or one a block of 128 x 128 where is_grouped: its largest number becomes 448."""
    w_NK = w_NK.float()
    if not is_grouped:
        rows = quantize_rows_reference(w_NK, is_grouped=False)
        return QuantizedMatrix(rows.data_PK, rows.scales_PG, 1, False)
    num_out, num_in = w_NK.shape
    padded = torch.nn.functional.pad(w_NK, (0, -num_in % GROUP, 0, -num_out % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, padded.shape[1] // GROUP, GROUP)
    scales = scale_of(blocks.abs().amax((1, 3)))
    data = fp8_of(blocks / scales[:, None, :, None]).view(padded.shape)[:num_out, :num_in]
    return QuantizedMatrix(data.contiguous(), scales, GROUP, True)


def quantize_rows_reference(x_TK: torch.Tensor, *, is_grouped: bool) -> QuantizedRows:
    """Each group by its own largest number, in torch."""
    x_TK = x_TK.float()
    num_in = x_TK.shape[1]
    columns = GROUP if is_grouped else num_in
    groups = torch.nn.functional.pad(x_TK, (0, -num_in % columns)).unflatten(1, (-1, columns))
    scales = scale_of(groups.abs().amax(2))
    data = fp8_of(groups / scales[:, :, None]).flatten(1)[:, :num_in]
    scales = scales.t().contiguous().t() if is_grouped else scales
    return QuantizedRows(data.contiguous(), scales, len(x_TK), is_grouped)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """Of groups by their largest magnitude; 1 where all is zero."""
    return torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))


def fp8_of(x: torch.Tensor) -> torch.Tensor:
    """The nearest FP8 numbers of numbers that rounding may have put a little beyond 448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _over_columns(scales: torch.Tensor, num_in: int, is_grouped: bool) -> torch.Tensor:
    return scales.repeat_interleave(GROUP, 1)[:, :num_in] if is_grouped else scales
