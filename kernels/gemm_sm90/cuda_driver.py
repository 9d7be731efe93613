"""The parts of the CUDA driver that the project's own CUDA C++ needs: modules, tensor maps, launches in clusters.

By cuda-bindings, which torch for CUDA brings. It is imported when a driver is made: a host without a GPU has none.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

# The oldest are forgotten; what is launched with one has its copy.
_MAX_MAPS = 8192
ParameterType = type[ctypes.c_void_p] | type[ctypes.c_int32] | type[ctypes.c_float]


class DriverError(RuntimeError):
    """The driver is not there or refuses; the message says which call."""


@dataclass(frozen=True, slots=True)
class BoxOf:
    """A matrix [rows, columns], contiguous, as the copy engine reads it: boxes of so many columns and rows, swizzled by
    128 bytes. is_interleaved: a box holds 8 rows of the matrix's first half, then 8 of the second, and so on; each half
    is a multiple of 8, `rows` one of 16."""

    matrix: torch.Tensor
    columns: int
    rows: int
    is_interleaved: bool = False


class Kernel(NamedTuple):
    """function: the driver's handle."""

    function: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One axis of CTAs."""

    num_ctas: int
    num_threads: int
    shared_bytes: int
    cluster: int
    use_pdl: bool


class PreparedLaunch(NamedTuple):
    """A kernel and the driver's configuration, in which only the stream changes. parameter_types: of ctypes, behind the
    two tensor maps."""

    kernel: Kernel
    config: object
    parameter_types: tuple[ParameterType | None, ...]


class CudaDriver:
    """On the context that torch has made current. Raises DriverError."""

    def __init__(self) -> None:
        self._api = bindings("driver")
        self._maps: dict[tuple[object, ...], object] = {}

    def load(self, cubin: bytes, name: str, shared_bytes: int) -> Kernel:
        """A kernel that may take so much dynamic shared memory. Never unloaded: graphs hold it."""
        api = self._api
        module = self._checked("cuModuleLoadData", api.cuModuleLoadData(cubin))
        function = self._checked("cuModuleGetFunction", api.cuModuleGetFunction(module, name.encode()))
        attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked("cuFuncSetAttribute", api.cuFuncSetAttribute(function, attribute, shared_bytes))
        return Kernel(function)

    def prepare(self, kernel: Kernel, launch: Launch, parameter_types: Sequence[ParameterType]) -> PreparedLaunch:
        """For a kernel with parameters (map, map, parameter_types...)."""
        api, config, attributes = self._api, self._api.CUlaunchConfig(), []
        config.gridDimX, config.blockDimX, config.sharedMemBytes = (
            launch.num_ctas,
            launch.num_threads,
            launch.shared_bytes,
        )
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        if launch.cluster > 1:
            cluster = api.CUlaunchAttribute()
            cluster.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = cluster.value.clusterDim
            size.x, size.y, size.z = launch.cluster, 1, 1
            attributes.append(cluster)
        if launch.use_pdl:
            pdl = api.CUlaunchAttribute()
            pdl.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            pdl.value.programmaticStreamSerializationAllowed = 1
            attributes.append(pdl)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return PreparedLaunch(kernel, config, (None, None, *parameter_types))

    def launch(
        self, prepared: PreparedLaunch, stream: int, first: BoxOf, second: BoxOf, parameters: tuple[object, ...]
    ) -> None:
        """stream: 0 is the default one. The driver copies the parameters."""
        kernel, config, types = prepared
        config.hStream = stream  # type: ignore[attr-defined]
        values = (self._map(first), self._map(second), *parameters)
        self._checked("cuLaunchKernelEx", self._api.cuLaunchKernelEx(config, kernel.function, (values, types), 0))

    def _map(self, box: BoxOf) -> object:
        """CUtensorMap, of 64-bit dimensions columns first."""
        matrix = box.matrix
        key = (matrix.data_ptr(), matrix.shape, matrix.dtype, box.columns, box.rows, box.is_interleaved)
        found = self._maps.get(key)
        if found is not None:
            return found
        num_rows, num_columns = matrix.shape
        row_bytes = num_columns * matrix.element_size()
        if box.is_interleaved:
            half = num_rows // 2
            sizes, strides = [num_columns, 8, 2, half // 8], [row_bytes, half * row_bytes, 8 * row_bytes]
            box_sizes = [box.columns, 8, 2, box.rows // 16]
        else:
            sizes, strides, box_sizes = [num_columns, num_rows], [row_bytes], [box.columns, box.rows]
        made = self._encoded(matrix, sizes, strides, box_sizes)
        while len(self._maps) >= _MAX_MAPS:
            del self._maps[next(iter(self._maps))]
        self._maps[key] = made
        return made

    def _encoded(self, matrix: torch.Tensor, sizes: list[int], strides: list[int], box_sizes: list[int]) -> object:
        api, rank = self._api, len(sizes)
        types = api.CUtensorMapDataType
        found = api.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if matrix.dtype == torch.bfloat16
            else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            rank,
            matrix.data_ptr(),
            [api.cuuint64_t(size) for size in sizes],
            [api.cuuint64_t(stride) for stride in strides],
            [api.cuuint32_t(size) for size in box_sizes],
            [api.cuuint32_t(1)] * rank,
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return self._checked("cuTensorMapEncodeTiled", found)

    def _checked(self, function: str, result: tuple[object, ...]) -> object:
        """The result of a call beside its status."""
        status, *found = result
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{function}: {status!r}")
        return found[0] if found else None


def bindings(name: str) -> ModuleType:
    """A module of cuda-bindings."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise DriverError(f"cuda-bindings, which torch for CUDA brings, is not there: {error}") from error
