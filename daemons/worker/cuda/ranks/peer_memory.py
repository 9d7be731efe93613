"""Memory of a device that processes of the same host show to each other."""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

HANDLE_BYTES = 64


class PeerMemory(ABC):
    """Addresses are those of kernels. Called on a thread whose current device it is."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> int:
        """The address of new memory, all zeros, that lives as long as the process."""

    @abstractmethod
    def clear(self, address: int, num_bytes: int) -> None:
        """Zeros; done when it returns."""

    @abstractmethod
    def handle(self, address: int) -> bytes:
        """HANDLE_BYTES that name the memory at `address` to other processes of this host. Raises UNSUPPORTED."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """The address here of another process's memory. Raises MeshError UNSUPPORTED."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Gives back what `open` gave. The process behind it may be gone."""

    @abstractmethod
    def size(self, address: int) -> int:
        """Bytes of what allocate() or open() gave."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Copies bytes there, beside all streams; done when it returns."""

    @abstractmethod
    def read(self, address: int, num_bytes: int) -> bytes:
        """Bytes of it, read beside all streams."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class CudaPeerMemory(PeerMemory):
    """By the driver's IPC handles: plain mappings, without multicast. Memory of a process that was killed stays mapped
    in those that have opened it (measured with kernels that read it). feature, advice: told with what fails."""

    def __init__(
        self,
        feature: str = "tp_collectives",
        advice: str = "the ranks' GPUs cannot read each other's memory here; choose --tp-collectives nccl or host",
    ) -> None:
        self._driver = _driver()
        self._feature, self._advice = feature, advice

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.clear(address.value, num_bytes)
        return address.value

    def clear(self, address: int, num_bytes: int) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        # 1: access between the two GPUs is turned on where it is not yet.
        arguments = ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(1)
        self._call("cuIpcOpenMemHandle_v2", *arguments)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def size(self, address: int) -> int:
        start, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        arguments = ctypes.byref(start), ctypes.byref(num_bytes), ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", *arguments)
        return num_bytes.value

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_char_p(data), ctypes.c_size_t(len(data)))
        # From memory that is not pinned the copy may return ahead of its end.
        self._call("cuStreamSynchronize", ctypes.c_void_p(0))

    def read(self, address: int, num_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        return data.raw

    def _call(self, name: str, *arguments: object) -> None:
        self._bind()
        self._check(name, getattr(self._driver, name)(*arguments))

    def _bind(self) -> None:
        """A thread that has done nothing with CUDA yet has a current device, and no context of it."""
        context, driver = ctypes.c_void_p(), self._driver
        self._check("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(context)))
        if context.value is None:
            device = ctypes.c_int(torch.cuda.current_device())
            # Never given back: the process holds it for as long as it lives.
            status = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            self._check("cuDevicePrimaryCtxRetain", status or driver.cuCtxSetCurrent(context))

    def _check(self, name: str, status: int) -> None:
        if status:
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"{name} failed with CUDA error {status}: {self._advice}",
                {"feature": self._feature},
            )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
