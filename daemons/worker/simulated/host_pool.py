"""The simulated host tier: copies that run as late as they may, so that whoever reads too early reads poison."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.host_memory.host_pool import HostPool, host_pages_in
from radixmesh.daemons.worker.simulated.clock import RealClock, StepClock
from radixmesh.daemons.worker.step_handle import DeviceEvent


class SimulatedHostPool(HostPool):
    """Rows of the runner's hashes, uint64 [pages, page_size].

    A save reads its pages when they are about to be overwritten, or somebody loads what it saved. A load poisons its
    pages and fills them once its time is over: load_token_us microseconds a token, behind the load before it.
    """

    def __init__(
        self,
        num_bytes: int,
        kv: npt.NDArray[np.uint64],
        page_size: int,
        clock: StepClock,
        *,
        poison: np.uint64,
        load_token_us: float,
    ) -> None:
        self.page_bytes = self.kv_bytes = 8 * page_size
        self.num_pages = host_pages_in(num_bytes, self.page_bytes)
        self.device = kv.reshape(-1, page_size)
        self.rows = np.zeros((self.num_pages, page_size), np.uint64)
        self._poison = poison
        self.clock = clock
        self._ns_a_page = int(load_token_us * 1000 * page_size)
        self._saves: list[tuple[IntArray, IntArray]] = []
        self._last_end_ns = 0

    def save(self, device_pages: IntArray, host_pages: IntArray, behind: DeviceEvent | None = None) -> None:
        self._finish_saves(host_pages=host_pages)
        self._saves.append((device_pages.copy(), host_pages.copy()))

    def load(self, host_pages: IntArray, device_pages: IntArray, behind: DeviceEvent | None = None) -> DeviceEvent:
        self._finish_saves(host_pages=host_pages)
        self.overwritten(device_pages)
        self.device[device_pages] = self._poison
        self._last_end_ns = max(self._last_end_ns, self.clock.now_ns()) + self._ns_a_page * len(device_pages)
        return _LoadEvent(self, host_pages.copy(), device_pages.copy(), self._last_end_ns)

    def overwritten(self, device_pages: IntArray) -> None:
        late = [save for save in self._saves if np.isin(save[0], device_pages).any()]
        if late:
            self._copy_until(late[-1])

    def wait(self) -> None:
        if self._saves:
            self._copy_until(self._saves[-1])

    def write(self, host_pages: IntArray, data: npt.NDArray[np.uint8]) -> None:
        self._finish_saves(host_pages=host_pages)
        self.rows[host_pages] = data.view(np.uint64)

    def _finish_saves(self, host_pages: IntArray) -> None:
        late = [save for save in self._saves if np.isin(save[1], host_pages).any()]
        if late:
            self._copy_until(late[-1])

    def _copy_until(self, last: tuple[IntArray, IntArray]) -> None:
        """In order: a later save of a host page wins."""
        while self._saves:
            save = self._saves.pop(0)
            self.rows[save[1]] = self.device[save[0]]
            if save is last:
                return


class _LoadEvent(DeviceEvent):
    def __init__(self, pool: SimulatedHostPool, host_pages: IntArray, device_pages: IntArray, end_ns: int) -> None:
        self._pool = pool
        self._host_pages = host_pages
        self._device_pages = device_pages
        self._end_ns = end_ns
        self._is_copied = False

    @property
    def is_done(self) -> bool:
        return self._is_copied or self._pool.clock.now_ns() >= self._end_ns

    def wait_beside(self, other: threading.Event, seconds: float) -> None:
        if isinstance(self._pool.clock, RealClock):
            other.wait(seconds)
        else:
            self.wait()

    def wait(self) -> None:
        clock = self._pool.clock
        if isinstance(clock, RealClock):
            time.sleep(max(0, self._end_ns - clock.now_ns()) * 1e-9)
        elif clock.now_ns() < self._end_ns:
            clock.run(0, self._end_ns)  # Time passes.
        if not self._is_copied:
            self._pool.device[self._device_pages] = self._pool.rows[self._host_pages]
            self._is_copied = True
