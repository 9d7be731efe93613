"""Contract of every backend that keeps KV pages, as the store in front of it is used."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from support.kv_stores import MEDIA, Medium, content, medium, pages_of, targets_of

from radixmesh.daemons.worker.kv_store import opening
from radixmesh.daemons.worker.kv_store.backend import KvBackend, KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.records import head_bytes
from radixmesh.daemons.worker.kv_store.store import Got, KvStore, Page, QueueLimits

pytest.importorskip("xxhash")
T = TypeVar("T")
SECONDS = 30
_STORE = Path(opening.__file__).parent


@pytest.fixture(params=MEDIA)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    with medium(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def backend(place: Medium) -> KvBackend:
    return place.open()


@pytest.fixture
def store(backend: KvBackend) -> Iterator[KvStore]:
    store = KvStore(backend)
    yield store
    store.close()


def test_every_backend_is_a_medium_here() -> None:
    """A backend that is opened by a URL, or used without one, is held to this contract."""
    found = {path.stem.removesuffix("_backend") for path in _STORE.glob("*_backend.py")}
    assert found == set(MEDIA), "a backend without a medium in tests/support/kv_stores.py, or the other way around"
    schemes = re.findall(r'parts\.scheme (?:== |in \()"([\w-]+)"', (_STORE / "opening.py").read_text())
    assert {scheme.replace("-", "_") for scheme in schemes} == set(MEDIA) - {"memory"}


def put(store: KvStore, pages: list[Page]) -> int:
    return store.put(pages).result(SECONDS)


def get(store: KvStore, pages: list[Page]) -> list[Got]:
    """Results of a get; a hit has the bytes of its key."""
    wanted = targets_of(pages)
    got = store.get(wanted).result(SECONDS)
    for page, one in zip(wanted, got, strict=True):
        assert one is not Got.HIT or bytes(page.payload) == content(page.key, page.payload.nbytes)
    return got


def test_pages_come_back(store: KvStore) -> None:
    pages = pages_of(1, 20)
    assert get(store, pages) == [Got.MISS] * 20
    assert put(store, pages[:15]) == 15
    assert put(store, pages) == 5, "what is there is not written again"
    order = np.random.default_rng(0).permutation(20)
    assert get(store, [pages[at] for at in order]) == [Got.HIT] * 20
    assert get(store, [pages[3], *pages_of(2, 1), pages[3]]) == [Got.HIT, Got.MISS, Got.HIT]
    assert store.contains([pages[0].key, pages_of(2, 1)[0].key]).result(SECONDS) == [True, False]
    store.remove([pages[0].key, pages_of(2, 1)[0].key]).result(SECONDS)
    assert get(store, pages[:2]) == [Got.MISS, Got.HIT]
    assert put(store, pages) == 1 and get(store, pages) == [Got.HIT] * 20
    counters = store.counters()
    assert (counters.hits, counters.misses, counters.corrupt, counters.failed) == (43, 22, 0, 0)
    assert counters.put_pages == 21 and counters.put_bytes == 21_000 and counters.got_bytes == 43_000
    assert counters.queued_bytes == 0 and counters.usage.written_bytes > 21_000


def test_nothing_is_asked_of_nothing(store: KvStore) -> None:
    assert put(store, []) == 0 and get(store, []) == []
    assert store.contains([]).result(SECONDS) == []
    store.remove([]).result(SECONDS)


def test_large_and_small_pages(store: KvStore) -> None:
    pages = [pages_of(3, 1, 1)[0], pages_of(4, 1, 600_001)[0]]
    assert put(store, pages) == 2 and get(store, pages) == [Got.HIT] * 2


def test_no_byte_of_a_record_can_change_unseen(place: Medium, backend: KvBackend, store: KvStore) -> None:
    """A small record, all of whose bytes are changed in turn: the page is a miss, counted, and gone."""
    page = pages_of(5, 1, 24)[0]
    num_bytes = head_bytes(4) + 24
    for at in range(num_bytes):
        assert put(store, [page]) == 1, at
        place.damage(backend, page.key, at, 1 << at % 8)
        assert get(store, [page]) == [Got.CORRUPT], at
        assert get(store, [page]) == [Got.MISS], at
    assert store.counters().corrupt == num_bytes
    assert put(store, [page]) == 1 and get(store, [page]) == [Got.HIT]


def test_a_page_of_other_tokens_or_length_is_no_page(store: KvStore) -> None:
    pages = pages_of(6, 3)
    put(store, pages)
    others = [
        pages[0]._replace(ids=pages[0].ids + 1),
        pages[1]._replace(payload=memoryview(bytes(999))),
        pages[2]._replace(ids=pages[2].ids[:3]),
    ]
    assert get(store, others) == [Got.CORRUPT] * 3
    assert get(store, pages) == [Got.MISS] * 3


def test_readers_and_writers_beside_each_other(place: Medium, store: KvStore) -> None:
    """More pages than a budget holds, from four threads: what is found is right, and the budget is kept."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(2 if place.is_shared else 12):
                pages = pages_of(int(rng.integers(0, 8)), 40, 4000)
                put(store, pages[: rng.integers(1, 41)])
                got = get(store, pages)
                assert set(got) <= {Got.HIT, Got.MISS}
                assert store.counters().usage.num_bytes <= 4 << 20
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_the_budget_is_kept_and_the_newest_stay(place: Medium, store: KvStore) -> None:
    if place.budget_bytes is None:
        pytest.skip("its server has the budget")
    for chain in range(40):
        put(store, pages_of(chain, 50, 4000))
        assert store.counters().usage.num_bytes <= place.budget_bytes
    assert get(store, pages_of(39, 50, 4000)) == [Got.HIT] * 50
    assert get(store, pages_of(0, 50, 4000)) == [Got.MISS] * 50
    usage = store.counters().usage
    assert usage.num_pages > 300 and usage.evicted_pages == 2000 - usage.num_pages


