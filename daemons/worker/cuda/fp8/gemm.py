"""Backends for GEMMs of FP8 rows with FP8 weights: torch._scaled_mm or the project's Triton kernel.

Legend: T rows, N features out, K features in. Weights are [out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue, GemmProblem
from radixmesh.kernels.fp8.linear import TileConfig, fp8_linear, fp8_linear_reference
from radixmesh.kernels.fp8.quantize_rows import new_quantized
from radixmesh.kernels.fp8.quantized import (
    GROUP,
    QuantizedMatrix,
    QuantizedRows,
    quantize_matrix,
    quantize_rows_reference,
)

_log = get_logger(__name__)

# One for any number of rows, so that a row's sums do not depend on how many others there are.
_FIXED_TILE = TileConfig(rows=64, columns=64, num_warps=4, num_stages=4)
# The library takes 16 bytes at a time.
_LIBRARY_FEATURES, _LIBRARY_ROWS, _LIBRARY_GROUPS = 16, 4, 4
# Rows and features of the GEMM that the library is tried on, and how far bfloat16 may be off.
_TRIED_ROWS, _TRIED_FEATURES, _TRIED_ERROR = (2, 36, 255), 512, 0.01


class Fp8Gemm(ABC):
    """FP8 GEMMs with float32 accumulation."""

    @abstractmethod
    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        """[T, N] in dtype. Rows and matrix have the same groups along K."""


class TorchFp8Gemm(Fp8Gemm):
    """The reference."""

    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        return fp8_linear_reference(rows, w, dtype)


class TritonFp8Gemm(Fp8Gemm):
    """The project's kernel, which takes any groups, sizes and dtypes."""

    def __init__(self, *, use_pdl: bool = False, is_deterministic: bool = False) -> None:
        self._use_pdl = use_pdl
        self._tile = _FIXED_TILE if is_deterministic else None

    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        return self.in_tiles(rows, w, dtype, self._tile)

    def in_tiles(
        self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype, tile: TileConfig | None
    ) -> torch.Tensor:
        return fp8_linear(rows, w, dtype, use_pdl=self._use_pdl, config=tile)


class ScaledMmGemm(Fp8Gemm):
    """torch._scaled_mm, which is cuBLASLt's; `others` for what it does not take. groupings: whether of matrices with
    scales by block (True), by channel (False), or both."""

    def __init__(self, others: Fp8Gemm, groupings: frozenset[bool] = frozenset({False, True})) -> None:
        self._others = others
        self.groupings = groupings

    def takes(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> bool:
        num_out, num_in = w.shape
        if w.is_grouped not in self.groupings or dtype != torch.bfloat16:
            return False
        if w.is_grouped:
            # Columns of scales begin at multiples of 16 bytes.
            is_aligned = rows.data_PK.shape[0] % _LIBRARY_ROWS == 0 and w.scales.shape[1] % _LIBRARY_GROUPS == 0
            return is_aligned and w.group_rows == GROUP and num_out % GROUP == 0 and num_in % GROUP == 0
        return num_out % _LIBRARY_FEATURES == 0 and num_in % _LIBRARY_FEATURES == 0

    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        if not self.takes(rows, w, dtype):
            return self._others.linear(rows, w, dtype)
        # Scales [P, 1] and [1, N], or [P, K / 128] and [K / 128, N / 128]; the right operand column by column, which is
        # how the weight lies.
        out_PN = torch._scaled_mm(
            rows.data_PK,
            w.data_NK.t(),
            scale_a=rows.scales_PG,
            scale_b=w.scales.t(),
            out_dtype=dtype,
            # Groups of 128 are summed apart, which leaves nothing to be hurried.
            use_fast_accum=not w.is_grouped,
        )
        return out_PN[: rows.num_rows]


class TunedFp8Gemm(Fp8Gemm):
    """Our kernel in the table's tiles, or the library. A step takes what was chosen for the next larger of `sizes`
    rows, or for the last."""

    def __init__(
        self,
        library: ScaledMmGemm,
        ours: TritonFp8Gemm,
        table: Mapping[GemmProblem, TileConfig],
        sizes: Sequence[int],
    ) -> None:
        self._library = library
        self._ours = ours
        self._table: dict[tuple[object, ...], TileConfig] = {(*problem,): tile for problem, tile in table.items()}
        self._sizes = sorted(sizes)

    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        num_rows = next((size for size in self._sizes if rows.num_rows <= size), self._sizes[-1])
        tile = self._table.get((num_rows, *w.shape, (w.group_rows, w.is_grouped), GemmEpilogue.PLAIN))
        if tile is None:
            return self._library.linear(rows, w, dtype)
        return self._ours.in_tiles(rows, w, dtype, tile)


def tried_library(ours: Fp8Gemm, device: torch.device) -> ScaledMmGemm:
    """For the groupings of which it computes a small GEMM as it should, which may be none."""
    groupings = set()
    for is_grouped in (False, True):
        try:
            check_small_gemm(ScaledMmGemm(_Refusing()), device, is_grouped=is_grouped)
            groupings.add(is_grouped)
        # Also what CUDA itself reports: if it cannot go on, what comes behind this says so.
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            _log.warning("fp8_library_not_used", scales="block" if is_grouped else "channel", reason=reason)
    return ScaledMmGemm(ours, frozenset(groupings))


def check_small_gemm(gemm: Fp8Gemm, device: torch.device, *, is_grouped: bool) -> None:
    """Raises RuntimeError, or what the library raises, where a GEMM is not what it should be."""
    generator = torch.Generator(device).manual_seed(0)

    def random(num_rows: int) -> torch.Tensor:
        return torch.randn(num_rows, _TRIED_FEATURES, device=device, generator=generator)

    # Channels, blocks and rows that differ much: scales that were mixed up show.
    columns = torch.linspace(0.1, 10, _TRIED_FEATURES, device=device)
    w = quantize_matrix(random(_TRIED_FEATURES) * columns[:, None] * columns.flip(0), is_grouped=is_grouped)
    for num_rows in _TRIED_ROWS:
        by_row = torch.linspace(0.1, 10, num_rows, device=device)[:, None]
        rows = _padded(quantize_rows_reference(random(num_rows) * by_row / columns, is_grouped=is_grouped))
        want = fp8_linear_reference(rows, w, torch.float32)
        got = gemm.linear(rows, w, torch.bfloat16).float()
        error = float((got - want).norm() / want.norm())
        if not error < _TRIED_ERROR:
            raise RuntimeError(f"a GEMM of {num_rows} rows is off by {error:.3g}")


def _padded(rows: QuantizedRows) -> QuantizedRows:
    """As the kernels leave them."""
    num_rows, num_features = rows.data_TK.shape
    padded = new_quantized(num_rows, num_features, rows.data_PK.device, is_grouped=rows.is_grouped)
    # Padding means nothing, but could be NaN, which is slower on some devices.
    padded.data_PK.view(torch.uint8).zero_()
    padded.scales_PG.fill_(1.0)
    padded.data_TK.copy_(rows.data_TK)
    padded.scales_TG.copy_(rows.scales_TG)
    return padded


class _Refusing(Fp8Gemm):
    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError(f"the library does not take a matrix {tuple(w.shape)}")
