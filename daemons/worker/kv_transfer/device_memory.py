"""Staging memory of a device, and what copies KV between it and pages without the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.rpc.hello import check_peer_names
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent
from radixmesh.worker.v1 import worker_pb2

HANDLE_BYTES = 64
"""Of CUDA's name of an allocation."""
MAX_TAIL_BYTES = 64
"""Of what gather() writes behind KV, and fetch() brings from one place."""
_ALIGNMENT = 256


class DevicePiece(NamedTuple):
    """Memory of a device, or of another one that is mapped there. address: as its kernels have it."""

    address: int
    num_bytes: int

    def part(self, offset: int, num_bytes: int) -> DevicePiece:
        """Some of its bytes."""
        assert offset >= 0 and offset + num_bytes <= self.num_bytes, (offset, num_bytes, self.num_bytes)
        return DevicePiece(self.address + offset, num_bytes)


class TokenNumbers:
    """Numbers of tokens in a pool, int32, as copies of some of them name them: a device gets them once, with the first
    copy in a direction."""

    def __init__(self, numbers: IntArray, whole: TokenNumbers | None = None, start: int = 0) -> None:
        """whole: of which these are a part, from `start` on."""
        self.numbers = numbers
        # None and not itself: what a device has of them goes with the last copy, not with a collection.
        self._whole = whole
        self.start = start
        self.sent: dict[str, object] = {}
        """Of a whole: what a device has of it, by direction."""

    @property
    def whole(self) -> TokenNumbers:
        """Those of which these are a part, or themselves."""
        return self if self._whole is None else self._whole

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, start: int, stop: int) -> TokenNumbers:
        """Some of them."""
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        return TokenNumbers(self.numbers[start:stop], self.whole, self.start + start)


class Copied(NamedTuple):
    """A copy that was launched. event: it has run. seconds: device time that it took, once it has."""

    event: DeviceEvent
    seconds: Callable[[], float] = lambda: 0.0


class Fetched(NamedTuple):
    """Bytes that are on their way to the host. event: they are there. data: what they are, once that is done."""

    event: DeviceEvent
    data: Callable[[], list[bytes]]


class KvDevice(ABC):
    """The device of a runner's KV pages, as transfers use it. gather(), scatter() and fetch() are launched on the step
    thread. The others block, on any thread."""

    number: int
    """Of the GPU, as this process's libraries count them; negative: it is memory of the host."""

    @abstractmethod
    def gather(
        self,
        tokens: TokenNumbers,
        target: DevicePiece,
        part: KvShare | None,
        after: DeviceEvent = DONE,
        *,
        tail: bytes = b"",
    ) -> Copied:
        """Copies what read_kv() gives of tokens and heads to memory, and `tail` behind it, MAX_TAIL_BYTES at most.
        after: the tokens were computed by then. Later steps do not wait for it, but for what overwritten() was told."""

    @abstractmethod
    def scatter(
        self, tokens: TokenNumbers, source: DevicePiece, part: KvShare | None, after: DeviceEvent | None = None
    ) -> Copied:
        """Copies to pages as write_kv() does, from memory. after: no step behind it uses these pages before this copy
        is over; None: some may, and the copy runs between the steps so far and the next."""

    def fetch(self, places: Sequence[DevicePiece], behind: Copied, after: DeviceEvent | None = None) -> Fetched:
        """Bytes of memory as they are behind a scatter and all before it, of MAX_TAIL_BYTES at most in each place.
        after: as of the scatter. Default: they are read once they are asked for."""
        return Fetched(behind.event, lambda: [self.read(*place) for place in places])

    def hold(self, copied: Copied) -> None:
        """Steps that are launched from now on wait for a copy on the device. Default: for the copy itself."""
        copied.event.wait()

    def overwritten(self, pages: IntArray) -> None:
        """Pages that what is launched next may write to: it waits for gathers of them. Default: none is under way when
        gather() returns."""
        return

    @abstractmethod
    def allocate(self, num_bytes: int) -> int:
        """Address of new memory that lives as long as this process, and that others can map. Raises UNSUPPORTED."""

    @abstractmethod
    def handle(self, address: int) -> bytes:
        """The name of such memory for other processes of this host. Raises UNSUPPORTED."""

    @abstractmethod
    def open(self, handle: bytes) -> DevicePiece:
        """Another process's memory, as it is mapped here. Raises UNSUPPORTED where there is no way to it."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Gives back what open() gave. The process behind it may be gone."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Copies bytes to memory."""

    @abstractmethod
    def read(self, address: int, num_bytes: int) -> bytes:
        """Bytes of memory."""

    @abstractmethod
    def warm_up(self, memory: DevicePiece) -> None:
        """Compiles the copies, with memory that nobody uses and pages that hold nothing yet."""


def check_device_memory(memory: worker_pb2.DeviceMemory) -> None:
    """Raises INVALID_ARGUMENT for what a peer sends that is too long to name memory."""
    check_peer_names(host=memory.owner.host)
    if len(memory.handle) > HANDLE_BYTES:
        message = f"handle has {len(memory.handle)} bytes: send {HANDLE_BYTES}, as CUDA gives them"
        details = {"field": "handle", "max": str(HANDLE_BYTES)}
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, details)


class Pieces:
    """Pieces of one allocation that are lent, each from a multiple of `alignment` on."""

    def __init__(self, num_bytes: int, alignment: int) -> None:
        self.num_bytes = num_bytes
        self._alignment = alignment
        self._free: list[tuple[int, int]] = [(0, num_bytes)]
        """Pieces [start, end) that nobody has, by start; no two of them touch."""

    @property
    def num_free(self) -> int:
        """Bytes that nobody has."""
        return sum(end - start for start, end in self._free)

    def take(self, num_bytes: int) -> int:
        """Offset of a piece. Raises MemoryError, also where the free bytes do not lie together."""
        size = self._rounded(num_bytes)
        for at, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[at : at + 1] = [(start + size, end)] if end - start > size else []
                return start
        raise MemoryError(f"{size} bytes of staging do not lie together")

    def give_back(self, start: int, num_bytes: int) -> None:
        """Nobody reads or writes a piece any more."""
        insort(self._free, (start, start + self._rounded(num_bytes)))
        merged: list[tuple[int, int]] = []
        for part in self._free:
            if merged and merged[-1][1] == part[0]:
                merged[-1] = (merged[-1][0], part[1])
            else:
                merged.append(part)
        self._free = merged

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment


class DeviceSlab:
    """Memory of this process's device that is lent in pieces. Raises UNSUPPORTED where there is none that others could
    map."""

    def __init__(self, device: KvDevice, num_bytes: int) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.address = device.allocate(num_bytes)
        self.pieces = Pieces(num_bytes, _ALIGNMENT)
        device.warm_up(DevicePiece(self.address, num_bytes))

    def take(self, num_bytes: int) -> DevicePiece:
        """Not cleared. Raises MemoryError."""
        return DevicePiece(self.address + self.pieces.take(num_bytes), num_bytes)

    def give_back(self, piece: DevicePiece) -> None:
        """Nobody writes there, and nobody reads it."""
        self.pieces.give_back(piece.address - self.address, piece.num_bytes)
