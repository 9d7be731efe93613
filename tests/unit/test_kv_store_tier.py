"""The store below host memory: pages that change while they are stored or fetched, and the host pages of fetches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("xxhash")

from radixmesh.daemons.runtime.arrays import IntArray, as_ints, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import PageMove
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.tiers.host_cache import HostCache, TierSettings
from radixmesh.daemons.worker.host_memory.host_pool import ArrayHostPool
from radixmesh.daemons.worker.kv_store.backend import KvBackend, KvStoreError, ReadResult, StoreFailure, Usage
from radixmesh.daemons.worker.kv_store.keys import PageFormat, page_keys
from radixmesh.daemons.worker.kv_store.memory_backend import MemoryBackend
from radixmesh.daemons.worker.kv_store.store import KvStore, QueueLimits
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.tiers import store_tier
from radixmesh.daemons.worker.plans.tiers.host_records import HostRecords
from radixmesh.daemons.worker.plans.tiers.store_tier import StoreTier
from radixmesh.worker.v1 import worker_pb2

SIZE, NUM, BYTES = 4, 12, 64
FORMAT = PageFormat(weights_digest="w", compute="c", kv_dtype="f", kv_layout="l", page_size=SIZE)
IDS = np.arange(100, 100 + 5 * SIZE, dtype=np.int32)


class HeldBackend(KvBackend):
    """Holds reads and writes until `go_on`; told of each by `entered`."""

    def __init__(self) -> None:
        self.inner = MemoryBackend(budget_bytes=1 << 20)
        self.num_asked = 0
        self.entered, self.go_on = threading.Semaphore(0), threading.Event()
        self.go_on.set()

    def _hold(self) -> None:
        self.entered.release()
        assert self.go_on.wait(20)

    def write(self, pages: Sequence[object]) -> int:
        self._hold()
        return self.inner.write(pages)  # type: ignore[arg-type]

    def read(self, targets: Sequence[object]) -> list[ReadResult]:
        self._hold()
        return self.inner.read(targets)  # type: ignore[arg-type]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.num_asked += len(keys)
        return self.inner.contains(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.inner.remove(keys)

    def usage(self) -> Usage:
        return self.inner.usage()

    def close(self) -> None:
        return


class Side:
    """A worker's host memory and tier. The device pages of `plane` are what is saved."""

    def __init__(
        self,
        backend: KvBackend,
        limits: QueueLimits | None = None,
        *,
        puts: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        self.plane = np.zeros((NUM, BYTES), np.uint8)
        self.pool = ArrayHostPool(NUM * BYTES, {"kv": self.plane})
        sizes = Limits(
            page_size=SIZE, num_pages=NUM, num_slots=4, max_tokens_per_step=64, vocab_size=1000, max_total_len=64
        )
        self.records = HostRecords(sizes)
        store = KvStore(backend, limits=limits)
        self.tier = StoreTier(store, FORMAT, self.pool, self.records, metrics, puts=puts)
        self.received_step = 1
        self.is_holder = True

    def save(self, ids: IntArray, host_pages: list[int], previous: int = -1, value: int = 1, name: str = "") -> None:
        """As HostTier.save(): the records first, then the bytes."""
        pages = as_ints(host_pages)
        self.records.grant(
            pages, np.array([len(pages)]), previous_pages=as_ints([previous]), namespaces=[name], weights_version=1
        )
        self.records.ids[pages] = ids.reshape(-1, SIZE)
        self.records.filled[pages] = SIZE
        device = np.arange(len(pages), dtype=np.int32)
        self.plane[device] = value + device[:, None]
        self.pool.save(device, pages)
        self.tier.saved([PageMove(device_pages=device, host_pages=pages, previous_page=previous)])

    async def settled(self, num: int) -> None:
        async with asyncio.timeout(20):
            while self.tier.num_stored + self.tier.num_dropped < num:
                await asyncio.sleep(0.002)

    async def fetch(
        self, ids: IntArray, host_pages: list[int], previous: int = -1, name: str = "", after: int = 1
    ) -> int:
        async def run(job):  # type: ignore[no-untyped-def]
            return job()

        def check_holder() -> None:
            if not self.is_holder:
                raise KvStoreError(StoreFailure.CLOSED, "stands for EPOCH_FENCED")

        request = worker_pb2.FetchPagesRequest(
            ids=pack_ints(ids), host_pages=pack_ints(as_ints(host_pages)), previous_page=previous,
            cache_namespace=name, after_step=after,
        )  # fmt: skip
        return await self.tier.fetch(
            request,
            run=run,
            check_holder=check_holder,
            received_step=lambda: self.received_step,
            loading=lambda: as_ints([11]),
            weights_version=lambda: 1,
        )


def close(*sides: Side) -> None:
    for side in sides:
        side.tier.close()


async def test_pages_that_one_saves_another_fetches() -> None:
    backend = HeldBackend()
    first, second = Side(backend), Side(backend)
    first.save(IDS[: 3 * SIZE], [7, 2, 5], value=10)
    first.save(IDS[3 * SIZE :], [0, 1], previous=5, value=20)
    await first.settled(5)
    assert await second.fetch(IDS, [3, 1, 2, 8, 9]) == 5
    assert second.pool.memory[[3, 1, 2, 8, 9], 0].tolist() == [10, 11, 12, 20, 21]
    assert second.records.filled[[3, 1, 2, 8, 9]].tolist() == [SIZE] * 5
    assert second.records.ids[8].tolist() == IDS[12:16].tolist() and second.records.previous_pages[1] == 3
    # A fetched prefix can be continued, and is stored under the keys of all of it.
    more = np.arange(500, 500 + SIZE, dtype=np.int32)
    second.save(more, [10], previous=9, value=30)
    await second.settled(1)
    assert backend.contains(page_keys(FORMAT.root(), np.concatenate([IDS, more]), SIZE)) == [True] * 6
    # Of a prefix that is here in part, the rest.
    assert await first.fetch(np.concatenate([IDS, more]), [3], previous=1) == 1
    assert first.pool.memory[3, 0] == 30
    close(first, second)


async def test_pages_that_the_store_evicts_are_counted() -> None:
    backend, metrics = MemoryBackend(budget_bytes=400), Metrics()
    side = Side(backend, metrics=metrics)
    side.save(IDS, [7, 2, 5, 0, 1])
    await side.settled(5)
    close(side)  # Its thread has told of them.
    evicted = metrics.registry.get_sample_value("radixmesh_kv_store_pages_total", {"outcome": "evicted"})
    assert evicted == backend.usage().evicted_pages > 0


async def test_a_rank_whose_pages_another_stores_puts_none_and_fetches() -> None:
    """As with latents, which all ranks hold alike."""
    backend = HeldBackend()
    first, second = Side(backend), Side(backend, puts=False)
    second.save(IDS[: 2 * SIZE], [4, 5], value=30)
    first.save(IDS[: 2 * SIZE], [0, 1], value=30)
    await first.settled(2)
    assert second.tier.num_stored == second.tier.num_dropped == 0 and backend.usage().num_pages == 2
    assert await second.fetch(IDS[: 2 * SIZE], [7, 8]) == 2
    assert second.pool.memory[[7, 8], 0].tolist() == [30, 31]
    close(first, second)


async def test_a_prefix_is_asked_for_and_stored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is a request to a server each, and a long prefix has more of them than fit a queue."""
    monkeypatch.setattr(store_tier, "_FIRST_KEYS", 2)
    monkeypatch.setattr(store_tier, "_BATCH_PAGES", 4)
    ids = np.arange(11 * SIZE, dtype=np.int32)
    backend = HeldBackend()
    first, second = (Side(backend, QueueLimits(max_pages=9)) for _ in range(2))
    assert await second.fetch(ids, list(range(11))) == 0 and backend.num_asked == 2
    first.save(ids[: 10 * SIZE], list(range(10)), value=10)
    await first.settled(10)
    assert first.tier.num_stored == 10
    assert await second.fetch(ids, list(range(11))) == 10
    assert second.pool.memory[:10, 0].tolist() == list(range(10, 20))
    close(first, second)


async def test_other_tokens_or_namespaces_are_not_found() -> None:
    backend = HeldBackend()
    side = Side(backend)
    side.save(IDS[: 2 * SIZE], [0, 1], name="salt")
    await side.settled(2)
    assert await side.fetch(IDS[: 2 * SIZE], [2, 3]) == 0
    assert await side.fetch(IDS[: 2 * SIZE] + 1, [2, 3], name="salt") == 0
    assert await side.fetch(np.concatenate([IDS[:SIZE], IDS[:SIZE]]), [2, 3], name="salt") == 1
    assert side.records.filled[[2, 3]].tolist() == [SIZE, 0]
    close(side)


async def test_a_page_that_is_saved_over_while_it_waits_is_not_stored_as_what_it_was() -> None:
    backend = HeldBackend()
    side = Side(backend)
    backend.go_on.clear()
    side.save(IDS[:SIZE], [0], value=1)
    await asyncio.to_thread(backend.entered.acquire)
    side.save(IDS[SIZE : 2 * SIZE], [1], value=50)
    side.save(IDS[2 * SIZE : 3 * SIZE], [1], value=60)  # Before the one before is read.
    side.save(IDS[3 * SIZE : 4 * SIZE], [2], previous=1, value=70)
    backend.go_on.set()
    await side.settled(4)
    keys = [
        page_keys(FORMAT.root(), ids, SIZE)[-1] for ids in (IDS[:SIZE], IDS[SIZE : 2 * SIZE], IDS[2 * SIZE : 3 * SIZE])
    ]
    assert backend.contains(keys) == [True, False, True]
    assert await side.fetch(IDS[2 * SIZE : 4 * SIZE], [5, 6]) == 2
    assert side.pool.memory[[5, 6], 0].tolist() == [60, 70]
    close(side)


async def test_what_continues_a_page_that_became_another_is_not_stored_behind_that_one() -> None:
    """A fetch gives the page before a waiting save to another prefix, whose key is known before the save is handled."""
    backend = HeldBackend()
    side = Side(backend)
    other = IDS[4 * SIZE :]
    side.save(other, [6], value=80)
    await side.settled(1)
    held = threading.Semaphore(0)
    backend.entered, go_on, backend.go_on = held, backend.go_on, threading.Event()
    side.save(IDS[:SIZE], [0], value=10)
    while not held.acquire(blocking=False):
        await asyncio.sleep(0.002)
    side.save(IDS[SIZE : 2 * SIZE], [1], previous=0, value=20)
    # Only the write is held: the read of the fetch goes through.
    write_held, backend.go_on = backend.go_on, go_on
    assert await side.fetch(other, [0]) == 1
    write_held.set()
    await side.settled(3)
    both = page_keys(FORMAT.root(), np.concatenate([other, IDS[SIZE : 2 * SIZE]]), SIZE)
    assert backend.contains(both) == [True, False]
    close(side)


async def test_a_page_that_is_saved_over_while_it_is_fetched_keeps_what_it_got() -> None:
    backend = HeldBackend()
    side = Side(backend)
    side.save(IDS[: 2 * SIZE], [0, 1], value=10)
    await side.settled(2)
    backend.entered = threading.Semaphore(0)
    backend.go_on.clear()
    fetching = asyncio.ensure_future(side.fetch(IDS[: 2 * SIZE], [2, 3]))
    while not backend.entered.acquire(blocking=False):
        await asyncio.sleep(0.002)
    side.save(IDS[4 * SIZE :], [3], value=90)
    backend.go_on.set()
    assert await fetching == 0
    assert side.pool.memory[3, 0] == 90 and side.records.ids[3].tolist() == IDS[4 * SIZE :].tolist()
    close(side)


async def test_records_that_begin_anew_end_what_is_under_way() -> None:
    """Generations count from 0 again: equal ones do not mean the same page."""
    backend = HeldBackend()
    side = Side(backend)
    side.save(IDS[:SIZE], [0], value=10)
    await side.settled(1)
    backend.entered = threading.Semaphore(0)
    backend.go_on.clear()
    fetching = asyncio.ensure_future(side.fetch(IDS[:SIZE], [4]))
    while not backend.entered.acquire(blocking=False):
        await asyncio.sleep(0.002)
    side.save(IDS[SIZE : 2 * SIZE], [5], value=20)
    side.records.reset()
    side.tier.reset()
    side.records.grant(
        as_ints([4]), np.array([1]), previous_pages=as_ints([-1]), namespaces=[""], weights_version=1
    )  # The same generation as that of the fetch.
    backend.go_on.set()
    assert await fetching == 0 and side.records.filled[4] == 0
    close(side)


async def test_a_store_that_hangs_ends_no_fetch_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that came by then are there; later ones change nothing."""
    monkeypatch.setattr(store_tier, "_BATCH_PAGES", 2)
    backend = HeldBackend()
    side = Side(backend)
    side.save(IDS, [0, 1, 2, 3, 4], value=10)
    await side.settled(5)
    is_held = threading.Event()
    calls, read = iter((True, False)), backend.read

    def held_from_the_second_on(targets: Sequence[object]) -> list[ReadResult]:
        if not next(calls):
            backend.go_on.clear()
            is_held.set()
        return read(targets)

    backend.read = held_from_the_second_on  # type: ignore[method-assign]
    loop, passed_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed_s)
    monkeypatch.setattr(store_tier, "_STORE_S", 1e6)
    fetching = asyncio.ensure_future(side.fetch(IDS, [5, 6, 7, 8, 9]))
    while not is_held.is_set():
        await asyncio.sleep(0.002)
    passed_s = 2e6
    assert await fetching == 2
    assert side.records.filled[[5, 6, 7, 8, 9]].tolist() == [SIZE, SIZE, 0, 0, 0]
    backend.go_on.set()
    close(side)
    assert side.records.filled[7] == 0 and side.pool.memory[[5, 6], 0].tolist() == [10, 11]


