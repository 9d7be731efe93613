"""A stand-in for libcublasLt which computes on the host what it is told to, through the pointers it is given."""

from __future__ import annotations

import ctypes
from itertools import count
from types import SimpleNamespace

import torch

from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import Algo, HeuristicResult

NOT_SUPPORTED = 15
_TORCH_TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}


def _at(pointer):
    """Object behind ctypes.byref(), which has no public name for it."""
    return pointer._obj


class FakeCublasLt(SimpleNamespace):
    """Names `num_algorithms`, numbered from 100; the second does not run, and the third serves no other shape."""

    def __init__(self, num_algorithms: int = 5, wrong_by: float = 0.0) -> None:
        self.objects: dict[int, dict[object, object]] = {}
        self.launched: list[int] = []
        ids = count(1000)

        def create(out, **fields: object) -> int:
            _at(out).value = next(ids)
            self.objects[_at(out).value] = fields
            return 0

        def set_attribute(handle, attribute: int, value, size: int) -> int:
            assert ctypes.sizeof(_at(value)) == size
            self.objects[handle.value][attribute] = _at(value).value
            return 0

        def heuristic(handle, desc, w, x, c, d, preference, num_asked: int, results, num_results) -> int:
            assert all(each.value in self.objects for each in (handle, desc, w, x, c, d, preference))
            _at(num_results).value = min(num_algorithms, num_asked)
            for order in range(_at(num_results).value):
                results[order].algo.data[0] = 100 + order
                results[order].state = NOT_SUPPORTED if order == 1 else 0
                results[order].workspace_size = 1024 * order
            return 0 if num_algorithms else NOT_SUPPORTED

        def check(handle, desc, w, x, c, d, algo, result) -> int:
            assert isinstance(_at(algo), Algo) and isinstance(_at(result), HeuristicResult)
            return NOT_SUPPORTED if _at(algo).data[0] == 102 else 0

        def matmul(handle, desc, alpha, a, w, b, x, beta, c, c_at, d, d_at, algo, space, size: int, stream: int) -> int:
            described = self.objects[desc.value]
            assert (described["compute"], described["scale"], described[3]) == (68, 0, 1), described
            assert c == d and space and size and _at(alpha).value == 1.0
            w_NK, x_TK, out_TN = (self._matrix(at, layout) for at, layout in ((a, w), (b, x), (d, d_at)))
            result_TN = x_TK.float() @ w_NK.float().t() + wrong_by
            # Tensors that are not to be read may hold anything.
            out_TN.copy_(result_TN + _at(beta).value * out_TN.float() if _at(beta).value else result_TN)
            self.launched.append(int(_at(algo).data[0]))
            return 0

        super().__init__(
            cublasLtGetVersion=lambda: 130100,
            cublasLtGetStatusName=lambda status: b"CUBLAS_STATUS_NOT_SUPPORTED" if status == NOT_SUPPORTED else b"?",
            cublasLtCreate=create,
            cublasLtMatmulDescCreate=lambda out, compute, scale: create(out, compute=compute, scale=scale),
            cublasLtMatmulDescDestroy=lambda handle: self.objects.pop(handle.value) and 0,
            cublasLtMatmulDescSetAttribute=set_attribute,
            cublasLtMatrixLayoutCreate=lambda out, dtype, rows, columns, ld: create(
                out, layout=(dtype, rows, columns, ld)
            ),
            cublasLtMatrixLayoutDestroy=lambda handle: self.objects.pop(handle.value) and 0,
            cublasLtMatmulPreferenceCreate=lambda out: create(out),
            cublasLtMatmulPreferenceDestroy=lambda handle: self.objects.pop(handle.value) and 0,
            cublasLtMatmulPreferenceSetAttribute=set_attribute,
            cublasLtMatmulAlgoGetHeuristic=heuristic,
            cublasLtMatmulAlgoCheck=check,
            cublasLtMatmulAlgoConfigGetAttribute=lambda algo, attribute, value, size, written: 0,
            cublasLtMatmul=matmul,
        )

    def _matrix(self, pointer: int, layout: ctypes.c_void_p) -> torch.Tensor:
        """Row-major: the transpose of the column-major one that the layout describes."""
        dtype, num_rows, num_columns, stride = self.objects[layout.value]["layout"]
        kind = _TORCH_TYPES[dtype]
        data = (ctypes.c_uint8 * (num_columns * stride * kind.itemsize)).from_address(pointer)
        return torch.frombuffer(data, dtype=kind).view(num_columns, stride)[:, :num_rows]
