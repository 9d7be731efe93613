"""Memory of the host that processes show to each other as GPUs do theirs: kernels under Triton's interpreter use it."""

from __future__ import annotations

import ctypes
import mmap
import os

from radixmesh.daemons.worker.cuda.ranks.peer_memory import HANDLE_BYTES, PeerMemory


class HostPeerMemory(PeerMemory):
    """A handle is a path below /proc of the process that has the memory."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._paths: dict[int, str] = {}

    def allocate(self, num_bytes: int) -> int:
        file = os.memfd_create("peer")
        os.ftruncate(file, num_bytes)
        address = self._map(file, num_bytes)
        self._paths[address] = f"/proc/{os.getpid()}/fd/{file}"
        return address

    def clear(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0, num_bytes)

    def handle(self, address: int) -> bytes:
        return self._paths[address].encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        file = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        try:
            return self._map(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    def close(self, address: int) -> None:
        del self._maps[address]

    def size(self, address: int) -> int:
        return len(self._maps[address])

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def _map(self, file: int, num_bytes: int) -> int:
        memory = mmap.mmap(file, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address
