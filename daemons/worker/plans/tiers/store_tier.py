"""The store of KV below host memory: pages that are saved to the host go there, and come back when a prefix is wanted.

  save (a plan) --> host page --copied by a thread, if it is still the same page--> store.put
  FetchPages --> store.get into memory of its own --verified--> host page, between two steps, if it is still ours

A host page may be granted to something else at any time, by another scheduler too. Its generation rises before its
bytes change, so whoever has read or is about to write the page compares it; `reset()` starts generations anew, and an
era.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, as_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import PageMove
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.worker.host_memory.host_pool import HostPool
from radixmesh.daemons.worker.kv_store.backend import KvStoreError
from radixmesh.daemons.worker.kv_store.keys import PageFormat, page_keys
from radixmesh.daemons.worker.kv_store.store import Got, KvStore, Page
from radixmesh.daemons.worker.plans.tiers.host_records import HostRecords
from radixmesh.daemons.worker.step_handle import DeviceEvent
from radixmesh.worker.v1 import worker_pb2

_log = get_logger(__name__)

T = TypeVar("T")

MAX_FETCHES = 16
"""Fetches of one worker at a time."""
# Of one call of the store.
_BATCH_BYTES = 8 << 20
_BATCH_PAGES = 4096
# Asked for first, of a prefix that is most often not there at all; then twice as many each time.
_FIRST_KEYS = 16
# Pages that wait to be stored: ids, no KV. More are not stored, nor what continues them.
_MAX_WAITING = 1 << 20
_AFTER_STEP_S = 10.0
# A store that takes longer for a fetch has brought what came by then: the requests have gone on without it.
_STORE_S = 5.0
_POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """Host pages of one prefix, int32 [n], with generations beside them and ids int32 [n, page_size]; event: behind
    their copy. previous: page that they continue, with its generation; -1: none."""

    era: int
    namespace: str
    pages: IntArray
    generations: IntArray
    ids: IntArray
    previous: tuple[int, int]
    event: DeviceEvent


class _Granted(NamedTuple):
    era: int
    pages: IntArray
    generations: IntArray


class RunJob(Protocol):
    def __call__(self, job: Callable[[], T], /) -> Awaitable[T]:
        """Runs a job on the step thread, between two steps; its result or exception."""


class StoreTier:
    """Of one executor. saved(), reset() and the jobs of fetch() run on the step thread, fetch() on the event loop.

    records: of host pages. page_format: of their KV. puts: False: another rank stores the same pages. store_id: as
    `Capabilities.kv_store_id`. num_stored, num_fetched: pages.
    """

    def __init__(
        self,
        store: KvStore,
        page_format: PageFormat,
        pool: HostPool,
        records: HostRecords,
        metrics: Metrics | None = None,
        *,
        puts: bool = True,
        store_id: str = "",
    ) -> None:
        memory = pool.memory
        if memory is None:
            message = "--kv-store: this backend's host memory cannot be read by threads: leave it out"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "kv_store"})
        self.store, self.store_id = store, store_id
        self._format, self._pool, self._memory, self._records = page_format, pool, memory, records
        self._keys: dict[int, tuple[int, bytes]] = {}
        """Host page to (generation, key)."""
        self._puts = puts
        self._era = 0
        self._changed = threading.Condition()
        self._waiting: deque[_Saved] = deque()
        self._num_waiting = self._num_fetching = 0
        self.is_closed = False
        self._metrics = metrics
        self._exported: dict[tuple[str, str], int] = {}
        self._exporting = threading.Lock()
        self.num_stored = self.num_fetched = self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="kv_store_tier", daemon=True)
        self._thread.start()

    def saved(self, moves: Sequence[PageMove]) -> None:
        """Saves were launched, and the records of their pages are filled."""
        if not self._puts:
            return
        records, event = self._records, self._pool.saved()
        names = records.namespaces
        for move in moves:
            pages = move.host_pages.copy()
            first = int(pages[0])
            job = _Saved(
                era=self._era,
                namespace=names[records.namespace_indexes[first]],
                pages=pages,
                generations=records.generations[pages],
                ids=records.ids[pages],
                previous=(move.previous_page, int(records.previous_generations[first])),
                event=event,
            )
            with self._changed:
                if self._num_waiting + len(pages) > _MAX_WAITING:
                    self.num_dropped += len(pages)
                    continue
                self._num_waiting += len(pages)
                self._waiting.append(job)
                self._changed.notify()

    def reset(self) -> None:
        """Host pages hold nothing any more, and their generations start anew."""
        with self._changed:
            self._era += 1
            self._waiting.clear()
            self._num_waiting = 0
            self._keys.clear()

    async def fetch(
        self,
        request: worker_pb2.FetchPagesRequest,
        *,
        run: RunJob,
        check_holder: Callable[[], None],
        received_step: Callable[[], int],
        loading: Callable[[], IntArray],
        weights_version: Callable[[], int],
    ) -> int:
        """Fills host pages from the store; how many, from the first on.

        run: runs a job on the step thread. check_holder: raises EPOCH_FENCED. received_step: the last of the epoch.
        loading: host pages that loads read. Raises EPOCH_FENCED, INVALID_ARGUMENT, PAGE_CONFLICT, OVERLOADED or
        DEADLINE_EXCEEDED.
        """
        check_holder()
        pages = unpack_ints(request.host_pages, "host_pages")
        ids = unpack_ints(request.ids, "ids")
        first = self._check(pages, ids, request.previous_page)
        if self._num_fetching >= MAX_FETCHES:
            message = f"{MAX_FETCHES} fetches are under way: compute the prompt"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        self._num_fetching += 1
        try:
            await _until(lambda: received_step() >= request.after_step, check_holder, request.after_step)
            keys = await asyncio.to_thread(self.keys_of, request.cache_namespace, ids)

            def grant() -> _Granted:
                check_holder()
                return self._grant(pages, request, loading(), weights_version())

            return await self._fill(
                await run(grant), keys[first:], ids.reshape(-1, self._format.page_size)[first:], run
            )
        finally:
            self._num_fetching -= 1

    def keys_of(self, namespace: str, ids: IntArray) -> list[bytes]:
        """Keys of the whole pages of a text, from its beginning."""
        return page_keys(self._format.root(namespace), ids, self._format.page_size)

    def close(self) -> None:
        """Nothing is stored any more. What waits is lost: it is a cache."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()
        # First: calls that the thread still has before it then fail at once, however long a server takes for each.
        self.store.close()
        self._thread.join()

    def _check(self, pages: IntArray, ids: IntArray, previous_page: int) -> int:
        """Index of the first page that is wanted. Raises INVALID_ARGUMENT or PAGE_CONFLICT."""
        size, num = self._format.page_size, self._pool.num_pages
        if not len(pages) or len(ids) % size or len(ids) // size < len(pages):
            message = f"{len(ids)} ids are not whole pages of {size} that end with {len(pages)} host pages"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "ids"})
        is_known = not len(pages) or (int(pages.min()) >= 0 and int(pages.max()) < num)
        if not is_known or len(np.unique(pages)) != len(pages) or not -1 <= previous_page < num:
            message = f"host_pages or previous_page are not of {num} host pages, each named once"
            raise MeshError(ErrorReason.ERROR_REASON_PAGE_CONFLICT, message)
        return len(ids) // size - len(pages)

    @property
    def _batch_pages(self) -> int:
        return max(1, min(_BATCH_PAGES, _BATCH_BYTES // self._pool.kv_bytes))

    def _grant(
        self, pages: IntArray, request: worker_pb2.FetchPagesRequest, loading: IntArray, weights_version: int
    ) -> _Granted:
        if np.isin(pages, loading).any():
            message = "a page is fetched to while a load reads it: wait for its completion"
            raise MeshError(ErrorReason.ERROR_REASON_PAGE_CONFLICT, message)
        self._records.grant(
            pages,
            np.array([len(pages)]),
            previous_pages=as_ints([request.previous_page]),
            namespaces=[request.cache_namespace],
            weights_version=weights_version,
        )
        return _Granted(self._era, pages, self._records.generations[pages])

    async def _fill(
        self,
        granted: _Granted,
        keys: Sequence[bytes],
        ids: IntArray,
        run: RunJob,
    ) -> int:
        num_filled, step = 0, self._batch_pages
        ends = asyncio.get_running_loop().time() + _STORE_S
        try:
            num = await self._num_there(keys, ends)
            while num_filled < num:
                part = slice(num_filled, min(num, num_filled + step))
                data = np.empty((part.stop - part.start, self._pool.kv_bytes), np.uint8)
                wanted = [Page(key, of, row.data) for key, of, row in zip(keys[part], ids[part], data, strict=True)]
                got = await _until_time(self.store.get(wanted), ends)
                hits = next((at for at, one in enumerate(got) if one is not Got.HIT), len(got))
                written = await run(partial(self._write, granted, part, data[:hits], keys, ids))
                num_filled += written
                if written < part.stop - part.start:
                    break
        except KvStoreError as error:
            _log.info("kv_not_fetched", error=str(error))
        except TimeoutError:
            _log.info("kv_not_fetched", error=f"the store took longer than {_STORE_S:g} s")
            if not num_filled:
                # The next requests go on without it at once.
                self.store.reads_late(_STORE_S)
        self.num_fetched += num_filled
        self._export()
        return num_filled

    async def _num_there(self, keys: Sequence[bytes], ends: float) -> int:
        """Pages, from the first on, that the store has, as far as it can say. Raises TimeoutError."""
        num, part = 0, min(_FIRST_KEYS, self._batch_pages)
        while num < len(keys):
            has = await _until_time(self.store.contains(keys[num : num + part]), ends)
            if False in has:
                return num + has.index(False)
            num, part = num + len(has), min(2 * part, self._batch_pages)
        return num

    def _write(
        self, granted: _Granted, part: slice, data: npt.NDArray[np.uint8], keys: Sequence[bytes], ids: IntArray
    ) -> int:
        """Fills the first pages of a part; none if any of them is somebody else's by now."""
        num, records = len(data), self._records
        pages, generations = granted.pages[part][:num], granted.generations[part][:num]
        if not num or granted.era != self._era or (records.generations[pages] != generations).any():
            return 0
        self._pool.write(pages, data)
        records.ids[pages] = ids[part][:num]
        records.filled[pages] = self._format.page_size
        records.commit(pages, generations)
        for page, generation, key in zip(pages.tolist(), generations.tolist(), keys[part], strict=False):
            self._keys[page] = (generation, key)
        return num

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self.is_closed:
                    self._changed.wait()
                if self.is_closed:
                    return
                job = self._waiting.popleft()
                self._num_waiting -= len(job.pages)
            try:
                self._store(job)
            except KvStoreError as error:
                # Logged by the store when it switches off; the next pages find it off, or on again.
                self.num_dropped += len(job.pages)
                _log.debug("kv_not_stored", error=str(error))
            except Exception:
                _log.exception("kv_store_tier_failed")
            self._export()

    def _export(self) -> None:
        """Adds what was counted since the last call to the metrics."""
        if (metrics := self._metrics) is None:
            return
        with self._exporting:
            counted = self.store.counters()
            totals = {
                ("pages", "hit"): counted.hits,
                ("pages", "miss"): counted.misses,
                ("pages", "corrupt"): counted.corrupt,
                ("pages", "failed"): counted.failed,
                ("pages", "put"): counted.put_pages,
                ("pages", "dropped"): self.num_dropped,
                ("pages", "evicted"): counted.usage.evicted_pages,
                ("bytes", "put"): counted.put_bytes,
                ("bytes", "read"): counted.got_bytes,
                ("bytes", "written"): counted.usage.written_bytes,
            }
            for (kind, label), total in totals.items():
                counter = metrics.kv_store_pages if kind == "pages" else metrics.kv_store_bytes
                counter.labels(label).inc(max(0, total - self._exported.get((kind, label), 0)))
            self._exported = totals

    def _key_of(self, page: int, generation: int, namespace: str) -> bytes | None:
        """Key of a host page, or below -1 of the root; None: it, or a page before it, is another by now.

        Pages that a former life of the worker has saved have no key yet, nor those whose own save was dropped.
        """
        records, size, era = self._records, self._format.page_size, self._era
        path: list[tuple[int, int, IntArray]] = []
        while page >= 0 and ((known := self._keys.get(page)) is None or known[0] != generation):
            ids, filled = records.ids[page].copy(), int(records.filled[page])
            above = int(records.previous_pages[page]), int(records.previous_generations[page])
            # Behind the reads: a grant raises it before it changes anything else.
            if filled != size or records.generations[page] != generation or len(path) > len(records.filled):
                return None
            path.append((page, generation, ids))
            page, generation = above
        key = self._format.root(namespace) if page < 0 else self._keys[page][1]
        with self._changed:
            if era != self._era:
                return None
            for number, of, ids in reversed(path):
                key = page_keys(key, ids, size)[0]
                self._keys[number] = (of, key)
        return key

    def _store(self, job: _Saved) -> None:
        parent = self._key_of(*job.previous, job.namespace)
        if parent is None:
            self.num_dropped += len(job.pages)  # The page before is another by now.
            return
        size = self._format.page_size
        keys = page_keys(parent, job.ids.reshape(-1), size)
        with self._changed:
            if job.era != self._era:
                return
            numbered = zip(job.pages.tolist(), job.generations.tolist(), keys, strict=True)
            self._keys.update({number: (of, key) for number, of, key in numbered})
        job.event.wait()
        step = self._batch_pages
        for start in range(0, len(keys), step):
            has = self.store.contains(keys[start : start + step]).result()
            part = as_ints([start + at for at, one in enumerate(has) if not one])
            if len(part) and not self._put(job, part, keys):
                return

    def _put(self, job: _Saved, part: IntArray, keys: Sequence[bytes]) -> bool:
        """Stores some pages of a job, by their indexes; False: they are of records that have begun anew since."""
        data = self._memory[job.pages[part]]
        # Behind the copy: a page that was granted meanwhile may have had other bytes.
        is_same = self._records.generations[job.pages[part]] == job.generations[part]
        if job.era != self._era:
            return False
        pages = [Page(keys[at], job.ids[at], data[row].data) for row, at in enumerate(part) if is_same[row]]
        self.num_stored += self.store.put(pages).result()
        self.num_dropped += int(np.count_nonzero(~is_same))
        return True


async def _until_time(future: Future[T], ends: float) -> T:
    """The result of a call that may go on when nobody waits for it any more. ends: by the loop's clock."""
    async with asyncio.timeout_at(ends):
        return await asyncio.wrap_future(future)


async def _until(is_true: Callable[[], bool], check: Callable[[], None], step: int) -> None:
    try:
        async with asyncio.timeout(_AFTER_STEP_S):
            while not is_true():
                await asyncio.sleep(_POLL_S)
                check()
    except TimeoutError as error:
        message = f"step {step} did not come within {_AFTER_STEP_S:g} s: compute the prompt"
        raise MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message) from error
