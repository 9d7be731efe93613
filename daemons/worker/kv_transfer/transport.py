"""The seam of what carries KV from one worker's memory to another's."""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece, KvDevice
from radixmesh.daemons.worker.kv_transfer.host_process import HostProcess
from radixmesh.worker.v1 import worker_pb2

T = TypeVar("T")
ByteArray = npt.NDArray[np.uint8]

# Bytes of one write: an event loop copies as many in about a tenth of a millisecond.
WRITE_BYTES = 1 << 20


class SendBuffer(NamedTuple):
    """Memory that a chunk is gathered to. close: nothing reads it any more; called once."""

    memory: ByteArray | DevicePiece
    close: Callable[[], None]


class RegionMemory:
    """Memory of one region, in this process alone: what a writer sends, the receiver copies there."""

    def __init__(self, num_bytes: int) -> None:
        self.array: ByteArray = np.zeros(num_bytes, np.uint8)

    @property
    def writes_are_seen(self) -> bool:
        """True if the receiver itself copies what arrives: a region that it gives up is not written any more."""
        return True

    @property
    def has_one_writer(self) -> bool:
        """True if nobody writes behind the last word of the writer that was let in, or only to memory that is not used
        again. Otherwise is_writer_gone() is asked then, too."""
        return True

    @property
    def device_piece(self) -> DevicePiece | None:
        """Memory of the device to which its writer wrote; None: to `array`, or there is no writer yet."""
        return None

    def describe(self, region: worker_pb2.TransferRegion) -> None:
        """Adds to what a writer is told that by which it reaches this memory."""

    def let_in(self, process: HostProcess) -> None:
        """A process may write here from now on, as describe() says; others ask in vain."""

    def is_writer_gone(self) -> bool:
        """Keeps new writers out, from the first call on; True if that proves that none is left."""
        return False

    def close(self) -> None:
        """Nobody uses the region any more. Idempotent."""


class KvWriter(ABC):
    """One writer of one region. Calls one after the other; after one that raised, no more."""

    @abstractmethod
    async def write(self, offset: int, data: ByteArray | DevicePiece) -> None:
        """Writes bytes of the region, each once; from a device those of a new_buffer(). Returns when `data` is not
        read any more. Raises MeshError."""

    def place(self, offset: int, num_bytes: int) -> DevicePiece | None:
        """Memory of the region that this process's device reaches: copies may write there instead, and have run before
        this writer is left; None: all is given to write()."""
        return None

    def left_running(self) -> None:
        """Nobody has waited for a copy to where place() says, since this process ends: its end says so."""
        return

    async def placed(self, offset: int, num_bytes: int, *, is_last: bool = False) -> None:
        """Bytes of the region were written where place() says. is_last: nothing is written but by done(), which
        follows. Raises MeshError."""
        raise NotImplementedError

    async def ending(self) -> None:
        """Tells that the last chunk is under way. Raises MeshError. Default: nobody is told."""
        return

    @abstractmethod
    async def done(self, checksum: int, gather_start: worker_pb2.GatherStart | None = None) -> None:
        """Says the last word; returns when the receiver has heard it. checksum: CRC-32 of all bytes in order, those
        of a device left out. gather_start: of the last chunk. Raises
        MeshError where the receiver refused, was lost, or took nothing for too long."""


class KvTransport(ABC):
    """Writes regions. Any number of writers at a time."""

    @abstractmethod
    def new_memory(self, num_bytes: int) -> RegionMemory:
        """Memory of a region that others write to."""

    def use_device(self, device: KvDevice) -> None:
        """The runner's device, from which KV may go to others without the host. Takes a while. Default: it does not."""
        return

    def may_place(self, region: worker_pb2.TransferRegion) -> bool:
        """True if a writer of the region may have a place() for KV."""
        return False

    def close(self) -> None:
        """Nothing is written any more."""
        return

    def new_buffer(self, num_bytes: int) -> SendBuffer:
        """Memory that writers may be given `data` from. Raises MemoryError."""
        return SendBuffer(np.empty(num_bytes, np.uint8), lambda: None)

    @abstractmethod
    def open(
        self, address: str, region: worker_pb2.TransferRegion, writer: str
    ) -> AbstractAsyncContextManager[KvWriter]:
        """A writer of the region of the worker at `address`. writer: instance id of this process.

        Raises MeshError where there is no way there. When it is left, nothing of this process writes there any more, or
        the receiver keeps the region until that is so; if done() was not called, it learns that the transfer has
        failed.
        """

    @abstractmethod
    async def give_up(self, address: str, region: worker_pb2.TransferRegion, writer: str) -> None:
        """Tells the receiver that the transfer has failed, for a writer whose open() it may not have heard of. Nothing
        of this process writes there, or will. Raises MeshError where nobody could be told."""

    async def send(self, address: str, region: worker_pb2.TransferRegion, writer: str, memory: ByteArray) -> None:
        """Writes all bytes of a region, and says the last word. Raises as done()."""
        async with self.open(address, region, writer) as target:
            await target.write(0, memory)
            await target.done(checksum_of(memory))


async def to_the_end(work: Awaitable[T]) -> T:
    """Awaits work. Cancelled, it waits for that all the same: memory that it uses would be another's meanwhile."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await until_done((running,))
        raise


async def until_done(running: Iterable[asyncio.Future[T]]) -> None:
    """Waits for all of them, cancelled or not, once or more often."""
    while pending := [future for future in running if not future.done()]:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(pending)


def checksum_of(memory: ByteArray, before: int = 0) -> int:
    """CRC-32 of all bytes, continued from that of what is before them."""
    return zlib.crc32(memory.data, before)