def test_pages_that_are_read_stay(place: Medium, store: KvStore) -> None:
    if place.budget_bytes is None:
        pytest.skip("its server chooses")
    kept = pages_of(1000, 20, 4000)
    put(store, kept)
    for chain in range(60):
        put(store, pages_of(chain, 20, 4000))
        assert get(store, kept) == [Got.HIT] * 20, chain
    assert store.counters().write_amplification < 1.4


def test_a_page_that_never_fits_is_refused_and_all_else_goes_on(place: Medium, store: KvStore) -> None:
    if place.budget_bytes is None:
        pytest.skip("its server has the bound")
    with pytest.raises(KvStoreError) as refused:
        put(store, pages_of(1, 1, place.budget_bytes))
    assert refused.value.failure is StoreFailure.TOO_LARGE
    assert put(store, pages_of(2, 5)) == 5 and get(store, pages_of(2, 5)) == [Got.HIT] * 5


def test_pages_are_there_after_a_restart(place: Medium) -> None:
    if not place.outlives_its_process:
        pytest.skip("it is memory of the process")
    pages = pages_of(1, 30)
    for round_ in range(3):
        store = KvStore(place.open())
        assert get(store, pages[: 10 * round_]) == [Got.HIT] * 10 * round_
        put(store, pages[: 10 * round_ + 10])
        store.remove([pages[-1].key]).result(SECONDS)
        store.close()


def test_two_stores_share_a_server(place: Medium) -> None:
    if not place.is_shared:
        pytest.skip("it is one process's")
    first, second = KvStore(place.open()), KvStore(place.open())
    pages = pages_of(1, 30)
    assert put(first, pages[:20]) == 20 and put(second, pages) == 10
    assert get(first, pages) == get(second, pages) == [Got.HIT] * 30
    first.close()
    second.close()


class StuckBackend(KvBackend):
    """Waits in every call until it is told to go on, then does what another one does."""

    def __init__(self, inner: KvBackend) -> None:
        self._inner = inner
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()
        for name in ("write", "read", "contains", "remove"):
            setattr(self, name, self._stuck(getattr(inner, name)))

    def _stuck(self, function):  # type: ignore[no-untyped-def]
        def call(argument):  # type: ignore[no-untyped-def]
            self.entered.release()
            assert self.go_on.wait(SECONDS)
            return function(argument)

        return call

    def write(self, pages):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    read = contains = remove = write

    def usage(self):  # type: ignore[no-untyped-def]
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("limits", [QueueLimits(max_pages=10), QueueLimits(max_bytes=10_000)], ids=["pages", "bytes"])
def test_queues_are_bounded(backend: KvBackend, limits: QueueLimits) -> None:
    stuck = StuckBackend(backend)
    store = KvStore(stuck, limits=limits, num_readers=1)
    pages = pages_of(1, 12)
    with pytest.raises(KvStoreError) as refused:
        store.put(pages)
    assert refused.value.failure is StoreFailure.TOO_LARGE
    running, waiting = store.put(pages[:5]), store.put(pages[5:9])
    for call in (store.put, lambda batch: store.put(batch)):
        with pytest.raises(KvStoreError) as refused:
            call(pages[9:11])
        assert refused.value.failure is StoreFailure.BUSY
    assert store.counters().queued_bytes == 9000 and store.counters().refused == 3
    reading = store.get(targets_of(pages[:10]))
    with pytest.raises(KvStoreError):
        store.get(targets_of(pages[:1]))
    stuck.go_on.set()
    assert running.result(SECONDS) + waiting.result(SECONDS) == 9
    assert Got.FAILED not in reading.result(SECONDS)
    assert store.put(pages[9:11]).result(SECONDS) == 2
    store.close()
    with pytest.raises(KvStoreError) as refused:
        store.put(pages[:1])
    assert refused.value.failure is StoreFailure.CLOSED


def test_a_call_that_has_ended_takes_no_room(backend: KvBackend) -> None:
    """A caller that waits for each call before the next one is never refused, however soon that comes."""
    stuck = StuckBackend(backend)
    store = KvStore(stuck, limits=QueueLimits(max_pages=10))
    pages = pages_of(1, 20)

    def call_behind(first: Future[T], second: Callable[[], Future[T]]) -> T:
        behind: Future[Future[T]] = Future()

        def ended(_: Future[T]) -> None:
            try:
                behind.set_result(second())
            except KvStoreError as error:
                behind.set_exception(error)

        first.add_done_callback(ended)  # The first waits in the backend: its own thread calls this.
        stuck.go_on.set()
        return behind.result(SECONDS).result(SECONDS)

    assert call_behind(store.put(pages[:10]), lambda: store.put(pages[10:])) == 10
    stuck.go_on.clear()
    wanted = targets_of(pages)
    assert Got.FAILED not in call_behind(store.get(wanted[:10]), lambda: store.get(wanted[10:]))
    store.close()


def test_a_store_that_closes_ends_what_runs_and_fails_what_waits(backend: KvBackend) -> None:
    stuck = StuckBackend(backend)
    store = KvStore(stuck)
    pages = pages_of(1, 12)
    running, waiting = store.put(pages[:6]), store.put(pages[6:])
    assert stuck.entered.acquire(timeout=SECONDS)
    closing = threading.Thread(target=store.close)
    closing.start()
    with pytest.raises(KvStoreError) as failed:
        waiting.result(SECONDS)
    assert failed.value.failure is StoreFailure.CLOSED
    stuck.go_on.set()
    assert running.result(SECONDS) == 6
    closing.join(SECONDS)
    assert not closing.is_alive()
