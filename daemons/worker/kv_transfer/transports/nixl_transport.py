"""KV transfers over NIXL: the writer's own library puts bytes into the receiver's memory.

Regions and send buffers are pieces of one slab that is registered at the start, so a chunk is one descriptor on either
side. It is memory of the GPU where the runner has one, which UCX carries from GPU to GPU, of the host otherwise. A
writer asks over gRPC first, and writes when it is let in; progress, refusals and the last word go the same way.

A region that was given up is the writer's until that is over. What says so:
- its last word, which it says when none of its own handles is on its way any more, or, where the stream has broken, a
  notice over NIXL behind its last write;
- the end of its process, which the receiver sees if it is on the same host;
- an operator (`AbortTransfer.is_writer_gone`). Of a writer on another host that died without a word nothing else does.
Deregistering memory is no proof: UCX writes between processes and over TCP also what is not registered any more.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece, DeviceSlab, KvDevice
from radixmesh.daemons.worker.kv_transfer.host_process import GoneWatch, HostProcess
from radixmesh.daemons.worker.kv_transfer.transfer_service import PATIENCE_S, GrpcTransport, GrpcWriter
from radixmesh.daemons.worker.kv_transfer.transport import (
    ByteArray,
    KvWriter,
    RegionMemory,
    SendBuffer,
    checksum_of,
    to_the_end,
)
from radixmesh.daemons.worker.kv_transfer.transports.nixl_agent import NixlAgent, Slab
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

# The library copies between processes of one host as it is called, and takes no other call meanwhile.
_WRITE_BYTES = 16 << 20
# A write is seen to be over by a tenth of its time later.
_POLL_S = 0.0005
_MOST_POLL_S = 0.02
_POLL_SHARE = 0.1
# Less is copied to a piece of the slab: to register memory, and forget it again, takes as long as to write megabytes.
_COPIED_BYTES = 4096
# Peers that the log is told of: more are counted alone.
_MAX_FALLBACK_PEERS = 1024
HOST_MEMORY = -1
"""Number of the device of memory of the host."""
_Place = tuple[int, int, int]
"""Address, bytes, and number of the device."""


class NixlMemory(RegionMemory):
    """A piece of the slab, as its receiver has it."""

    def __init__(self, agent: NixlAgent, metadata: bytes, num_bytes: int, slab: Slab | None = None) -> None:
        self._agent = agent
        self._metadata = metadata
        self._slab = slab
        self._notice = b""
        self._writer: GoneWatch | None = None
        self._is_closed = False
        if slab is not None:
            self.array = slab.take(num_bytes)

    @property
    def writes_are_seen(self) -> bool:
        return False

    @property
    def place(self) -> _Place:
        """The memory that a writer over NIXL writes to."""
        return _place(self.array)

    def describe(self, region: worker_pb2.TransferRegion) -> None:
        self._notice = _notice(region)
        address, length, device = self.place
        region.nixl.CopyFrom(
            worker_pb2.NixlRegion(agent_metadata=self._metadata, address=address, length=length, device=device)
        )

    def let_in(self, process: HostProcess) -> None:
        self._writer = GoneWatch(process)

    def is_writer_gone(self) -> bool:
        if self._writer is None:
            return True  # Whoever comes now is told that the transfer is over.
        return self._agent.take_notice(self._notice) or self._writer.is_gone()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._give_back()

    def _give_back(self) -> None:
        if self._slab is not None:
            self._slab.give_back(self.array)


class NixlDeviceMemory(NixlMemory):
    """A piece of a device, for a writer over NIXL. Bytes that come over gRPC go to memory of the host instead."""

    def __init__(self, agent: NixlAgent, metadata: bytes, slab: DeviceSlab, num_bytes: int) -> None:
        self._device_slab = slab
        self._piece = slab.take(num_bytes)
        super().__init__(agent, metadata, num_bytes)
        self.array = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)

    @property
    def device_piece(self) -> DevicePiece | None:
        return None if self._writer is None else self._piece

    @property
    def place(self) -> _Place:
        return self._piece.address, self._piece.num_bytes, self._device_slab.device.number

    def _give_back(self) -> None:
        self._device_slab.give_back(self._piece)


class NixlTransport(GrpcTransport):
    """Between workers that both have NIXL; over gRPC to any other, which is told to on_fallback each time and to the
    log once a peer. staging_bytes: of all regions and send buffers."""

    def __init__(
        self,
        tls: TlsFiles | None = None,
        *,
        staging_bytes: int,
        patience_s: float = PATIENCE_S,
        before_last_word: Callable[[], Awaitable[None]] | None = None,
        on_fallback: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(tls, patience_s=patience_s, before_last_word=before_last_word)
        self._on_fallback = on_fallback
        self._fallback_peers: set[str] = set()
        self.agent = NixlAgent()
        self.slab = Slab(self.agent, staging_bytes)
        self._staging_bytes = staging_bytes
        self.device_slab: DeviceSlab | None = None
        self._metadata = self.agent.metadata
        self.patience_s = patience_s
        self._process = HostProcess.own()
        self._ending: set[asyncio.Task[None]] = set()

    def use_device(self, device: KvDevice) -> None:
        try:
            slab = DeviceSlab(device, self._staging_bytes)
            self.agent.register(slab.address, slab.num_bytes, device.number)
        except Exception as error:
            # The library's errors are of many types.
            log.warning("kv_goes_through_the_host", error=f"{type(error).__name__}: {error}")
            return
        self.device_slab, self._metadata = slab, self.agent.metadata
        log.info("kv_memory_offered", bytes=slab.num_bytes, device=device.number)

    def new_memory(self, num_bytes: int) -> RegionMemory:
        if self.device_slab is not None:
            with suppress(MemoryError):
                return NixlDeviceMemory(self.agent, self._metadata, self.device_slab, num_bytes)
        return NixlMemory(self.agent, self._metadata, num_bytes, self.slab)

    def new_buffer(self, num_bytes: int) -> SendBuffer:
        if (slab := self.device_slab) is not None:
            with suppress(MemoryError):
                on_device = slab.take(num_bytes)
                return SendBuffer(on_device, lambda: slab.give_back(on_device))
        piece = self.slab.take(num_bytes)
        return SendBuffer(piece, lambda: self.slab.give_back(piece))

    @asynccontextmanager
    async def open(self, address: str, region: worker_pb2.TransferRegion, writer: str) -> AsyncIterator[KvWriter]:
        async with super().open(address, region, writer) as words:
            assert isinstance(words, GrpcWriter)
            peer = await self._peer(address, region)
            if peer is None:
                yield words if self.device_slab is None else _FromDevice(words, self.device_slab.device)
                return
            target = _NixlWriter(self, words, region, peer)
            try:
                await words.ask(self._process)
                target.is_let_in = True
                yield target
            finally:
                if target.is_let_in and not target.is_said:
                    ending = asyncio.ensure_future(target.wind_up())
                    self._ending.add(ending)
                    ending.add_done_callback(self._ending.discard)

    async def _peer(self, address: str, region: worker_pb2.TransferRegion) -> str | None:
        """Name of the region's agent; None where NIXL does not lead there."""
        memory = region.nixl
        if not region.HasField("nixl") or memory.length != region.num_bytes:
            self._fell_back(address, "that worker offers no memory over NIXL: start it with --transfer-transport nixl")
            return None
        try:
            return await asyncio.to_thread(self.agent.connect, memory.agent_metadata)
        except MeshError as error:
            self._fell_back(address, str(error))
            return None

    def _fell_back(self, address: str, reason: str) -> None:
        self._on_fallback()
        if address not in self._fallback_peers and len(self._fallback_peers) < _MAX_FALLBACK_PEERS:
            self._fallback_peers.add(address)
            log.warning("nixl_does_not_lead_there", peer=address, goes_over="grpc", reason=reason)


