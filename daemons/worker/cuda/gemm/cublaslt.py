"""GEMMs through cuBLASLt with an algorithm chosen by the caller; torch always takes the first one.

Legend: T rows, N features out, K features in. In the library's column-major terms a GEMM is
D[N, T] = W[K, N]^T x X[K, T] + beta D, all three as torch lays out row-major [N, K], [T, K] and [T, N]. The enums are
those of cublasLt.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import (
    Algo,
    CublasLtError,
    HeuristicResult,
    declare,
    load_library,
)

_R_32F, _R_16F, _R_16BF = 0, 2, 14  # cudaDataType
_COMPUTE_32F = 68  # cublasComputeType_t
_OP_T = 1  # cublasOperation_t
_DESC_TRANS_A = 3  # cublasLtMatmulDescAttributes_t
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3  # cublasLtMatmulPreferenceAttributes_t
_PREF_MIN_ALIGNMENTS = (5, 6, 7, 8)  # Of A, B, C, D.
_CONFIG_ID, _CONFIG_TILE_ID, _CONFIG_SPLIT_K, _CONFIG_REDUCTION = 0, 1, 2, 3  # cublasLtMatmulAlgoConfigAttributes_t
_CONFIG_STAGES_ID, _CONFIG_INNER_SHAPE_ID, _CONFIG_CLUSTER_SHAPE_ID = 6, 7, 8
# cublasLtReductionScheme_t: in place or in the type of the sums, never in the type of the result.
_REDUCTION_EXACT = 1 | 2
_TYPES = {torch.float32: _R_32F, torch.float16: _R_16F, torch.bfloat16: _R_16BF}
_ALIGNMENT = 256
_WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """A cuBLASLt algorithm. order: its rank in the heuristic's list, expected fastest first."""

    order: int
    algo: Algo
    workspace_bytes: int
    waves: float

    def __str__(self) -> str:
        return f"algorithm {self.order}"


@dataclass(frozen=True, slots=True)
class GemmShape:
    """[T, K] x [N, K]^T -> [T, N], contiguous. is_added: accumulated onto the output (beta = 1)."""

    num_rows: int
    num_out: int
    num_in: int
    dtype: torch.dtype
    is_added: bool = False


class CublasLt:
    """cuBLASLt handle on the current CUDA device and the workspace its GEMMs share: use one stream at a time.

    library: for tests; otherwise the one that torch has loaded. alignment: bytes, of the start of every tensor; what
    torch allocates on a GPU has 512. Raises CublasLtError.
    """

    def __init__(
        self, device: torch.device, library: ctypes.CDLL | None = None, *, alignment: int = _ALIGNMENT
    ) -> None:
        self.library = library or load_library()
        declare(self.library)
        self._handle = ctypes.c_void_p()
        # Never destroyed: it is the process's own, and the driver may be gone before the interpreter is.
        self.check("cublasLtCreate", self.library.cublasLtCreate(ctypes.byref(self._handle)))
        # Some algorithms keep counters there that they expect, and leave, at zero.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.device = device
        self.alignment = alignment

    @property
    def version(self) -> int:
        return int(self.library.cublasLtGetVersion())

    @property
    def handle(self) -> ctypes.c_void_p:
        return self._handle

    @property
    def workspace(self) -> torch.Tensor:
        return self._workspace

    def check(self, function: str, status: int) -> None:
        if status:
            name: bytes = self.library.cublasLtGetStatusName(status)
            raise CublasLtError(f"{function}: {name.decode()} ({status})")

    def stream(self) -> int:
        """torch's current one, a captured one too."""
        return 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream


