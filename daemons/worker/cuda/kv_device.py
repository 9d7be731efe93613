"""KV of a GPU's pages to and from staging memory of this GPU, or of another one that is mapped here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker.cuda.device import Device, TimedEvent
from radixmesh.daemons.worker.cuda.ranks.peer_memory import PeerMemory
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, KvDevice
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent

# Numbers of tokens for which Triton compiles the copies: any, one, multiples of 16.
_COMPILED_FOR = (3, 1, 16)


class _Gather:
    """A gather that may run. indexes: int32, of the tokens that it reads. end: of its copy."""

    def __init__(self, indexes: IntArray, end: TimedEvent, pool: KvPool) -> None:
        self.end = end
        self._indexes, self._pool = indexes, pool
        self._is_read: npt.NDArray[np.bool_] | None = None

    def reads(self, pages: IntArray) -> bool:
        """True if it reads any of these."""
        if self._is_read is None:
            # Not ahead of the first question: whoever asks for a gather waits for it.
            self._is_read = np.zeros(self._pool.num_pages + 1, np.bool_)
            self._is_read[self._indexes // self._pool.page_size] = True
        return bool(self._is_read[pages].any())


class PoolDevice(KvDevice):
    """received: told, in order with the steps, of tokens that came from elsewhere; None: nobody is."""

    def __init__(
        self, device: Device, pool: KvPool, memory: PeerMemory, received: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        assert pool.copies_by_address
        self.number = -1 if device.torch_device.type == "cpu" else device.torch_device.index or 0
        self._device, self._pool, self._memory, self._received = device, pool, memory, received
        self._gathers: deque[_Gather] = deque()

    @torch.inference_mode()
    def gather(self, indexes: IntArray, target: DevicePiece, part: KvShare | None, after: DeviceEvent = DONE) -> Copied:
        def copy() -> None:
            self._pool.gather_to(self._sent(indexes), target.address, part)

        start, end = self._device.run_beside(copy, after, is_urgent=True)
        self._gathers.append(_Gather(indexes, end, self._pool))
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
        self, indexes: IntArray, source: DevicePiece, part: KvShare | None, after: DeviceEvent | None = None
    ) -> Copied:
        if self._received is not None:
            with self._device.in_order():
                self._received(self._sent(indexes))
        if after is not None:
            work = partial(self._scatter, indexes, source, part)
            return _copied(*self._device.run_beside(work, after, is_urgent=False))
        with self._device.in_order():
            start = self._device.record_event()
            self._scatter(indexes, source, part)
            return _copied(start, self._device.record_event())

    def _scatter(self, indexes: IntArray, source: DevicePiece, part: KvShare | None) -> None:
        self._pool.scatter_from(self._sent(indexes), source.address, part)

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
        # Its kernel is loaded now, and not beside the first KV that comes.
        for num in _COMPILED_FOR:
            if num * self._pool.token_bytes > memory.num_bytes:
                continue  # Nor will so many tokens ever be copied there.
            piece = memory.part(0, num * self._pool.token_bytes)
            indexes = np.arange(num, dtype=np.int32)
            self.gather(indexes, piece, None)
            self.scatter(indexes, piece, None).event.wait()

    def _sent(self, indexes: IntArray) -> torch.Tensor:
        """The same on the device."""
        tokens = torch.empty(len(indexes), dtype=torch.int32, device=self._device.torch_device)
        self._device.upload(indexes, tokens)
        return tokens


def _copied(start: TimedEvent, end: TimedEvent) -> Copied:
    return Copied(end, lambda: end.seconds_since(start))
