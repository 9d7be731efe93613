"""The functions and structs of cublasLt.h, as of CUDA 12 and 13, for ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from radixmesh.daemons.worker.cuda.gemm.backend import GemmRefusedError


class CublasLtError(GemmRefusedError):
    """The library is not there, refuses, or computes something else than torch; the message says which."""


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque; may be copied, and kept for a GEMM of the same shapes."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def load_library() -> ctypes.CDLL:
    """The one that torch has loaded. Raises CublasLtError where torch has none."""
    version: str | None = torch.version.cuda
    if version is None:
        raise CublasLtError("this torch is not built for CUDA")
    name = f"libcublasLt.so.{version.split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if line.rpartition("/")[2].startswith("libcublasLt.so"):
                return ctypes.CDLL(line[line.index("/") :])
        raise CublasLtError(f"{name} is not there: {error}") from error


def declare(library: ctypes.CDLL) -> None:
    """Sets the header's signatures; all return a cublasStatus_t unless told."""
    pointer, integer, size, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
    setter: list[type[ctypes._CData]] = [pointer, integer, pointer, size]
    signatures: dict[str, list[type[ctypes._CData]]] = {
        "cublasLtCreate": [pointer],
        "cublasLtMatmulDescCreate": [pointer, integer, integer],
        "cublasLtMatmulDescDestroy": [pointer],
        "cublasLtMatmulDescSetAttribute": setter,
        "cublasLtMatrixLayoutCreate": [pointer, integer, wide, wide, ctypes.c_int64],
        "cublasLtMatrixLayoutDestroy": [pointer],
        "cublasLtMatmulPreferenceCreate": [pointer],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulPreferenceSetAttribute": setter,
        "cublasLtMatmulAlgoGetHeuristic": [*[pointer] * 7, integer, pointer, pointer],
        "cublasLtMatmulAlgoCheck": [pointer] * 8,
        "cublasLtMatmulAlgoConfigGetAttribute": [pointer, integer, pointer, size, pointer],
        "cublasLtMatmul": [*[pointer] * 14, size, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, integer
    library.cublasLtGetStatusName.argtypes, library.cublasLtGetStatusName.restype = [integer], ctypes.c_char_p
    library.cublasLtGetVersion.argtypes, library.cublasLtGetVersion.restype = [], size
