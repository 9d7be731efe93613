"""KV of a GPU's pages to and from staging memory of this GPU, or of another one that is mapped here."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker.cuda.device import Device, TimedEvent
from radixmesh.daemons.worker.cuda.ranks.peer_memory import PeerMemory
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.kv_transfer.device_memory import (
    MAX_TAIL_BYTES,
    Copied,
    DevicePiece,
    Fetched,
    KvDevice,
    TokenNumbers,
)
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent

# Of pinned memory, made at a time.
_NEW_SLOTS = 32
# Numbers of tokens that an upload takes without a copy engine, which may be busy with KV.
_UPLOADED = 32768


class _Gather:
    """A gather that may run. numbers: int32, of the tokens that it reads. end: of its copy."""

    def __init__(self, numbers: IntArray, end: TimedEvent, pool: KvPool) -> None:
        self.end = end
        self._numbers, self._pool = numbers, pool
        self._is_read: npt.NDArray[np.bool_] | None = None

    def reads(self, pages: IntArray) -> bool:
        """True if it reads any of these."""
        if self._is_read is None:
            # Not ahead of the first question: whoever asks for a gather waits for it.
            self._is_read = np.zeros(self._pool.num_pages + 1, np.bool_)
            self._is_read[self._numbers // self._pool.page_size] = True
        return bool(self._is_read[pages].any())


class _Slots:
    """Pinned memory of MAX_TAIL_BYTES each, which kernels read and write. Slots go back with an event: until then the
    device may use them. Any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self._free: list[int] = []
        """Addresses."""
        self._used: deque[tuple[TimedEvent, int]] = deque()
        self._taking = threading.Lock()

    def take(self) -> int:
        """The address of one."""
        with self._taking:
            if self._used and self._used[0][0].is_done:
                return self._used.popleft()[1]
            if not self._free:
                block = self._device.host_ints(_NEW_SLOTS, MAX_TAIL_BYTES // 4)
                self._blocks.append(block)
                self._free = [block.data_ptr() + at * MAX_TAIL_BYTES for at in range(_NEW_SLOTS)]
            return self._free.pop()

    def give_back(self, slot: int, event: TimedEvent) -> None:
        """Without the lock: a collection may end readings while another slot is taken."""
        self._used.append((event, slot))


class _Reading:
    """Bytes of places that a device writes to slots, until an event."""

    def __init__(self, slots: _Slots, taken: Sequence[int], sizes: Sequence[int], event: TimedEvent) -> None:
        self._slots, self._taken, self._sizes, self._event = slots, taken, sizes, event

    def data(self) -> list[bytes]:
        self._event.wait()
        return [ctypes.string_at(slot, size) for slot, size in zip(self._taken, self._sizes, strict=True)]

    def __del__(self) -> None:
        # Nobody asks any more: where a transfer is given up nobody may have.
        for slot in self._taken:
            self._slots.give_back(slot, self._event)


class PoolDevice(KvDevice):
    """received: told, in order with the steps, of tokens that came from elsewhere; None: nobody is."""

    def __init__(
        self, device: Device, pool: KvPool, memory: PeerMemory, received: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        assert pool.copies_by_address
        self.number = -1 if device.torch_device.type == "cpu" else device.torch_device.index or 0
        self._device, self._pool, self._memory, self._received = device, pool, memory, received
        self._gathers: deque[_Gather] = deque()
        self._slots = _Slots(device)

    @torch.inference_mode()
    def gather(
        self,
        tokens: TokenNumbers,
        target: DevicePiece,
        part: KvShare | None,
        after: DeviceEvent = DONE,
        *,
        tail: bytes = b"",
    ) -> Copied:
        assert len(tail) <= MAX_TAIL_BYTES, tail
        slot = self._slots.take() if tail else 0

        def copy() -> None:
            self._pool.gather_to(self._sent(tokens, "out"), target.address, part)
            if tail:
                ctypes.memmove(slot, tail, len(tail))
                self._device.copy_bytes(slot, target.address + target.num_bytes - len(tail), len(tail))

        start, end = self._device.run_beside(copy, after, is_urgent=True)
        if tail:
            self._slots.give_back(slot, end)
        self._gathers.append(_Gather(tokens.numbers, end, self._pool))
        return _copied(start, end)

    def overwritten(self, pages: IntArray) -> None:
        while self._gathers and self._gathers[0].end.is_done:
            self._gathers.popleft()
        for gather in self._gathers:
            if gather.reads(pages):
                self._device.hold(gather.end)

    def hold(self, copied: Copied) -> None:
        self._device.hold(copied.event)

    @torch.inference_mode()
    def scatter(
        self, tokens: TokenNumbers, source: DevicePiece, part: KvShare | None, after: DeviceEvent | None = None
    ) -> Copied:
        if self._received is not None:
            with self._device.in_order():
                self._received(self._uploaded(tokens.numbers))
        if after is not None:
            work = partial(self._scatter, tokens, source, part, "in")
            return _copied(*self._device.run_beside(work, after, is_urgent=False))
        with self._device.in_order():
            start = self._device.record_event()
            self._scatter(tokens, source, part, "in order")
            return _copied(start, self._device.record_event())

    @torch.inference_mode()
    def fetch(self, places: Sequence[DevicePiece], behind: Copied, after: DeviceEvent | None = None) -> Fetched:
        assert all(place.num_bytes <= MAX_TAIL_BYTES for place in places), places
        slots = [self._slots.take() for _ in places]

        def copy() -> None:
            for slot, place in zip(slots, places, strict=True):
                self._device.copy_bytes(place.address, slot, place.num_bytes)

        # The stream of scatters with such an `after`: it is behind them.
        if after is not None:
            _, end = self._device.run_beside(copy, after, is_urgent=False)
        else:
            with self._device.in_order():
                copy()
                end = self._device.record_event()
        reading = _Reading(self._slots, slots, [place.num_bytes for place in places], end)
        return Fetched(end, reading.data)

    def _scatter(self, tokens: TokenNumbers, source: DevicePiece, part: KvShare | None, direction: str) -> None:
        self._pool.scatter_from(self._sent(tokens, direction), source.address, part)

    def allocate(self, num_bytes: int) -> int:
        with self._device.in_order():
            return self._memory.allocate(num_bytes)

    def handle(self, address: int) -> bytes:
        with self._device.in_order():
            return self._memory.handle(address)

    def open(self, handle: bytes) -> DevicePiece:
        with self._device.in_order():
            address = self._memory.open(handle)
            return DevicePiece(address, self._memory.size(address))

    def close(self, address: int) -> None:
        with self._device.in_order():
            self._memory.close(address)

    def write(self, address: int, data: bytes) -> None:
        with self._device.in_order():
            self._memory.write(address, data)

    def read(self, address: int, num_bytes: int) -> bytes:
        with self._device.in_order():
            return self._memory.read(address, num_bytes)

    def warm_up(self, memory: DevicePiece) -> None:
        # Its kernels are loaded now, and not beside the first KV that comes.
        tail = bytes(4)
        if self._pool.token_bytes + len(tail) > memory.num_bytes:
            return  # Nor will a token ever be copied there.
        token = TokenNumbers(np.zeros(1, np.int32))
        self.gather(token, memory.part(0, self._pool.token_bytes + len(tail)), None, tail=tail)
        copied = self.scatter(token, memory.part(0, self._pool.token_bytes), None)
        self.fetch([memory.part(0, len(tail))], copied).data()

    def _sent(self, tokens: TokenNumbers, direction: str) -> torch.Tensor:
        """Their numbers on the device, for the current stream, which a direction has for itself."""
        sent = tokens.whole.sent.get(direction)
        if sent is None:
            sent = tokens.whole.sent[direction] = self._uploaded(tokens.whole.numbers)
        assert isinstance(sent, torch.Tensor)
        return sent[tokens.start : tokens.start + len(tokens)]

    def _uploaded(self, numbers: IntArray) -> torch.Tensor:
        uploaded = torch.empty(len(numbers), dtype=torch.int32, device=self._device.torch_device)
        for start in range(0, len(numbers), _UPLOADED):
            self._device.upload(numbers[start : start + _UPLOADED], uploaded[start:])
        return uploaded


def _copied(start: TimedEvent, end: TimedEvent) -> Copied:
    return Copied(end, lambda: end.seconds_since(start))
