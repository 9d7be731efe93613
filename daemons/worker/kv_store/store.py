"""The store of KV pages as the tier above sees it: batches by content key, bounded queues, verified pages.

  put --> write queue --> writer thread:  head and checksum of each page, backend.write()
  get --> read queue  --> reader threads: backend.read() into the caller's memory, then checksum, key and ids

A call that finds its queue full is refused at once, and nothing waits for room. A page that was damaged is a miss: it
is counted and taken out of the backend. After a failure the direction that failed is switched off for a while, twice
as long each time, and then tried by one call alone, so that a full disk or a lost server costs nothing but the pages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_store.backend import (
    KvBackend,
    KvStoreError,
    ReadResult,
    ReadTarget,
    StoredPage,
    StoreFailure,
    Usage,
)
from radixmesh.daemons.worker.kv_store.records import encode_head, head_bytes, is_page

_log = get_logger(__name__)

T = TypeVar("T")

_OFF_S = (1.0, 60.0)


class Page(NamedTuple):
    """A full page: key (`page_keys()`), ids int32 [page_size], and its KV. As the target of a get, `payload` is
    writable and of the page's exact size."""

    key: bytes
    ids: IntArray
    payload: memoryview


class Got(Enum):
    """HIT: the memory holds the page. MISS: the store has no such page. CORRUPT: what it had was not that page, and is
    gone now. FAILED: the store could not be asked. But for HIT, the memory holds anything."""

    HIT = auto()
    MISS = auto()
    CORRUPT = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Payload bytes and pages that wait or are under way, of writes and of reads each."""

    max_bytes: int = 1 << 30
    max_pages: int = 65536


@dataclass(slots=True)
class StoreCounters:
    """Pages, and bytes of payload, since the start. refused: calls that found their queue full or switched off.
    put_pages, put_bytes: written, those that were there already not counted."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    failed: int = 0
    refused: int = 0
    put_pages: int = 0
    put_bytes: int = 0
    got_bytes: int = 0
    write_failures: int = 0
    queued_bytes: int = 0
    usage: Usage = field(default_factory=Usage)

    @property
    def write_amplification(self) -> float:
        """Bytes written to the medium for each byte of payload; 0 before the first, or where the medium is a server."""
        return self.usage.written_bytes / self.put_bytes if self.put_bytes else 0.0


