"""KV transfers through memory that two workers of one host map.

A region is an anonymous file (memfd) of its own, behind it a page of control. The receiver has it open; a writer opens
it by way of the receiver's process, holds the lock on it for as long as it may write, and looks at the control page
once it has the lock: a region has one writer, ever. The receiver that gives a region up first marks that page, then
asks for the lock: if it gets that, no writer has it and none can get it any more, be it dead or late. The kernel drops
the locks of a dead process. A region's memory is never another's: what a late writer still writes lies in memory that
nobody reads.

Words and refusals go over gRPC, and so does the KV of writers that cannot map the region.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import resource
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece
from radixmesh.daemons.worker.kv_transfer.host_process import host_name
from radixmesh.daemons.worker.kv_transfer.transfer_service import GrpcTransport, GrpcWriter
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray, KvWriter, RegionMemory, to_the_end
from radixmesh.worker.v1 import worker_pb2

_NAME = "radixmesh-kv"
CONTROL_BYTES = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_COPY_BYTES = 16 << 20
# Its own, and that of its mapping. Half of all files are left to connections, and to what else is open.
_FILES_A_REGION = 2
# Of the page of control.
_IS_GIVEN_UP = 0
_HAS_WRITER = 3


class SharedMemory(RegionMemory):
    """A region as its receiver has it."""

    def __init__(self, num_bytes: int) -> None:
        self._fd: int | None = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = num_bytes + CONTROL_BYTES
        try:
            os.ftruncate(self._fd, size)
            # Nobody can shrink it below what others have mapped.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)
        except BaseException:
            self.close()
            raise
        self.array = self._bytes[:num_bytes]

    @property
    def control(self) -> ByteArray:
        """The page behind the region, which its writer has mapped as well."""
        return self._bytes[len(self.array) :]

    @property
    def writes_are_seen(self) -> bool:
        return False

    def describe(self, region: worker_pb2.TransferRegion) -> None:
        assert self._fd is not None
        inode = os.fstat(self._fd).st_ino
        region.shared_memory.CopyFrom(
            worker_pb2.SharedMemory(host=host_name(), pid=os.getpid(), fd=self._fd, inode=inode)
        )

    def is_writer_gone(self) -> bool:
        if self._fd is None:
            return True
        self.control[_IS_GIVEN_UP] = 1
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SharedMemoryTransport(GrpcTransport):
    """Between workers of one host; over gRPC to any other, and where the process would run out of files."""

    def __init__(
        self, tls: TlsFiles | None = None, *, before_last_word: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        super().__init__(tls, before_last_word=before_last_word)
        self._held: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self._most = _raised_file_limit() // 2 // _FILES_A_REGION

    @property
    def has_files(self) -> bool:
        """True if there may be one more region in shared memory."""
        return len(self._held) < self._most

    def held(self, memory: SharedMemory) -> SharedMemory:
        """Counts its files for as long as it is there."""
        self._held.add(memory)
        return memory

    def new_memory(self, num_bytes: int) -> RegionMemory:
        return self.held(SharedMemory(num_bytes)) if self.has_files else RegionMemory(num_bytes)

    @asynccontextmanager
    async def open(self, address: str, region: worker_pb2.TransferRegion, writer: str) -> AsyncIterator[KvWriter]:
        async with super().open(address, region, writer) as words:
            assert isinstance(words, GrpcWriter)
            fd = opened(region)
            if fd is None:
                yield words
                return
            try:
                yield await SharedWriter.begun(words, fd, region)
            finally:
                # The mapping has a copy of the descriptor: closing this one alone would not give the lock back.
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)


class SharedWriter(KvWriter):
    def __init__(self, words: GrpcWriter, target: ByteArray) -> None:
        self._words = words
        self._target = target

    @classmethod
    async def begun(cls, words: GrpcWriter, fd: int, region: worker_pb2.TransferRegion) -> SharedWriter:
        """Raises TRANSFER_FAILED for a region that was given up."""
        memory = np.frombuffer(mmap.mmap(fd, region.num_bytes + CONTROL_BYTES), np.uint8)
        control = memory[region.num_bytes :]
        take_region(control)
        # The receiver hears of its writer before that writes.
        await words.begin()
        require_wanted(control)
        return cls(words, memory[: region.num_bytes])

    async def write(self, offset: int, data: ByteArray | DevicePiece) -> None:
        assert not isinstance(data, DevicePiece), "buffers of this transport lie in memory of the host"
        for start in range(0, len(data), _COPY_BYTES):
            part = data[start : start + _COPY_BYTES]
            target = self._target[offset + start : offset + start + len(part)]
            await to_the_end(asyncio.to_thread(np.copyto, target, part))
            await self._words.wrote(offset + start, len(part))

    async def ending(self) -> None:
        await self._words.ending()

    async def done(self, checksum: int, gather_start: worker_pb2.GatherStart | None = None) -> None:
        await self._words.done(checksum, gather_start)


def _raised_file_limit() -> int:
    """Files that this process may have open, from now on as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def take_region(control: ByteArray) -> None:
    """Makes the caller, which has the lock, the region's writer. Raises TRANSFER_FAILED where there was one before:
    what that has written is the region's, and its marks say how it ended."""
    require_wanted(control)
    if control[_HAS_WRITER]:
        message = "the region has had a writer: prefill again"
        raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message)
    control[_HAS_WRITER] = 1


def require_wanted(control: ByteArray) -> None:
    """Raises TRANSFER_FAILED for a region that was given up."""
    if control[_IS_GIVEN_UP]:
        message = "the region was given up: its transfer is over"
        raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message)


def opened(region: worker_pb2.TransferRegion) -> int | None:
    """The region's file, locked; None where there is none that this process can open."""
    memory = region.shared_memory
    if not region.HasField("shared_memory") or memory.host != host_name():
        return None
    fd = -1
    path = f"/proc/{memory.pid}/fd/{memory.fd}"
    with suppress(OSError):
        # A peer names it: nothing but a region is opened, whatever else that process has open.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        status, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        # One that somebody else could shrink would end this process by a signal as it writes.
        is_region = status.st_ino == memory.inode and seals & _SEALS == _SEALS
        # The receiver asks for the lock of a region that is over, and gives it back at once.
        if is_region and status.st_size == region.num_bytes + CONTROL_BYTES:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    if fd >= 0:
        os.close(fd)
    return None
