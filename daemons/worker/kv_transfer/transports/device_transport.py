"""KV transfers from GPU to GPU of one host: the gather kernel of the sender writes to memory of the receiver's GPU.

The receiver allocates one slab of its GPU's memory and shows it to other processes by a CUDA IPC handle: plain memory,
no multicast. A region is a piece of it beside a region in shared memory, which stays empty, and whose lock and page of
control hold for both: a writer has the lock for as long as its kernels may write. What cannot map the slab (another
host, container or user, no peer access) writes to the shared memory, or sends over gRPC, and the KV goes that way.

The slab's pieces are used again, so a region, also one that has come, has to be its writer's until that is over, and
nobody else may be on the way to it: the lock is asked for in any case.
- the writer has put its mark on the page of control before it looks whether the region was given up;
- when none of its copies runs any more it marks itself as over, and lets go of the lock;
- a lock that went without that mark was a dead process's. Its kernels end with its context, which is gone when the
  process is seen to have ended, and some time has passed since.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import numpy as np

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_transfer.device_memory import HANDLE_BYTES, DevicePiece, DeviceSlab, KvDevice
from radixmesh.daemons.worker.kv_transfer.host_process import GoneWatch, HostProcess, host_name
from radixmesh.daemons.worker.kv_transfer.transfer_service import GrpcTransport, GrpcWriter
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray, KvWriter, RegionMemory, to_the_end
from radixmesh.daemons.worker.kv_transfer.transports.shared_memory import (
    CONTROL_BYTES,
    SharedMemory,
    SharedMemoryTransport,
    SharedWriter,
    opened,
    require_wanted,
    take_region,
)
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

_COPY_BYTES = 16 << 20
_WATCH_S = 1.0
# A slab that could not be mapped is not tried again for so long.
_REFUSED_S = 30.0

# Of the page of control, beside what `shared_memory` has there.
_IS_ON_DEVICE = 1
_IS_WRITER_OVER = 2
_WRITER = slice(8, 24)
"""Process id and start of a writer to the device, two little-endian int64."""


class SharedSlab(DeviceSlab):
    """One that other processes map by its handle. Raises UNSUPPORTED."""

    def __init__(self, device: KvDevice, num_bytes: int) -> None:
        super().__init__(device, num_bytes)
        self._handle = device.handle(self.address)
        self._owner = HostProcess.own()

    def describe(self, piece: DevicePiece) -> worker_pb2.DeviceMemory:
        """As a writer is told of it."""
        return worker_pb2.DeviceMemory(
            handle=self._handle,
            offset=piece.address - self.address,
            owner=worker_pb2.HostProcess(**self._owner._asdict()),
        )


class DeviceRegion(SharedMemory):
    """A region as its receiver has it: its KV is on the device, or in shared memory, as its writer chose."""

    def __init__(self, num_bytes: int, slab: SharedSlab) -> None:
        """Raises MemoryError, also where the slab has no such piece."""
        self._slab = slab
        self._piece: DevicePiece | None = slab.take(num_bytes)
        self._writer: GoneWatch | None = None
        try:
            super().__init__(num_bytes)
        except BaseException:
            self._give_back()
            raise

    @property
    def has_one_writer(self) -> bool:
        # One that is refused, or comes late, may not have heard of it yet.
        return False

    @property
    def device_piece(self) -> DevicePiece | None:
        return self._piece if self.control[_IS_ON_DEVICE] else None

    def describe(self, region: worker_pb2.TransferRegion) -> None:
        super().describe(region)
        assert self._piece is not None
        region.device.CopyFrom(self._slab.describe(self._piece))

    def is_writer_gone(self) -> bool:
        if not super().is_writer_gone():
            return False
        if not self.control[_IS_ON_DEVICE] or self.control[_IS_WRITER_OVER]:
            return True
        if self._writer is None:
            pid, started = self.control[_WRITER].view("<i8").tolist()
            self._writer = GoneWatch(HostProcess(host_name(), pid, started))
        return self._writer.is_gone()

    def close(self) -> None:
        super().close()
        self._give_back()

    def _give_back(self) -> None:
        piece, self._piece = self._piece, None
        if piece is not None:
            self._slab.give_back(piece)


class DeviceTransport(SharedMemoryTransport):
    """Between workers of one host whose GPUs reach each other; as SharedMemoryTransport where use_device() was not
    called, and between any others. staging_bytes: of the slab."""

    def __init__(
        self,
        tls: TlsFiles | None = None,
        *,
        staging_bytes: int,
        before_last_word: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(tls, before_last_word=before_last_word)
        self._staging_bytes = staging_bytes
        self.device_slab: SharedSlab | None = None
        self._mappings: Mappings | None = None

    def use_device(self, device: KvDevice) -> None:
        try:
            self.device_slab = SharedSlab(device, self._staging_bytes)
        except MeshError as error:
            log.warning("kv_goes_through_the_host", error=str(error))
            return
        log.info("kv_memory_offered", bytes=self._staging_bytes)
        self._mappings = Mappings(device)

    def close(self) -> None:
        super().close()
        if self._mappings is not None:
            self._mappings.close()

    def new_memory(self, num_bytes: int) -> RegionMemory:
        if self.device_slab is not None and self.has_files:
            with suppress(MemoryError):
                return self.held(DeviceRegion(num_bytes, self.device_slab))
        return super().new_memory(num_bytes)

    def may_place(self, region: worker_pb2.TransferRegion) -> bool:
        is_here = region.HasField("shared_memory") and region.shared_memory.host == host_name()
        return self._mappings is not None and is_here and len(region.device.handle) == HANDLE_BYTES

    @asynccontextmanager
    async def open(self, address: str, region: worker_pb2.TransferRegion, writer: str) -> AsyncIterator[KvWriter]:
        mappings = self._mappings
        if mappings is None or not self.may_place(region):
            async with super().open(address, region, writer) as other:
                yield other
            return
        async with GrpcTransport.open(self, address, region, writer) as words:
            assert isinstance(words, GrpcWriter)
            fd = opened(region)
            if fd is None:
                yield words
                return
            try:
                mapping = await mappings.take(region)
                if mapping is None:
                    yield await SharedWriter.begun(words, fd, region)
                    return
                try:
                    async with _writing(words, fd, region, mappings.device, mapping) as target:
                        yield target
                finally:
                    mapping.num_users -= 1
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)


@asynccontextmanager
async def _writing(
    words: GrpcWriter, fd: int, region: worker_pb2.TransferRegion, device: KvDevice, mapping: Mapping
) -> AsyncIterator[DeviceWriter]:
    """Raises TRANSFER_FAILED for a region that was given up. Who leaves has no copy that still runs."""
    control = np.frombuffer(mmap.mmap(fd, region.num_bytes + CONTROL_BYTES), np.uint8)[region.num_bytes :]
    take_region(control)
    own = HostProcess.own()
    control[_WRITER] = np.array([own.pid, own.started], "<i8").view(np.uint8)
    control[_IS_ON_DEVICE] = 1
    writer = DeviceWriter(words, device, mapping.memory.part(region.device.offset, region.num_bytes))
    try:
        # The receiver hears of its writer before that writes.
        await words.begin()
        require_wanted(control)
        yield writer
    finally:
        control[_IS_WRITER_OVER] = not writer.is_left_running


class DeviceWriter(KvWriter):
    def __init__(self, words: GrpcWriter, device: KvDevice, target: DevicePiece) -> None:
        self.words, self._device, self._target = words, device, target
        self.is_left_running = False

    def left_running(self) -> None:
        self.is_left_running = True

    def place(self, offset: int, num_bytes: int) -> DevicePiece:
        return self._target.part(offset, num_bytes)

    async def placed(self, offset: int, num_bytes: int, *, is_last: bool = False) -> None:
        await self.words.wrote(offset, num_bytes, is_last=is_last)

    async def ending(self) -> None:
        await self.words.ending()

    async def write(self, offset: int, data: ByteArray | DevicePiece) -> None:
        assert not isinstance(data, DevicePiece), "buffers of this transport lie in memory of the host"
        for start in range(0, len(data), _COPY_BYTES):
            piece = data[start : start + _COPY_BYTES].tobytes()
            address = self._target.part(offset + start, len(piece)).address
            await to_the_end(asyncio.to_thread(self._device.write, address, piece))
            await self.words.wrote(offset + start, len(piece))

    async def done(self, checksum: int, gather_start: worker_pb2.GatherStart | None = None) -> None:
        # The host has not seen the bytes.
        await self.words.done(0, gather_start)


class Mapping:
    """Another process's slab, as it is mapped here. num_users: writers to it."""

    def __init__(self, memory: DevicePiece, owner: HostProcess) -> None:
        self.memory, self.owner = memory, owner
        self.num_users = 0


