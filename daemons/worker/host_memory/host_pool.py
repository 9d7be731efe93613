"""KV pages in host memory: the seam between plans and whoever copies, and the pool of workers that compute on CPUs.

A host page lies in one piece, whatever the layers and planes of the device pool are: page-first, so that it can be
written to a file or sent as it is. Behind its KV lies what a network that drafts keeps of the tokens, which only the
worker itself uses: the KV is the same without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent


class HostPool(ABC):
    """Copies between the device's pages and its own, [0, num_pages). One thread calls it.

    Copies read and write as if they ran when they are called: a save reads its device pages before anything that is
    launched later writes there, once overwritten() was told of it; a load writes behind what was launched before that
    may use its pages, and behind saves of them; copies of one host page keep their order.
    """

    num_pages: int
    page_bytes: int
    kv_bytes: int
    """Of a page those of its KV, which come first."""
    segment: HostSegment | None = None
    """Has the pages' memory, which outlives the worker; None: it is this process's own."""

    @abstractmethod
    def save(self, device_pages: IntArray, host_pages: IntArray, behind: DeviceEvent | None = None) -> None:
        """Copies device pages to host pages; both int32 [n], host pages distinct.

        behind: of the last step that writes to the device pages, DONE if it is over; None: of all that was launched.
        """

    @abstractmethod
    def load(self, host_pages: IntArray, device_pages: IntArray, behind: DeviceEvent | None = None) -> DeviceEvent:
        """Copies host pages to device pages; both int32 [n], device pages distinct. The event is behind the copy: only
        then may a forward that reads them be launched.

        behind: of the last step that may use the device pages, as its runner gave it; None: of all that was launched.
        """

    def overwritten(self, device_pages: IntArray) -> None:
        """Device pages that what is launched next may write to. Default: no save is under way when save() returns."""
        return

    def wait(self) -> None:
        """Returns when no copy is under way. Default: none ever is."""
        return

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """KV of host pages as uint8 [num_pages, kv_bytes], which threads may read; None (the default): they may not.
        A page is in it once saved() is done."""
        return None

    @property
    def beside_kv(self) -> npt.NDArray[np.uint8] | None:
        """The rest of host pages, uint8 [num_pages, page_bytes - kv_bytes]. Default: as of `memory`."""
        return None

    def saved(self) -> DeviceEvent:
        """Behind all saves so far. Default: none is under way when save() returns."""
        return DONE

    def write(self, host_pages: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Fills host pages, int32 [n], with KV, uint8 [n, kv_bytes], behind all copies of them; the rest is zero.
        Default: where copies run in the call."""
        memory, rest = self.memory, self.beside_kv
        assert memory is not None and rest is not None, "threads may not touch this pool's memory"
        memory[host_pages], rest[host_pages] = data, 0


class ArrayHostPool(HostPool):
    """Rows of bytes; copies run in the call.

    planes: views of the device's pages, uint8 [pages of the device, bytes of a page in this plane]. beside_kv: the
    same, of what is not KV. loaded: told of device pages that were written. segment: where the rows are, not opened
    yet; None: in memory of this process.
    """

    def __init__(
        self,
        num_bytes: int,
        planes: Mapping[str, npt.NDArray[np.uint8]],
        loaded: Callable[[IntArray], None] | None = None,
        segment: HostSegment | None = None,
        *,
        beside_kv: Sequence[npt.NDArray[np.uint8]] = (),
    ) -> None:
        self.segment = segment
        self._planes = (*planes.values(), *beside_kv)
        self.page_bytes = sum(plane.shape[1] for plane in self._planes)
        self.kv_bytes = self.page_bytes - sum(plane.shape[1] for plane in beside_kv)
        self.num_pages = host_pages_in(num_bytes, self.page_bytes)
        if segment is None:
            self._rows = np.empty((self.num_pages, self.page_bytes), np.uint8)
        else:
            self._rows = segment.open(self.num_pages, self.page_bytes)
        self._loaded = loaded

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self._rows[:, : self.kv_bytes]

    @property
    def beside_kv(self) -> npt.NDArray[np.uint8]:
        return self._rows[:, self.kv_bytes :]

    def save(self, device_pages: IntArray, host_pages: IntArray, behind: DeviceEvent | None = None) -> None:
        start = 0
        for plane in self._planes:
            end = start + plane.shape[1]
            self._rows[host_pages, start:end] = plane[device_pages]
            start = end

    def load(self, host_pages: IntArray, device_pages: IntArray, behind: DeviceEvent | None = None) -> DeviceEvent:
        start = 0
        for plane in self._planes:
            end = start + plane.shape[1]
            plane[device_pages] = self._rows[host_pages, start:end]
            start = end
        if self._loaded is not None:
            self._loaded(device_pages)
        return DONE


def host_pages_in(num_bytes: int, page_bytes: int) -> int:
    """Pages that fit. Raises INVALID_ARGUMENT if not even one does."""
    if num_bytes < page_bytes:
        message = f"a page takes {page_bytes} bytes: set --host-kv-bytes to that at least, or to 0"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "host_kv_bytes"})
    return min(num_bytes // page_bytes, (1 << 31) - 1)
