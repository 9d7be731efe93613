"""Host pages of a GPU worker: page-locked memory that copies on streams of their own read and write.

How they copy: `page_copies.py`; which way: `choice.py`. A thread for each direction gives the copies to its stream.

compute:  steps ... step k | ........ step k + 1 (grants a page that is being saved) waits for ......
save:    waits for the last step that wrote its pages -- save --event--------------------------^
load:    waits for the last step that used its pages, and for saves of them -- load --event--> told to the scheduler
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.device import CudaDevice, CudaEvent
from radixmesh.daemons.worker.cuda.host_tier.choice import StepWork, Trial, best_of, probed_pages
from radixmesh.daemons.worker.cuda.host_tier.copy_calls import driver_calls
from radixmesh.daemons.worker.cuda.host_tier.copy_thread import CopyEnd, CopyThread
from radixmesh.daemons.worker.cuda.host_tier.page_copies import KernelCopies, PageCopies, ways_for
from radixmesh.daemons.worker.cuda.locked_memory import LockedMemory
from radixmesh.daemons.worker.host_memory.host_pool import HostPool, host_pages_in
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent

_log = get_logger(__name__)


class Copies(NamedTuple):
    """Ways of copying."""

    save: PageCopies
    load: PageCopies


class _Copy(NamedTuple):
    event: CopyEnd
    device_pages: IntArray
    host_pages: IntArray


class CudaHostPool(HostPool):
    """planes: int32 [layers, pages, words of a page] on the device, by name. beside_kv: the same, of what is not KV.
    spare_page: one that nobody reads. loaded: told of device pages that are being loaded, ahead of all steps that may
    read them. segment: file that the memory is of, not opened yet; None: it is this process's own.

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
        *,
        beside_kv: Sequence[torch.Tensor] = (),
    ) -> None:
        self._device, self._loaded, self.segment = device, loaded, segment
        self._planes = (*planes.values(), *beside_kv)
        page_words = sum(plane.shape[0] * plane.shape[2] for plane in self._planes)
        self.page_bytes = 4 * page_words
        self.kv_bytes = self.page_bytes - 4 * sum(plane.shape[0] * plane.shape[2] for plane in beside_kv)
        self.num_pages = host_pages_in(num_bytes, self.page_bytes)
        rows = None if segment is None else segment.open(self.num_pages, self.page_bytes)
        self._memory = LockedMemory(self.num_pages * page_words, device.torch_device, rows, page_words)
        self._words = self._memory.words.view(self.num_pages, page_words)
        self._save_stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self.load_stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self._save_thread, self._load_thread = CopyThread("kv-saves"), CopyThread("kv-loads")
        self._saves: deque[_Copy] = deque()
        self._loads: deque[_Copy] = deque()
        self.trials: dict[str, dict[str, Trial]] = {}
        """Of ways, by name and direction, where there is a choice."""
        # Kernels are compiled, where they copy: no step waits for that.
        page, first = np.array([spare_page], np.int32), np.zeros(1, np.int32)
        if segment is not None:
            segment.uncommit(first)
        ways = self._ways(page_words, page, first)
        self.copies = Copies(ways[0], ways[0]) if len(ways) == 1 else self._chosen(ways, spare_page)

    def _ways(self, page_words: int, page: IntArray, first: IntArray) -> list[PageCopies]:
        """Ways that work. page: of the device, that keeps what it has; first: of the host, that is overwritten."""
        pages_together, rest = divmod(self._memory.part_words, page_words)
        try:
            start = driver_calls()
        except OSError as error:
            _log.warning("copy_engines_missing", error=repr(error))
            start = None
        ways = []
        for way in ways_for(self._planes, self._words, 0 if rest else pages_together, start):
            self.copies = Copies(way, way)
            try:
                self.save(page, first)
                self.load(first, page)
                self.wait()
            except RuntimeError as error:
                self._saves.clear()
                self._loads.clear()
                _log.warning("copy_engines_refused", way=type(way).__name__, error=repr(error))
                continue
            ways.append(way)
        return ways or [KernelCopies(self._planes, self._words)]

    def _chosen(self, ways: Sequence[PageCopies], num_pages: int) -> Copies:
        """The best way of each direction. num_pages: of the device, which hold nothing yet."""
        pages = probed_pages(num_pages, self.num_pages, self.page_bytes)
        work = StepWork(self._device, self._planes)
        trials = [self._trials_of(way, work, *pages) for way in ways]
        save, load = (ways[best_of([trial[kind] for trial in trials])] for kind in ("save", "load"))
        _log.info("host_kv_ways", saves=type(save).__name__, loads=type(load).__name__)
        return Copies(save, load)

    def _trials_of(
        self, way: PageCopies, work: StepWork, device_pages: IntArray, host_pages: IntArray
    ) -> dict[str, Trial]:
        """Of both directions. Loads come first: what is saved then is what the host has, which may be a segment's."""
        self.copies = Copies(way, way)

        def load() -> None:
            self.load(host_pages, device_pages, DONE)

        def save() -> None:
            self.save(device_pages, host_pages)

        trials = {}
        for name, copy, copies in (("load", load, self._loads), ("save", save, self._saves)):
            copy()
            self.wait()
            start = time.perf_counter()
            copy()
            end = copies[-1].event
            self.wait()
            seconds = time.perf_counter() - start
            gbps = len(host_pages) * self.page_bytes / seconds / 1e9
            trial = trials[name] = Trial(seconds, work.slower(copy, self.wait), end.cpu_s, gbps)
            _log.info(
                "host_kv_speed",
                way=type(way).__name__,
                direction=name,
                gbps=round(gbps, 1),
                steps_slower=round(trial.slower, 4),
                cpu_ms=round(1000 * trial.cpu_s, 2),
            )
        self.trials[type(way).__name__] = trials
        return trials

    def save(self, device_pages: IntArray, host_pages: IntArray, behind: DeviceEvent | None = None) -> None:
        holds = self._behind(behind)
        if late := _last_with(self._loads, None, host_pages):
            holds.append(late.event)
        self._saves.append(
            self._start(self._save_thread, self._save_stream, holds, device_pages, host_pages, to_host=True)
        )

    def load(self, host_pages: IntArray, device_pages: IntArray, behind: DeviceEvent | None = None) -> CopyEnd:
        holds = self._behind(behind)
        if late := _last_with(self._saves, device_pages, host_pages):
            holds.append(late.event)
        copy = self._start(self._load_thread, self.load_stream, holds, device_pages, host_pages, to_host=False)
        self._loads.append(copy)
        if self._loaded is not None:
            self._loaded(device_pages)
        return copy.event

    def overwritten(self, device_pages: IntArray) -> None:
        if late := _last_with(self._saves, device_pages, None):
            late.event.hold(self._device.stream)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self._words.numpy().view(np.uint8)[:, : self.kv_bytes]

    @property
    def beside_kv(self) -> npt.NDArray[np.uint8]:
        return self._words.numpy().view(np.uint8)[:, self.kv_bytes :]

    def saved(self) -> DeviceEvent:
        return self._saves[-1].event if self._saves else DONE

    def write(self, host_pages: IntArray, data: npt.NDArray[np.uint8]) -> None:
        for copies in (self._saves, self._loads):
            if late := _last_with(copies, None, host_pages):
                late.event.wait()
        super().write(host_pages, data)

    def wait(self) -> None:
        for copies in (self._saves, self._loads):
            while copies:
                copies.popleft().event.wait()

    def _behind(self, event: DeviceEvent | None) -> list[CudaEvent | CopyEnd]:
        """The events that a copy waits for which is to come behind this one; None: behind all that was launched by now,
        for the thread that starts the copy does so later."""
        if event is DONE:
            return []
        return [event if isinstance(event, CudaEvent) else self._device.event_on(self._device.stream)]

    def _start(
        self,
        thread: CopyThread,
        stream: torch.cuda.Stream,
        holds: Sequence[CudaEvent | CopyEnd],
        device_pages: IntArray,
        host_pages: IntArray,
        *,
        to_host: bool,
    ) -> _Copy:
        """holds: what the copy waits for."""
        device, way = self._device, self.copies.save if to_host else self.copies.load
        device_pages, host_pages = device_pages.copy(), host_pages.copy()

        def work() -> CudaEvent:
            for event in holds:
                event.hold(stream)
            with torch.inference_mode(), torch.cuda.device(device.torch_device), torch.cuda.stream(stream):
                way.copy(device_pages, host_pages, stream.cuda_stream, to_host=to_host)
            return device.event_on(stream)

        return _Copy(thread.start(work), device_pages, host_pages)


def _last_with(copies: deque[_Copy], device_pages: IntArray | None, host_pages: IntArray | None) -> _Copy | None:
    """The last copy under way that has any of these pages; forgets those that are over. Raises RuntimeError if one of
    them has failed."""
    while copies and copies[0].event.is_done:
        copies.popleft().event.wait()
    for copy in reversed(copies):
        if device_pages is not None and np.isin(copy.device_pages, device_pages).any():
            return copy
        if host_pages is not None and np.isin(copy.host_pages, host_pages).any():
            return copy
    return None
