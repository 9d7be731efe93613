"""Host pages of a GPU worker: page-locked memory that copies on streams of their own read and write.

How they copy: `page_copies.py`.

compute:  steps ... step k | ........ step k + 1 (grants a page that is being saved) waits for ......
save:                      +-- waits for step k -- save --event--------------------------------^
load:    waits for the last step that used its pages, and for saves of them -- load --event--> told to the scheduler
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.device import CudaDevice, CudaEvent
from radixmesh.daemons.worker.cuda.locked_memory import LockedMemory
from radixmesh.daemons.worker.cuda.page_copies import KernelCopies, PageCopies, best_of, driver_call, ways_for
from radixmesh.daemons.worker.host_memory.host_pool import HostPool, host_pages_in
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent

_log = get_logger(__name__)

# Loaded at the start by each way, to see how fast it is.
_PROBED_BYTES = 256 << 20


class _Copy(NamedTuple):
    event: CudaEvent
    device_pages: IntArray
    host_pages: IntArray


class CudaHostPool(HostPool):
    """planes: int32 [layers, pages, words of a page] on the device, by name. spare_page: one that nobody reads. loaded:
    told of device pages that are being loaded, ahead of all steps that may read them. segment: file that the memory is
    of, not opened yet; None: it is this process's own.

    Raises INVALID_ARGUMENT for memory that cannot be had.
    """

    def __init__(
        self,
        device: CudaDevice,
        planes: Mapping[str, torch.Tensor],
        num_bytes: int,
        spare_page: int,
        loaded: Callable[[IntArray], None] | None = None,
        segment: HostSegment | None = None,
    ) -> None:
        self._device, self._loaded, self.segment = device, loaded, segment
        self._planes = tuple(planes.values())
        page_words = sum(plane.shape[0] * plane.shape[2] for plane in self._planes)
        self.page_bytes = 4 * page_words
        self.num_pages = host_pages_in(num_bytes, self.page_bytes)
        rows = None if segment is None else segment.open(self.num_pages, self.page_bytes)
        self._memory = LockedMemory(self.num_pages * page_words, device.torch_device, rows, page_words)
        self._words = self._memory.words.view(self.num_pages, page_words)
        self._save_stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self.load_stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self._saves: deque[_Copy] = deque()
        self._loads: deque[_Copy] = deque()
        # Kernels are compiled, where they copy: no step waits for that.
        page, first = np.array([spare_page], np.int32), np.zeros(1, np.int32)
        if segment is not None:
            segment.uncommit(first)
        ways = self._ways(page_words, page, first)
        self.copies = ways[0] if len(ways) == 1 else best_of(ways, [self._seconds(way, spare_page) for way in ways])

    def _ways(self, page_words: int, page: IntArray, first: IntArray) -> list[PageCopies]:
        """Ways that work. page: of the device, that keeps what it has; first: of the host, that is overwritten."""
        pages_together, rest = divmod(self._memory.part_words, page_words)
        try:
            call = driver_call()
        except OSError as error:
            _log.warning("copy_engines_missing", error=repr(error))
            call = None
        ways = []
        for way in ways_for(self._planes, self._words, 0 if rest else pages_together, call):
            self.copies = way
            try:
                self.save(page, first)
                self.load(first, page)
            except RuntimeError as error:
                _log.warning("copy_engines_refused", way=type(way).__name__, error=repr(error))
                continue
            ways.append(way)
        return ways or [KernelCopies(self._planes, self._words)]

    def _seconds(self, way: PageCopies, num_pages: int) -> float:
        """Of a load; device pages hold nothing yet, and host pages are only read."""
        num = min(num_pages, self.num_pages, max(1, _PROBED_BYTES // self.page_bytes))
        pages, self.copies = np.arange(num, dtype=np.int32), way
        self.load(pages, pages)
        self.wait()
        start = time.perf_counter()
        self.load(pages, pages)
        self.wait()
        seconds = time.perf_counter() - start
        _log.info("host_kv_speed", way=type(way).__name__, gbps=round(num * self.page_bytes / seconds / 1e9, 1))
        return seconds

    def save(self, device_pages: IntArray, host_pages: IntArray) -> None:
        stream = self._save_stream
        stream.wait_stream(self._device.stream)
        if late := _last_with(self._loads, None, host_pages):
            late.event.hold(stream)
        self._saves.append(self._copy(stream, device_pages, host_pages, to_host=True))

    def load(self, host_pages: IntArray, device_pages: IntArray, behind: DeviceEvent | None = None) -> CudaEvent:
        stream = self.load_stream
        if isinstance(behind, CudaEvent):
            behind.hold(stream)
        elif behind is not DONE:
            stream.wait_stream(self._device.stream)
        if late := _last_with(self._saves, device_pages, host_pages):
            late.event.hold(stream)
        copy = self._copy(stream, device_pages, host_pages, to_host=False)
        self._loads.append(copy)
        if self._loaded is not None:
            self._loaded(device_pages)
        return copy.event

    def overwritten(self, device_pages: IntArray) -> None:
        if late := _last_with(self._saves, device_pages, None):
            late.event.hold(self._device.stream)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self._words.numpy().view(np.uint8)

    def saved(self) -> DeviceEvent:
        return self._saves[-1].event if self._saves else DONE

    def write(self, host_pages: IntArray, data: npt.NDArray[np.uint8]) -> None:
        for copies in (self._saves, self._loads):
            if late := _last_with(copies, None, host_pages):
                late.event.wait()
        self.memory[host_pages] = data

    def wait(self) -> None:
        self._save_stream.synchronize()
        self.load_stream.synchronize()
        self._saves.clear()
        self._loads.clear()

    def _copy(self, stream: torch.cuda.Stream, device_pages: IntArray, host_pages: IntArray, *, to_host: bool) -> _Copy:
        with torch.inference_mode(), torch.cuda.device(self._device.torch_device), torch.cuda.stream(stream):
            self.copies.copy(device_pages, host_pages, stream.cuda_stream, to_host=to_host)
        return _Copy(self._device.event_on(stream), device_pages.copy(), host_pages.copy())


def _last_with(copies: deque[_Copy], device_pages: IntArray | None, host_pages: IntArray | None) -> _Copy | None:
    """The last copy under way that has any of these pages; forgets those that are over."""
    while copies and copies[0].event.is_done:
        copies.popleft()
    for copy in reversed(copies):
        if device_pages is not None and np.isin(copy.device_pages, device_pages).any():
            return copy
        if host_pages is not None and np.isin(copy.host_pages, host_pages).any():
            return copy
    return None
