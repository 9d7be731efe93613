"""GEMMs of up to 256 rows on Hopper with weight prefetch under PDL (programmatic dependent launch).

T rows, N features out, K features in, F mlp features. The kernels and how they work: gemm.cu, and for more rows
gemm_row_tiled.cu. They are compiled by NVRTC when they are first needed, once for each variant, and launched through
the driver, captured in graphs as well.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional

from radixmesh.kernels.gemm_sm90.cuda_driver import BoxOf, CudaDriver, Kernel, Launch, PreparedLaunch
from radixmesh.kernels.gemm_sm90.variants import (
    MAX_CLUSTER,
    TILE_K,
    FewRows,
    GemmConfig,
    Variant,
    takes_few_rows,
    variant_of,
)
from radixmesh.kernels.inverse_rms import inverse_rms_reference

MAX_ROWS = 256
DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16
_NUM_COMPILERS = min(16, max(2, (os.cpu_count() or 2) - 2))  # Threads; others start the worker meanwhile.
# Behind the tensor maps of weight and rows: the output and the residual, four sizes, eps, partial sums of squares to
# read and to write.
_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_PARAMETER_TYPES = (_POINTER, _POINTER, _INT32, _INT32, _INT32, _INT32, ctypes.c_float, _POINTER, _POINTER)
# few_rows.cu takes weight and rows by their addresses, and no sums of squares.
_FEW_ROWS_TYPES = (_POINTER, _POINTER, _POINTER, _POINTER, _INT32, _INT32, _INT32, ctypes.c_float)


class GemmSm90:
    """Launches, on the current stream. compiled: a source's machine code; use_pdl: with programmatic dependent launch.
    What does not compile, load or launch raises what `compiled` and the driver raise."""

    def __init__(self, driver: CudaDriver, compiled: Callable[[str], bytes], *, use_pdl: bool = True) -> None:
        self._driver = driver
        self._compiled = compiled
        self._use_pdl = use_pdl
        self._kernels: dict[Variant, Kernel] = {}
        self._codes: dict[Variant, bytes] = {}
        self._launches: dict[tuple[object, ...], tuple[Variant, PreparedLaunch]] = {}

    def prepare(self, variants: Iterable[Variant]) -> None:
        """Compiles them at once, so that the first launch of one has only to load it. One that does not compile says so
        when it is launched."""
        missing = [variant for variant in dict.fromkeys(variants) if variant not in self._kernels | self._codes]
        with ThreadPoolExecutor(_NUM_COMPILERS) as threads:
            compiling = {variant: threads.submit(self._compiled, variant.source()) for variant in missing}
        self._codes.update({variant: code.result() for variant, code in compiling.items() if code.exception() is None})

    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor, is_gated: bool = False) -> bool:
        """True if a kernel can compute `out` of the others."""
        return accepts(x_TK, w_NK, out, is_gated)

    def load(self, variant: Variant) -> None:
        """Makes it ready to be launched. Raises what compiling and the driver raise."""
        self._kernel(variant)

    def linear(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        config: GemmConfig,
        *,
        residual_TN: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        square_sums_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x @ w^T, [T, N], of 1 to MAX_ROWS rows, added to the residual in float32 if there is one.

        square_sums_out: made by `new_square_sums`; receives partial sums of squares of the result's rows, one for each
        tile of columns.
        bfloat16 or float16, contiguous; `out` may be the residual. Sums are float32, and are the same from run to run.
        No previous kernel of the stream may be writing the weight.
        """
        out = x_TK.new_empty(x_TK.shape[0], w_NK.shape[0]) if out is None else out
        self._launch(x_TK, w_NK, config, out, residual_TN, False, -1.0, None, square_sums_out)
        return out

    def new_square_sums(self, x_TK: torch.Tensor, w_NK: torch.Tensor, config: GemmConfig) -> torch.Tensor | None:
        """For `linear`: float32 [tiles, T]; None where the kernel writes none."""
        if config.registers is not None:
            return None
        variant = variant_of(config, x_TK.shape[0], False, x_TK.dtype)
        return x_TK.new_empty(variant.num_tiles(w_NK.shape[0]), x_TK.shape[0], dtype=torch.float32)

    def gate_up_silu(
        self,
        x_TK: torch.Tensor,
        w_2FK: torch.Tensor,
        config: GemmConfig,
        *,
        eps: float | None = None,
        out: torch.Tensor | None = None,
        square_sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """silu(x @ gate^T) x (x @ up^T), [T, F]; w holds the F rows of gate, then those of up. With `eps` both
        GEMMs are first multiplied by each row's 1 / sqrt(mean(x^2) + eps), which takes less time with `square_sums`,
        float32 [any, T] whose sums are those of x's rows. Rounded once, at the end; otherwise as `linear`."""
        out = x_TK.new_empty(x_TK.shape[0], w_2FK.shape[0] // 2) if out is None else out
        self._launch(x_TK, w_2FK, config, out, None, True, -1.0 if eps is None else eps, square_sums, None)
        return out

    def _launch(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        config: GemmConfig,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        is_gated: bool,
        eps: float,
        square_sums: torch.Tensor | None,
        square_sums_out: torch.Tensor | None,
    ) -> None:
        (num_rows, num_in), num_out = x_TK.shape, out.shape[1]
        assert accepts(x_TK, w_NK, out, is_gated), (x_TK.shape, w_NK.shape, out.shape, x_TK.dtype)
        if residual is not None and residual is not out:
            assert residual.shape == out.shape and accepts(x_TK, w_NK, residual, is_gated), residual.shape
        assert config.split_k <= math.ceil(num_in / TILE_K) and config.cluster <= MAX_CLUSTER, (config, num_in)
        variant, prepared = self._prepared(config, num_rows, num_out, is_gated, x_TK.dtype)
        stream = torch.cuda.current_stream(x_TK.device).cuda_stream
        boxes = (
            BoxOf(w_NK, TILE_K, variant.weight_rows, is_interleaved=is_gated),
            BoxOf(x_TK, TILE_K, variant.activation_rows),
        )
        if isinstance(variant, FewRows):
            assert takes_few_rows(config, num_rows, len(w_NK), num_in), (config, num_rows, num_out, num_in)
            tensors = (w_NK.data_ptr(), x_TK.data_ptr(), out.data_ptr(), _address(residual))
            self._driver.launch(prepared, stream, *boxes, (*tensors, num_rows, num_out, num_in, eps))
            return
        num_square_sums = 0 if square_sums is None else len(square_sums)
        assert square_sums is None or (square_sums.shape[1] == num_rows and square_sums.is_contiguous()), (
            square_sums.shape
        )
        assert square_sums_out is None or square_sums_out.shape == (variant.num_tiles(num_out), num_rows), (
            square_sums_out.shape
        )
        self._driver.launch(
            prepared,
            stream,
            *boxes,
            (
                out.data_ptr(),
                _address(residual),
                num_rows,
                num_out,
                num_in,
                num_square_sums,
                eps,
                _address(square_sums),
                _address(square_sums_out),
            ),
        )

    def _prepared(
        self, config: GemmConfig, num_rows: int, num_out: int, is_gated: bool, dtype: torch.dtype
    ) -> tuple[Variant, PreparedLaunch]:
        key = config, num_rows, num_out, is_gated, dtype
        found = self._launches.get(key)
        if found is None:
            variant = variant_of(config, num_rows, is_gated, dtype)
            launch = Launch(
                num_ctas=variant.num_ctas(num_rows, num_out),
                num_threads=variant.num_threads,
                shared_bytes=variant.shared_bytes,
                cluster=config.cluster,
                use_pdl=self._use_pdl,
            )
            types = _FEW_ROWS_TYPES if isinstance(variant, FewRows) else _PARAMETER_TYPES
            found = variant, self._driver.prepare(self._kernel(variant), launch, types)
            self._launches[key] = found
        return found

    def _kernel(self, variant: Variant) -> Kernel:
        kernel = self._kernels.get(variant)
        if kernel is None:
            code = self._codes.pop(variant, None) or self._compiled(variant.source())
            kernel = self._driver.load(code, variant.entry, variant.shared_bytes)
            self._kernels[variant] = kernel
        return kernel


def accepts(x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor, is_gated: bool = False) -> bool:
    """True if a kernel can compute a GEMM of such tensors."""
    num_rows, num_in = x_TK.shape
    return (
        1 <= num_rows <= MAX_ROWS
        and w_NK.shape == (out.shape[1] * (1 + is_gated), num_in)
        and out.shape[0] == num_rows
        and num_in % 8 == 0
        and out.shape[1] % 8 == 0
        and all(
            tensor.dtype == x_TK.dtype and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0
            for tensor in (x_TK, w_NK, out)
        )
        and x_TK.dtype in DTYPES
    )


def linear_reference(x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor | None = None) -> torch.Tensor:
    """Reference of `linear`, in torch."""
    result_TN = functional.linear(x_TK.float(), w_NK.float())
    return (result_TN if residual_TN is None else result_TN + residual_TN).to(x_TK.dtype)


def gate_up_silu_reference(x_TK: torch.Tensor, w_2FK: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """Reference of `gate_up_silu`, in torch."""
    result_T2F = functional.linear(x_TK.float(), w_2FK.float())
    if eps is not None:
        result_T2F = result_T2F * inverse_rms_reference(x_TK, eps)
    gate_TF, up_TF = result_T2F.chunk(2, dim=-1)
    return (functional.silu(gate_TF) * up_TF).to(x_TK.dtype)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
