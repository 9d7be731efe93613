"""GEMMs through cuBLASLt as far as a machine without it can tell: the structs, and what is asked of the library."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from support.fake_cublaslt import FakeCublasLt

from radixmesh.daemons.worker.cuda.gemm.cublaslt import CublasLt, CublasLtMatmul, GemmShape, check_small_gemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt_library import Algo, CublasLtError, HeuristicResult, load_library

_CPU = torch.device("cpu")
_SHAPE = GemmShape(3, 64, 128, torch.bfloat16)


def test_structs_lie_as_the_header_has_them() -> None:
    assert ctypes.sizeof(Algo) == 64
    assert ctypes.sizeof(HeuristicResult) == 96
    offsets = [getattr(HeuristicResult, name).offset for name, *_ in HeuristicResult._fields_]
    assert offsets == [0, 64, 72, 76, 80]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_small_gemm_is_that_of_torch(dtype: torch.dtype) -> None:
    library = FakeCublasLt()
    check_small_gemm(CublasLt(_CPU, library), dtype)
    # Not the second, which says that it does not run.
    assert library.launched == [100, 102, 103] * 2


def test_a_library_that_computes_something_else_is_found_out() -> None:
    with pytest.raises(CublasLtError, match="differs from torch's"):
        check_small_gemm(CublasLt(_CPU, FakeCublasLt(wrong_by=3.0)), torch.bfloat16)
    with pytest.raises(CublasLtError, match="differs from torch's by nan"):
        check_small_gemm(CublasLt(_CPU, FakeCublasLt(wrong_by=float("nan"))), torch.bfloat16)


def test_a_refusal_names_the_function_and_the_status() -> None:
    matmul = CublasLtMatmul(CublasLt(_CPU, FakeCublasLt(num_algorithms=0)), _SHAPE)
    with pytest.raises(CublasLtError, match=r"cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED \(15\)"):
        matmul.algorithms(8)


def test_algorithms_keep_their_order_and_outlive_the_answer() -> None:
    matmul = CublasLtMatmul(CublasLt(_CPU, FakeCublasLt(num_algorithms=4)), _SHAPE)
    algorithms = matmul.algorithms(64)
    gc.collect()
    assert [(each.order, each.algo.data[0], each.workspace_bytes) for each in algorithms] == [
        (0, 100, 0),
        (2, 102, 2048),
        (3, 103, 3072),
    ]
    assert [adopted and adopted.order for adopted in map(matmul.adopt, algorithms)] == [0, None, 3]


def test_the_preference_bounds_work_space_and_keeps_sums_in_their_type() -> None:
    library = FakeCublasLt()
    lt = CublasLt(_CPU, library)
    handle = CublasLtMatmul(lt, _SHAPE).preference()
    assert library.objects[handle.value] == {1: lt.workspace.nbytes, 3: 3, 5: 256, 6: 256, 7: 256, 8: 256}


def test_nothing_of_a_gemm_is_left_behind() -> None:
    library = FakeCublasLt()
    lt = CublasLt(_CPU, library)
    before = dict(library.objects)
    matmul = CublasLtMatmul(lt, _SHAPE)
    matmul.algorithms(4)
    assert len(library.objects) == len(before) + 4
    del matmul
    gc.collect()
    assert library.objects == before


def test_tensors_of_another_shape_or_place_are_not_accepted() -> None:
    matmul = CublasLtMatmul(CublasLt(_CPU, FakeCublasLt()), _SHAPE)
    x, w, out = (_aligned(*shape) for shape in ((3, 128), (64, 128), (3, 64)))
    assert matmul.accepts(x, w, out)
    assert not matmul.accepts(_aligned(4, 128), w, out)
    assert not matmul.accepts(x, w, out.float())
    assert not matmul.accepts(x, _aligned(128, 64).t(), out)
    assert not matmul.accepts(_aligned(4, 128).flatten()[8 : 8 + 3 * 128].view(3, 128), w, out)


def test_a_machine_without_the_library_is_told_so() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has the library")
    with pytest.raises(CublasLtError, match="not built for CUDA"):
        load_library()


def _aligned(*shape: int) -> torch.Tensor:
    """The host's allocator promises 64 bytes only."""
    storage = torch.zeros(torch.Size(shape).numel() + 128, dtype=torch.bfloat16)
    first = -storage.data_ptr() % 256 // 2
    return storage[first : first + torch.Size(shape).numel()].view(shape)