class _NixlWriter(KvWriter):
    def __init__(self, transport: NixlTransport, words: GrpcWriter, region: worker_pb2.TransferRegion, peer: str):
        self.is_let_in = False
        self.is_said = False
        """The receiver has heard the last word."""
        self._transport = transport
        self.words = words
        self._region = region
        self._peer = peer
        self._running: asyncio.Future[None] | None = None

    async def write(self, offset: int, data: ByteArray | DevicePiece) -> None:
        address, num_bytes, device = self._place(data)
        # Of the host in parts: the library copies them as it is called, and takes no other call meanwhile.
        step = _WRITE_BYTES if device < 0 else num_bytes
        for start in range(0, num_bytes, max(step, 1)):
            part = (address + start, min(step, num_bytes - start), device)
            self._running = asyncio.ensure_future(self._write(offset + start, part, data))
            # Cancelled or out of patience, the write itself goes on: wind_up() waits for it.
            async with asyncio.timeout(self._transport.patience_s):
                await asyncio.shield(self._running)
            await self.words.wrote(offset + start, part[1])

    async def ending(self) -> None:
        # The receiver may be asked to commit then, and copy what has come.
        await self.words.ending()

    async def done(self, checksum: int, gather_start: worker_pb2.GatherStart | None = None) -> None:
        try:
            await self.words.done(checksum, gather_start)
        finally:
            self.is_said = self.words.is_answered

    async def wind_up(self) -> None:
        """Waits for the last write, then says that there will be none, on the way that the data took."""
        if self._running is not None:
            await asyncio.wait((self._running,))
            if not self._running.cancelled():
                self._running.exception()
        await asyncio.to_thread(self._transport.agent.notify, self._peer, _notice(self._region))

    def _place(self, data: ByteArray | DevicePiece) -> _Place:
        if not isinstance(data, DevicePiece):
            return _place(data)
        assert self._transport.device_slab is not None
        return data.address, data.num_bytes, self._transport.device_slab.device.number

    async def _write(self, offset: int, part: _Place, data: ByteArray | DevicePiece) -> None:
        """Writes a part of data, which is registered or becomes so. Returns when nothing reads it any more. Raises
        TRANSFER_FAILED."""
        agent, slab, metadata = self._transport.agent, self._transport.slab, self._region.nixl.agent_metadata
        is_registered = isinstance(data, DevicePiece) or slab.has(data)
        copied: ByteArray | None = None
        if not isinstance(data, DevicePiece) and not is_registered and len(data) <= _COPIED_BYTES:
            with suppress(MemoryError):
                copied = slab.take(len(data))
                copied[:] = data
                part, is_registered = _place(copied), True
        # All else outside the slab is registered for this write alone.
        own = None if is_registered else await asyncio.to_thread(agent.register, *part)
        is_done = False
        try:
            handle = await asyncio.to_thread(agent.post_write, self._peer, part, self._target(offset, part[1]))
            began = time.monotonic()
            while (state := await asyncio.to_thread(agent.state, handle)) == "PROC":
                pause = _POLL_SHARE * (time.monotonic() - began)
                await asyncio.sleep(min(max(pause, _POLL_S), _MOST_POLL_S))
            await asyncio.to_thread(agent.release, handle)
            is_done = state == "DONE"
        finally:
            if own is not None:
                await asyncio.to_thread(agent.deregister, own)
            if not is_done:
                await asyncio.to_thread(agent.disconnect, metadata)
            if copied is not None:
                slab.give_back(copied)
        if not is_done:
            message = "KV could not be written over NIXL: the peer is gone"
            raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message)

    def _target(self, offset: int, num_bytes: int) -> tuple[int, int, int]:
        memory = self._region.nixl
        return memory.address + offset, num_bytes, memory.device