class CublasLtMatmul:
    """cuBLASLt descriptors of one GEMM shape. Raises CublasLtError if the library refuses the shape."""

    def __init__(self, lt: CublasLt, shape: GemmShape) -> None:
        if shape.dtype not in _TYPES:
            raise CublasLtError(f"no GEMMs of {shape.dtype}")
        self.shape = shape
        self._lt = lt
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(float(shape.is_added))
        self._desc = ctypes.c_void_p()
        library = lt.library
        lt.check(
            "cublasLtMatmulDescCreate",
            library.cublasLtMatmulDescCreate(ctypes.byref(self._desc), _COMPUTE_32F, _R_32F),
        )
        weakref.finalize(self, library.cublasLtMatmulDescDestroy, self._desc)
        transposed = ctypes.c_int32(_OP_T)
        lt.check(
            "cublasLtMatmulDescSetAttribute",
            library.cublasLtMatmulDescSetAttribute(self._desc, _DESC_TRANS_A, ctypes.byref(transposed), 4),
        )
        self._weight = self._layout(shape.num_in, shape.num_out)
        self._x = self._layout(shape.num_in, shape.num_rows)
        self._out = self._layout(shape.num_out, shape.num_rows)

    def algorithms(self, count: int) -> list[Algorithm]:
        """Up to `count` that need no more than the shared work space, in the library's order."""
        lt, results, num_results = self._lt, (HeuristicResult * count)(), ctypes.c_int()
        preference = self.preference()
        status = lt.library.cublasLtMatmulAlgoGetHeuristic(
            lt.handle,
            self._desc,
            self._weight,
            self._x,
            self._out,
            self._out,
            preference,
            count,
            results,
            ctypes.byref(num_results),
        )
        lt.library.cublasLtMatmulPreferenceDestroy(preference)
        lt.check("cublasLtMatmulAlgoGetHeuristic", status)
        return [
            Algorithm(order, _copied(result.algo), int(result.workspace_size), float(result.waves_count))
            for order, result in enumerate(results[: num_results.value])
            if result.state == 0 and result.workspace_size <= _WORKSPACE_BYTES
        ]

    def adopt(self, algorithm: Algorithm) -> Algorithm | None:
        """An algorithm found for another row count, checked for this shape; None if it is not supported."""
        lt, result, algo = self._lt, HeuristicResult(), _copied(algorithm.algo)
        layouts = (self._weight, self._x, self._out, self._out)
        status = lt.library.cublasLtMatmulAlgoCheck(
            lt.handle, self._desc, *layouts, ctypes.byref(algo), ctypes.byref(result)
        )
        if status or result.state or result.workspace_size > _WORKSPACE_BYTES:
            return None
        return Algorithm(algorithm.order, algo, int(result.workspace_size), float(result.waves_count))

    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out_TN: torch.Tensor) -> bool:
        """True if tensors are of this shape and lie as the algorithms expect."""
        shape = self.shape
        return (
            x_TK.shape == (shape.num_rows, shape.num_in)
            and w_NK.shape == (shape.num_out, shape.num_in)
            and out_TN.shape == (shape.num_rows, shape.num_out)
            and all(
                tensor.dtype == shape.dtype and tensor.is_contiguous() and tensor.data_ptr() % self._lt.alignment == 0
                for tensor in (x_TK, w_NK, out_TN)
            )
        )

    def run(self, algorithm: Algorithm, x_TK: torch.Tensor, w_NK: torch.Tensor, out_TN: torch.Tensor) -> None:
        """Launches on the current stream; allocates nothing and waits for nothing. The tensors are `accepts`' own."""
        lt, out = self._lt, out_TN.data_ptr()
        status = lt.library.cublasLtMatmul(
            lt.handle,
            self._desc,
            ctypes.byref(self._alpha),
            w_NK.data_ptr(),
            self._weight,
            x_TK.data_ptr(),
            self._x,
            ctypes.byref(self._beta),
            out,
            self._out,
            out,
            self._out,
            ctypes.byref(algorithm.algo),
            lt.workspace.data_ptr(),
            _WORKSPACE_BYTES,
            lt.stream(),
        )
        if status:
            lt.check("cublasLtMatmul", status)

    def describe(self, algorithm: Algorithm) -> dict[str, int]:
        """Numbers of the header's enums; tile, stages and cluster are ids, not sizes."""
        fields = {
            "id": (_CONFIG_ID, ctypes.c_int32()),
            "tile": (_CONFIG_TILE_ID, ctypes.c_uint32()),
            "stages": (_CONFIG_STAGES_ID, ctypes.c_uint32()),
            "split_k": (_CONFIG_SPLIT_K, ctypes.c_int32()),
            "reduction": (_CONFIG_REDUCTION, ctypes.c_uint32()),
            "inner_shape": (_CONFIG_INNER_SHAPE_ID, ctypes.c_uint16()),
            "cluster": (_CONFIG_CLUSTER_SHAPE_ID, ctypes.c_uint16()),
        }
        described = {}
        for name, (attribute, value) in fields.items():
            status = self._lt.library.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(algorithm.algo), attribute, ctypes.byref(value), ctypes.sizeof(value), None
            )
            described[name] = -1 if status else int(value.value)
        return described

    def _layout(self, num_rows: int, num_columns: int) -> ctypes.c_void_p:
        """Of a column-major matrix without gaps."""
        lt, layout = self._lt, ctypes.c_void_p()
        status = lt.library.cublasLtMatrixLayoutCreate(
            ctypes.byref(layout), _TYPES[self.shape.dtype], num_rows, num_columns, num_rows
        )
        lt.check("cublasLtMatrixLayoutCreate", status)
        weakref.finalize(self, lt.library.cublasLtMatrixLayoutDestroy, layout)
        return layout

    def preference(self) -> ctypes.c_void_p:
        lt, preference = self._lt, ctypes.c_void_p()
        lt.check("cublasLtMatmulPreferenceCreate", lt.library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        values: list[tuple[int, ctypes.c_uint64 | ctypes.c_uint32]] = [
            (_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(_WORKSPACE_BYTES)),
            (_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(_REDUCTION_EXACT)),
            *((attribute, ctypes.c_uint32(lt.alignment)) for attribute in _PREF_MIN_ALIGNMENTS),
        ]
        for attribute, value in values:
            status = lt.library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
            lt.check("cublasLtMatmulPreferenceSetAttribute", status)
        return preference


def check_small_gemm(lt: CublasLt, dtype: torch.dtype) -> None:
    """Computes one with each of the library's first algorithms. Raises CublasLtError unless torch agrees."""
    generator = torch.Generator(lt.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=lt.device, generator=generator)

    x_TK, w_NK, before_TN = random(32, 256), random(384, 256), random(32, 384)
    for is_added in (False, True):
        matmul = CublasLtMatmul(lt, GemmShape(32, 384, 256, dtype, is_added))
        expected = x_TK.float() @ w_NK.float().t() + float(is_added) * before_TN.float()
        algorithms = matmul.algorithms(4)
        if not algorithms:
            raise CublasLtError("the library names no algorithm for a small GEMM")
        for algorithm in algorithms:
            out_TN = before_TN.clone()
            matmul.run(algorithm, x_TK, w_NK, out_TN)
            error = float((out_TN.float() - expected).abs().max() / expected.abs().max())
            if not error < 0.01:
                raise CublasLtError(f"a small GEMM differs from torch's by {error:.3g} (algorithm {algorithm.order})")


def _copied(algo: Algo) -> Algo:
    return Algo.from_buffer_copy(algo)
