"""Driver calls for the project's own CUDA C++: modules, tensor maps, launches in clusters. By ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _PDL = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION
_TENSOR_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128B, _PROMOTE_256B = 3, 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
# The oldest are forgotten; what is launched with one has its copy.
_MAX_MAPS = 8192


class DriverError(RuntimeError):
    """The driver is not there or refuses; the message says what."""


@dataclass(frozen=True, slots=True)
class BoxOf:
    """A matrix [rows, columns], contiguous, as the copy engine reads it: boxes of so many columns and rows, swizzled by
    128 bytes. in_turns: the first half of the matrix's rows and the second lie in a box in turns of 8; each half is a
    multiple of 8, `rows` one of 16."""

    matrix: torch.Tensor
    columns: int
    rows: int
    in_turns: bool = False


class Kernel(NamedTuple):
    function: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One axis of CTAs. stream: 0 is the default one."""

    num_ctas: int
    num_threads: int
    shared_bytes: int
    cluster: int
    use_pdl: bool
    stream: int


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes at offset 8."""

    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    ]


class CudaDriver:
    """On the context that torch has made current. library: for tests; otherwise libcuda. Raises DriverError."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"libcuda.so.1 is not there: {error}") from error
        _declare(self._library)
        self._maps: dict[tuple[object, ...], ctypes.Array[ctypes.c_char]] = {}

    def load(self, cubin: bytes, name: str, shared_bytes: int) -> Kernel:
        """A kernel that may take so much dynamic shared memory. Never unloaded: graphs hold it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", self._library.cuModuleLoadData(ctypes.byref(module), cubin))
        found = self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self._check("cuModuleGetFunction", found)
        status = self._library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
        self._check("cuFuncSetAttribute", status)
        assert function.value is not None
        return Kernel(function.value)

    def launch(
        self,
        kernel: Kernel,
        launch: Launch,
        first: BoxOf,
        second: BoxOf,
        pointers: Sequence[int],
        integers: Sequence[int],
        number: float,
        last_pointers: Sequence[int] = (),
    ) -> None:
        """Of a kernel with parameters (map, map, pointers, int32..., float, pointers). The driver copies them."""
        values: list[ctypes.Array[ctypes.c_char] | ctypes._SimpleCData[object]] = [
            self._map(first),
            self._map(second),
            *(ctypes.c_void_p(pointer) for pointer in pointers),  # type: ignore[list-item]
            *(ctypes.c_int32(value) for value in integers),  # type: ignore[list-item]
            ctypes.c_float(number),  # type: ignore[list-item]
            *(ctypes.c_void_p(pointer) for pointer in last_pointers),  # type: ignore[list-item]
        ]
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attributes = (_Attribute * 2)()
        num_attributes = 0
        if launch.cluster > 1:
            attributes[0].id = _CLUSTER
            attributes[0].value[:3] = [launch.cluster, 1, 1]
            num_attributes = 1
        if launch.use_pdl:
            attributes[num_attributes].id = _PDL
            attributes[num_attributes].value[0] = 1
            num_attributes += 1
        config = _Config(
            (launch.num_ctas, 1, 1),
            (launch.num_threads, 1, 1),
            launch.shared_bytes,
            launch.stream,
            ctypes.cast(attributes, ctypes.POINTER(_Attribute)),
            num_attributes,
        )
        status = self._library.cuLaunchKernelEx(ctypes.byref(config), kernel.function, parameters, None)
        self._check("cuLaunchKernelEx", status)

    def _map(self, box: BoxOf) -> ctypes.Array[ctypes.c_char]:
        """CUtensorMap, aligned, of 64-bit dimensions columns first."""
        matrix = box.matrix
        key = (matrix.data_ptr(), matrix.shape, matrix.dtype, box.columns, box.rows, box.in_turns)
        found = self._maps.get(key)
        if found is not None:
            return found
        num_rows, num_columns = matrix.shape
        row_bytes = num_columns * matrix.element_size()
        if box.in_turns:
            half = num_rows // 2
            sizes, strides = [num_columns, 8, 2, half // 8], [row_bytes, half * row_bytes, 8 * row_bytes]
            box_sizes = [box.columns, 8, 2, box.rows // 16]
        else:
            sizes, strides, box_sizes = [num_columns, num_rows], [row_bytes], [box.columns, box.rows]
        rank = len(sizes)
        memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        offset = -ctypes.addressof(memory) % _MAP_ALIGNMENT
        aligned = (ctypes.c_char * _MAP_BYTES).from_buffer(memory, offset)
        status = self._library.cuTensorMapEncodeTiled(
            ctypes.addressof(aligned),
            _TENSOR_TYPES[matrix.dtype],
            rank,
            matrix.data_ptr(),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box_sizes),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLE_128B,
            _PROMOTE_256B,
            0,
        )
        self._check("cuTensorMapEncodeTiled", status)
        while len(self._maps) >= _MAX_MAPS:
            del self._maps[next(iter(self._maps))]
        self._maps[key] = aligned
        return aligned

    def _check(self, function: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise DriverError(f"{function}: {(text.value or b'unknown').decode()} ({status})")


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer, unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
    signatures: dict[str, list[type[ctypes._CData]]] = {
        "cuModuleLoadData": [pointer, ctypes.c_char_p],
        "cuModuleGetFunction": [pointer, pointer, ctypes.c_char_p],
        "cuFuncSetAttribute": [pointer, integer, integer],
        "cuLaunchKernelEx": [pointer, pointer, pointer, pointer],
        "cuTensorMapEncodeTiled": [pointer, integer, unsigned, *[pointer] * 5, integer, integer, integer, integer],
        "cuGetErrorString": [integer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, integer