class _FromDevice(KvWriter):
    """Over gRPC, from buffers of a device."""

    def __init__(self, words: GrpcWriter, device: KvDevice) -> None:
        self.words, self._device = words, device
        self._checksum = 0

    async def write(self, offset: int, data: ByteArray | DevicePiece) -> None:
        if not isinstance(data, DevicePiece):
            await self._write(offset, data)
            return
        for start in range(0, data.num_bytes, _WRITE_BYTES):
            part = data.part(start, min(_WRITE_BYTES, data.num_bytes - start))
            read = await to_the_end(asyncio.to_thread(self._device.read, part.address, part.num_bytes))
            await self._write(offset + start, np.frombuffer(read, np.uint8))

    async def done(self, checksum: int, gather_start: worker_pb2.GatherStart | None = None) -> None:
        await self.words.done(self._checksum, gather_start)

    async def _write(self, offset: int, data: ByteArray) -> None:
        await self.words.write(offset, data)
        self._checksum = await asyncio.to_thread(checksum_of, data, self._checksum)


def _place(data: ByteArray) -> _Place:
    return data.ctypes.data, len(data), HOST_MEMORY


def _notice(region: worker_pb2.TransferRegion) -> bytes:
    """By which the writer of a region says over NIXL that it is over."""
    return b"over" + struct.pack("<Q", region.incarnation)