class KvStore:
    """num_readers: threads that read; writers are one, because a log has one end. Closes the backend when closed."""

    def __init__(
        self,
        backend: KvBackend,
        *,
        limits: QueueLimits | None = None,
        num_readers: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = limits or QueueLimits()
        self.backend = backend
        self._lock = threading.Lock()
        self._counters = StoreCounters()
        self._writes = _Direction("kv_store_write", 1, limits, clock)
        self._reads = _Direction("kv_store_read", num_readers, limits, clock)
        self._is_closed = False

    def put(self, pages: Sequence[Page]) -> Future[int]:
        """Writes pages that are not there yet; how many were written. The result is a KvStoreError where that failed.

        The payloads are read until the future is done, so the caller leaves them as they are. Raises KvStoreError BUSY,
        OFF, TOO_LARGE or CLOSED at once.
        """
        pages = list(pages)

        def job() -> int:
            num_bytes = 0
            try:
                self._writes.check_on()
                stored = [stored_page(page) for page, has in zip(pages, self._has(pages), strict=True) if not has]
                num = self.backend.write(stored)
                num_bytes = sum(page.payload.nbytes for page in stored)
            except KvStoreError as error:
                with self._lock:
                    self._counters.write_failures += 1
                if error.failure is not StoreFailure.TOO_LARGE:
                    self._writes.failed(error)
                raise
            self._writes.succeeded()
            with self._lock:
                self._counters.put_pages += num
                self._counters.put_bytes += num_bytes
            return num

        return self._submit(self._writes, job, len(pages), sum(page.payload.nbytes for page in pages))

    def get(self, pages: Sequence[Page]) -> Future[list[Got]]:
        """Reads pages into their payloads, one result for each; all FAILED where the backend fails.

        The payloads are written until the future is done. Raises KvStoreError BUSY, OFF or CLOSED at once.
        """
        pages = list(pages)

        def job() -> list[Got]:
            targets = [
                ReadTarget(page.key, memoryview(bytearray(head_bytes(len(page.ids)))), page.payload.cast("B"))
                for page in pages
            ]
            try:
                self._reads.check_on()
                results = self.backend.read(targets)
            except KvStoreError as error:
                self._reads.failed(error)
                got = [Got.FAILED] * len(pages)
            else:
                self._reads.succeeded()
                got = [_verified(*each) for each in zip(pages, targets, results, strict=True)]
                self._drop([page.key for page, one in zip(pages, got, strict=True) if one is Got.CORRUPT])
            with self._lock:
                counters = self._counters
                counters.hits += got.count(Got.HIT)
                counters.misses += got.count(Got.MISS)
                counters.corrupt += got.count(Got.CORRUPT)
                counters.failed += got.count(Got.FAILED)
                counters.got_bytes += sum(
                    page.payload.nbytes for page, one in zip(pages, got, strict=True) if one is Got.HIT
                )
            return got

        return self._submit(self._reads, job, len(pages), sum(page.payload.nbytes for page in pages))

    def contains(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """True for each page that is there, as far as anybody can say before it is read. Fails and raises as get()."""
        keys = list(keys)

        def job() -> list[bool]:
            try:
                self._reads.check_on()
                found = self.backend.contains(keys)
            except KvStoreError as error:
                self._reads.failed(error)
                raise
            self._reads.succeeded()
            return found

        return self._submit(self._reads, job, len(keys), 0)

    def remove(self, keys: Sequence[bytes]) -> Future[None]:
        """Takes pages back, behind all writes that were put before. Fails and raises as put()."""
        keys = list(keys)
        return self._submit(self._writes, lambda: self.backend.remove(keys), len(keys), 0)

    def reads_late(self, seconds: float) -> None:
        """A caller has waited so long for its first answer, in vain: a failure, whatever comes of the call."""
        self._reads.failed(KvStoreError(StoreFailure.UNAVAILABLE, f"no answer came within {seconds:g} s"))

    def counters(self) -> StoreCounters:
        """A copy of the counters as they are now."""
        usage = Usage() if self._is_closed else self.backend.usage()
        with self._lock:
            queued = self._writes.queued_bytes + self._reads.queued_bytes
            return replace(self._counters, usage=usage, queued_bytes=queued)

    def close(self) -> None:
        """Ends what is under way, fails what waits with CLOSED, and closes the backend. Returns when that is done."""
        if self._is_closed:
            return
        for direction in (self._reads, self._writes):
            direction.close()
        self._is_closed = True
        self.backend.close()

    def _submit(self, direction: _Direction, job: Callable[[], T], num_pages: int, num_bytes: int) -> Future[T]:
        try:
            return direction.submit(job, num_pages, num_bytes)
        except KvStoreError:
            with self._lock:
                self._counters.refused += 1
            raise

    def _has(self, pages: Sequence[Page]) -> list[bool]:
        """Pages that are there already need no checksum, and for a server no transfer."""
        return self.backend.contains([page.key for page in pages])

    def _drop(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        _log.warning("kv_store_page_corrupt", pages=len(keys), first=keys[0].hex())
        try:
            self.backend.remove(keys)
        except KvStoreError as error:
            self._writes.failed(error)


class _Direction:
    """A queue of jobs with its threads and its switch."""

    def __init__(self, name: str, num_threads: int, limits: QueueLimits, clock: Callable[[], float]) -> None:
        self._name, self._limits, self._clock = name, limits, clock
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiting: deque[Future[object]] = deque()
        self._num_calls = self._num_pages = self.queued_bytes = 0
        self._off_until, self._off_s = 0.0, _OFF_S[0]
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], T], num_pages: int, num_bytes: int) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                self._leave(num_pages, num_bytes)
                return
            # Room is made before the caller hears of it: the next call of one that waits for each finds it, always.
            try:
                result = job()
            except BaseException as error:
                # Whatever it is, the caller has to have its pages back.
                self._leave(num_pages, num_bytes)
                future.set_exception(error)
            else:
                self._leave(num_pages, num_bytes)
                future.set_result(result)

        with self._changed:
            if self._is_closed:
                raise KvStoreError(StoreFailure.CLOSED, "the store is closed: the worker is about to end")
            self._check_on()
            if self._num_calls and self._off_s != _OFF_S[0]:
                raise KvStoreError(StoreFailure.OFF, f"{self._name} failed lately: one call tries it at a time")
            self._check_size(num_pages, num_bytes)
            self._num_calls += 1
            self._num_pages += num_pages
            self.queued_bytes += num_bytes
            self._jobs.append(run)
            self._waiting.append(future)  # type: ignore[arg-type]
            self._changed.notify()
        return future

    def check_on(self) -> None:
        """Raises KvStoreError OFF: the backend is not to be asked now, by calls that have waited either."""
        with self._changed:
            self._check_on()

    def _check_on(self) -> None:
        if (left := self._off_until - self._clock()) > 0:
            message = f"{self._name} is switched off after a failure: it is tried again in {left:.1f} s"
            raise KvStoreError(StoreFailure.OFF, message)

    def failed(self, error: KvStoreError) -> None:
        with self._changed:
            now = self._clock()
            if now < self._off_until:
                return  # Of a call that was under way when the switch fell.
            self._off_until = now + self._off_s
            _log.warning("kv_store_off", direction=self._name, seconds=self._off_s, error=str(error))
            self._off_s = min(2 * self._off_s, _OFF_S[1])

    def succeeded(self) -> None:
        if self._off_s != _OFF_S[0]:
            with self._changed:
                self._off_s = _OFF_S[0]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            left = list(self._waiting)
            self._jobs.clear()
            self._waiting.clear()
            self._changed.notify_all()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(KvStoreError(StoreFailure.CLOSED, "the store was closed before it came to this"))
        for thread in self._threads:
            thread.join()

    def _leave(self, num_pages: int, num_bytes: int) -> None:
        with self._changed:
            self._num_calls -= 1
            self._num_pages -= num_pages
            self.queued_bytes -= num_bytes

    def _check_size(self, num_pages: int, num_bytes: int) -> None:
        limits = self._limits
        if num_pages > limits.max_pages or num_bytes > limits.max_bytes:
            message = (
                f"a batch of {num_pages} pages, {num_bytes} bytes, is larger than the queue of"
                f" {limits.max_pages} pages, {limits.max_bytes} bytes: cut it"
            )
            raise KvStoreError(StoreFailure.TOO_LARGE, message)
        if self._num_pages + num_pages > limits.max_pages or self.queued_bytes + num_bytes > limits.max_bytes:
            message = f"{self._num_pages} pages, {self.queued_bytes} bytes, wait for the store: go on without it"
            raise KvStoreError(StoreFailure.BUSY, message)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._jobs.popleft()
                self._waiting.popleft()
            job()


def stored_page(page: Page) -> StoredPage:
    payload = page.payload.cast("B")
    return StoredPage(page.key, encode_head(page.key, page.ids, payload), payload)


def _verified(page: Page, target: ReadTarget, result: ReadResult) -> Got:
    if result is ReadResult.ABSENT:
        return Got.MISS
    is_sound = result is ReadResult.READ and is_page(target.head, target.payload, page.key, page.ids)
    return Got.HIT if is_sound else Got.CORRUPT
