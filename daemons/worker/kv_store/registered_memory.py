"""Host memory for libraries that move pages by descriptors (NIXL, Mooncake), in lanes, and a bound on their calls.

Such a library wants memory that it was told of before, and some of its calls can neither be cancelled nor told how long
they may take: a write to a hung file system, a read from a host that is gone. So each call runs in a thread of its own:

  take a lane -> fill it -> run the call -> copy out of it -> give it back
                            |
                            +-- not over after timeout_s: UNAVAILABLE; the lane comes back when the call returns

The caller's memory is never given to the library. What a call writes late lies in a lane that nobody reads, or that
another call fills anew: a record that it spoils there has a wrong checksum.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.worker.kv_store.backend import KvStoreError, ReadTarget, StoredPage, StoreFailure

T = TypeVar("T")

# The store's writer and its two readers, and one whose call does not return.
NUM_LANES = 4
# Of records in a lane, as storage that goes past the page cache wants it.
ALIGNMENT = 4096


class Lane:
    """A part of the memory, as it is lent once: `index` of NUM_LANES, `address`, and its bytes as an array.
    is_abandoned: a call has it for longer than it was given, and gives it back."""

    def __init__(self, pool: LanePool, index: int, memory: npt.NDArray[np.uint8]) -> None:
        self._pool = pool
        self.index, self.memory, self.address = index, memory, memory.ctypes.data
        self.is_abandoned = False

    def run(self, call: Callable[[], T]) -> T:
        """The call's result. Raises what it raises, and KvStoreError UNAVAILABLE where it takes too long."""
        return self._pool.run(self, call)

    def fill(self, pages: Sequence[StoredPage]) -> list[tuple[int, int]]:
        """Copies records into the lane; (offset, bytes) of each."""
        places = self.places([page.num_bytes for page in pages])
        for page, (offset, num_bytes) in zip(pages, places, strict=True):
            middle = offset + len(page.head)
            # Copies of arrays let go of the interpreter's lock.
            self.memory[offset:middle] = np.frombuffer(page.head, np.uint8)
            self.memory[middle : offset + num_bytes] = np.asarray(page.payload)
        return places

    def copy_out(self, target: ReadTarget, offset: int) -> None:
        """Copies a record from the lane to where it is wanted."""
        middle = offset + len(target.head)
        np.asarray(target.head)[:] = self.memory[offset:middle]
        np.asarray(target.payload)[:] = self.memory[middle : offset + target.num_bytes]

    def places(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(offset, bytes) of records of such sizes, one after the other."""
        found, offset = [], 0
        for size in sizes:
            found.append((offset, size))
            offset += aligned(size)
        assert offset <= len(self.memory), (offset, len(self.memory))
        return found


class LanePool:
    """num_bytes: of all lanes together; name: of the medium, for messages. timeout_s: of a call, and of the wait for a
    lane. Memory is taken from the system when it is first used."""

    def __init__(self, num_bytes: int, *, name: str, timeout_s: float) -> None:
        self.lane_bytes = num_bytes // NUM_LANES // ALIGNMENT * ALIGNMENT
        if not self.lane_bytes:
            message = f"a pool of {num_bytes} bytes has no room for {NUM_LANES} lanes: give it more"
            raise KvStoreError(StoreFailure.SETTINGS, message)
        self._name, self._timeout_s = name, timeout_s
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, NUM_LANES * self.lane_bytes), np.uint8)
        self._parts = list(self.memory.reshape(NUM_LANES, self.lane_bytes))
        self._free = list(range(NUM_LANES))
        self._changed = threading.Condition()

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for one group of records. Raises KvStoreError UNAVAILABLE where calls hold all for too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, self._timeout_s):
                message = f"{self._name} has not answered {NUM_LANES} calls for {self._timeout_s:g} s: look after it"
                raise KvStoreError(StoreFailure.UNAVAILABLE, message)
            index = self._free.pop()
        lane = Lane(self, index, self._parts[index])
        try:
            yield lane
        finally:
            with self._changed:
                if not lane.is_abandoned:
                    self._give_back(lane)

    def run(self, lane: Lane, call: Callable[[], T]) -> T:
        outcome: list[T | BaseException] = []
        is_over = threading.Event()

        def work() -> None:
            try:
                outcome.append(call())
            except BaseException as error:
                outcome.append(error)
            with self._changed:
                is_over.set()
                if lane.is_abandoned:
                    self._give_back(lane)

        # A daemon: a call that never returns does not keep the worker from ending.
        threading.Thread(target=work, name="kv_store_call", daemon=True).start()
        if not is_over.wait(self._timeout_s):
            with self._changed:
                if not is_over.is_set():
                    lane.is_abandoned = True
                    message = f"{self._name} has not answered for {self._timeout_s:g} s: look after it"
                    raise KvStoreError(StoreFailure.UNAVAILABLE, message)
        (result,) = outcome
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> bool:
        """Waits until all calls are over, for timeout_s; False: some are not, so the library must be left as it is."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._free) == NUM_LANES, self._timeout_s)

    def _give_back(self, lane: Lane) -> None:
        self._free.append(lane.index)
        self._changed.notify()


def aligned(num_bytes: int) -> int:
    """Bytes that a record takes in a lane."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