async def test_a_store_that_answers_nothing_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches that come behind one that waited in vain are told so at once, those in the queue with it."""
    backend = HeldBackend()
    side = Side(backend)
    side.save(IDS, [0, 1, 2, 3, 4])
    await side.settled(5)
    backend.go_on.clear()
    loop, passed_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed_s)
    monkeypatch.setattr(store_tier, "_STORE_S", 1e6)
    fetching = asyncio.ensure_future(side.fetch(IDS, [5, 6, 7, 8, 9]))
    while side.tier.store.counters().queued_bytes == 0:
        await asyncio.sleep(0.002)
    passed_s = 2e6
    assert await fetching == 0
    refused = side.tier.store.counters().refused
    assert await side.fetch(IDS, [5, 6, 7, 8, 9]) == 0
    assert side.tier.store.counters().refused == refused + 1
    backend.go_on.set()
    close(side)


async def test_a_tier_that_is_closed_does_not_store_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "_BATCH_PAGES", 1)
    backend = HeldBackend()
    side = Side(backend)
    backend.go_on.clear()
    side.save(IDS, [0, 1, 2, 3, 4])
    await asyncio.to_thread(backend.entered.acquire)
    closing = threading.Thread(target=side.tier.close)
    closing.start()
    while not side.tier.is_closed:
        await asyncio.sleep(0.002)
    with pytest.raises(KvStoreError):
        while True:
            side.tier.store.remove([])
            await asyncio.sleep(0.002)
    backend.go_on.set()
    await asyncio.to_thread(closing.join)
    assert side.tier.num_stored == 1 and side.tier.num_dropped == 5


@pytest.mark.parametrize(
    ("ids", "pages", "previous", "reason"),
    [
        (IDS[:SIZE], [], -1, "INVALID_ARGUMENT"),
        (IDS[: SIZE - 1], [0], -1, "INVALID_ARGUMENT"),
        (IDS[:SIZE], [0, 1], -1, "INVALID_ARGUMENT"),
        (IDS[: 2 * SIZE], [0, 0], -1, "PAGE_CONFLICT"),
        (IDS[:SIZE], [NUM], -1, "PAGE_CONFLICT"),
        (IDS[:SIZE], [-1], -1, "PAGE_CONFLICT"),
        (IDS[:SIZE], [0], NUM, "PAGE_CONFLICT"),
        (IDS[:SIZE], [11], -1, "PAGE_CONFLICT"),
    ],
)
async def test_fetches_that_are_refused(ids: IntArray, pages: list[int], previous: int, reason: str) -> None:
    side = Side(HeldBackend())
    with pytest.raises(MeshError) as refused:
        await side.fetch(ids, pages, previous)
    assert refused.value.reason_name == reason
    assert (side.records.generations == 0).all()
    close(side)


async def test_a_fetch_waits_for_its_step_and_for_nobody_who_lost_the_worker() -> None:
    side = Side(HeldBackend())
    side.save(IDS[:SIZE], [0], value=10)
    await side.settled(1)
    fetching = asyncio.ensure_future(side.fetch(IDS[:SIZE], [1], after=3))
    await asyncio.sleep(0.02)
    assert not fetching.done() and side.records.generations[1] == 0
    side.received_step = 3
    assert await fetching == 1
    fetching = asyncio.ensure_future(side.fetch(IDS[:SIZE], [2], after=4))
    await asyncio.sleep(0.01)
    side.is_holder = False
    with pytest.raises(KvStoreError):
        await fetching
    assert side.records.generations[2] == 0
    close(side)


def test_host_pages_of_fetches_are_counted_and_come_back() -> None:
    """Random fetches, with saves of the same prefixes beside them: no page is lost, none is in two places."""
    rng = np.random.default_rng(5)
    namespace = Namespace("", 1)
    host = HostCache(24, SIZE, TierSettings(), "lru")
    fetches: list[tuple[object, IntArray, IntArray]] = []
    for _ in range(600):
        length = int(rng.integers(1, 9))
        ids = np.repeat(rng.integers(0, 2, length), SIZE).astype(np.int32)
        choice = rng.random()
        if choice < 0.4 and len(fetches) < 4:
            held, pages = host.begin_fetch(namespace, ids, length)
            if len(pages):
                fetches.append((held, ids, pages))
            else:
                host.release(held)
        elif choice < 0.7 and fetches:
            held, ids, pages = fetches.pop(int(rng.integers(0, len(fetches))))
            num = int(rng.integers(0, len(pages) + 1))
            host.end_fetch(held, namespace, ids, pages, num)  # type: ignore[arg-type]
            assert host.num_known(namespace, ids) >= len(held.pages) + num  # type: ignore[attr-defined]
        else:
            host.keep(namespace, ids, np.arange(length, dtype=np.int32))
            host.take_saves()
        assert not host.find_violation()
    for held, ids, pages in fetches:
        host.end_fetch(held, namespace, ids, pages, 0)  # type: ignore[arg-type]
    assert not host.find_violation() and host.cache.num_evictable == host.cache.num_cached == host.pages.num_used
