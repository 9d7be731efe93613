"""What computes products of FP8 rows with FP8 weights: torch's library where it fits, or a kernel of our own.

Legend: T rows, N features out, K features in. Weights are [out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from radixmesh.daemons.runtime.logs import get_logger
from radixmesh.kernels.fp8_linear import TileConfig, fp8_linear, fp8_linear_reference
from radixmesh.kernels.quantized import QuantizedMatrix, QuantizedRows, quantize_matrix, quantize_rows_reference

_log = get_logger(__name__)

# One for any number of rows, so that a row's sums do not depend on how many others there are.
_FIXED_TILE = TileConfig(rows=64, columns=64, num_warps=4, num_stages=4)
# The library takes 16 bytes at a time.
_LIBRARY_FEATURES = 16
# Rows and features of the product that the library is tried on, and how far bfloat16 may be off.
_TRIED_ROWS, _TRIED_FEATURES, _TRIED_ERROR = (2, 33, 256), 256, 0.01


class Fp8Products(ABC):
    """With sums in float32."""

    @abstractmethod
    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        """[T, N] in dtype. Rows and matrix have the same groups along K."""


class TorchFp8Products(Fp8Products):
    """The reference."""

    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        return fp8_linear_reference(rows, w, dtype)


class TritonFp8Products(Fp8Products):
    """The project's kernel, which takes any groups, sizes and dtypes."""

    def __init__(self, *, use_pdl: bool = False, is_deterministic: bool = False) -> None:
        self._use_pdl = use_pdl
        self._tile = _FIXED_TILE if is_deterministic else None

    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        return fp8_linear(rows, w, dtype, use_pdl=self._use_pdl, config=self._tile)


class ScaledMmProducts(Fp8Products):
    """torch._scaled_mm, which is cuBLASLt's, where a group is a whole row; `others` for what it does not take."""

    def __init__(self, others: Fp8Products) -> None:
        self._others = others

    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        num_out, num_in = w.shape
        if w.is_grouped or dtype != torch.bfloat16 or num_out % _LIBRARY_FEATURES or num_in % _LIBRARY_FEATURES:
            return self._others.linear(rows, w, dtype)
        # Scales [T, 1] and [1, N]; the right operand column by column, which is how the weight lies.
        return torch._scaled_mm(
            rows.data_TK,
            w.data_NK.t(),
            scale_a=rows.scales,
            scale_b=w.scales.t(),
            out_dtype=dtype,
            use_fast_accum=True,
        )


def create_products(device: torch.device, *, use_pdl: bool, is_deterministic: bool) -> Fp8Products:
    """The library's where it computes a small product as it should, ours otherwise and for what it does not take."""
    ours = TritonFp8Products(use_pdl=use_pdl, is_deterministic=is_deterministic)
    if is_deterministic:
        return ours
    library = ScaledMmProducts(ours)
    try:
        check_small_product(library, device)
    # Also what CUDA itself reports: if it cannot go on, what comes behind this says so.
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        _log.warning("fp8_products_own", reason=f"{type(error).__name__}: {error}")
        return ours
    return library


def check_small_product(products: Fp8Products, device: torch.device) -> None:
    """Raises RuntimeError, or what the library raises, where a product by channels is not what it should be."""
    generator = torch.Generator(device).manual_seed(0)

    def random(num_rows: int) -> torch.Tensor:
        return torch.randn(num_rows, _TRIED_FEATURES, device=device, generator=generator)

    # Channels that differ much: scales that were mixed up show.
    weight = random(_TRIED_FEATURES) * torch.linspace(0.1, 10, _TRIED_FEATURES, device=device)[:, None]
    w = quantize_matrix(weight, is_grouped=False)
    for num_rows in _TRIED_ROWS:
        rows = quantize_rows_reference(random(num_rows) * (1 + num_rows), is_grouped=False)
        want = fp8_linear_reference(rows, w, torch.float32)
        got = products.linear(rows, w, torch.bfloat16).float()
        error = float((got - want).norm() / want.norm())
        if not error < _TRIED_ERROR:
            raise RuntimeError(f"a product of {num_rows} rows is off by {error:.3g}")