class Mappings:
    """Slabs of other processes, each mapped once, until that process has ended: its device would keep the memory."""

    def __init__(self, device: KvDevice) -> None:
        self.device = device
        self.mapped: dict[bytes, Mapping] = {}
        self._refused: dict[bytes, float] = {}
        """Handles that could not be opened, and when."""
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def take(self, region: worker_pb2.TransferRegion) -> Mapping | None:
        """Of the region's slab, with one more user; None: there is no way to it."""
        handle, owner = region.device.handle, region.device.owner
        async with self._lock:
            mapping = self.mapped.get(handle)
            if mapping is None:
                if time.monotonic() - self._refused.get(handle, -_REFUSED_S) < _REFUSED_S:
                    return None
                # Cancelled, it is noted all the same: what is mapped and not known here would stay for ever.
                mapping = await to_the_end(self._mapping_of(region.transfer_id, handle, owner))
                if mapping is None:
                    return None
            if region.device.offset + region.num_bytes > mapping.memory.num_bytes:
                log.warning("region_beyond_its_memory", transfer=region.transfer_id, offset=region.device.offset)
                return None
            mapping.num_users += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        return mapping

    async def _mapping_of(self, transfer_id: str, handle: bytes, owner: worker_pb2.HostProcess) -> Mapping | None:
        now = time.monotonic()
        try:
            memory = await asyncio.to_thread(self.device.open, handle)
        except MeshError as error:
            log.info("kv_goes_through_the_host", transfer=transfer_id, error=str(error))
            self._refused = {other: at for other, at in self._refused.items() if now - at < _REFUSED_S}
            self._refused[handle] = now
            return None
        log.info("kv_memory_mapped", owner=owner.pid, bytes=memory.num_bytes)
        mapping = self.mapped[handle] = Mapping(memory, HostProcess(owner.host, owner.pid, owner.started))
        return mapping

    def close(self) -> None:
        """Nothing is mapped any more; what is, goes with the process."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while self.mapped:
            await asyncio.sleep(_WATCH_S)
            async with self._lock:
                for handle, mapping in tuple(self.mapped.items()):
                    if not mapping.num_users and mapping.owner.is_gone():
                        del self.mapped[handle]
                        await asyncio.to_thread(self.device.close, mapping.memory.address)
