"""The switch of a store: what waits behind a failure costs nothing, and one call at a time tries the medium again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

pytest.importorskip("xxhash")
from support.kv_stores import pages_of, targets_of

from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.memory_backend import MemoryBackend
from radixmesh.daemons.worker.kv_store.store import Got, KvStore

SECONDS = 30


class LostBackend(MemoryBackend):
    """Calls wait for `go_on` and then fail, as those of a server that does not answer, while `is_lost`."""

    def __init__(self) -> None:
        super().__init__(budget_bytes=1 << 20)
        self.is_lost, self.num_asked = True, 0
        self.entered, self.go_on = threading.Semaphore(0), threading.Event()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        self.entered.release()
        assert self.go_on.wait(SECONDS)
        if self.is_lost:
            raise KvStoreError(StoreFailure.UNAVAILABLE, "no answer")
        return super().contains(keys)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_calls_that_wait_behind_a_failure_do_not_ask_again() -> None:
    backend = LostBackend()
    store, pages = KvStore(backend, num_readers=1), pages_of(1, 3)
    calls = [store.contains([page.key]) for page in pages]
    got = store.get(targets_of(pages))
    assert backend.entered.acquire(timeout=SECONDS)
    backend.go_on.set()
    failures = []
    for call in calls:
        with pytest.raises(KvStoreError) as failed:
            call.result(SECONDS)
        failures.append(failed.value.failure)
    assert failures == [StoreFailure.UNAVAILABLE, StoreFailure.OFF, StoreFailure.OFF]
    assert got.result(SECONDS) == [Got.FAILED] * 3 and backend.num_asked == 1
    store.close()


def test_one_call_at_a_time_tries_a_medium_that_failed() -> None:
    backend, clock = LostBackend(), Clock()
    store, (page,) = KvStore(backend, num_readers=2, clock=clock), pages_of(1, 1)
    backend.go_on.set()
    with pytest.raises(KvStoreError):
        store.contains([page.key]).result(SECONDS)
    clock.now += 100
    backend.go_on.clear()
    backend.is_lost = False
    trial = store.contains([page.key])
    with pytest.raises(KvStoreError) as refused:
        store.contains([page.key])
    assert refused.value.failure is StoreFailure.OFF and "one call" in str(refused.value)
    backend.go_on.set()
    assert trial.result(SECONDS) == [False]
    both = [store.contains([page.key]) for _ in range(2)]
    assert [call.result(SECONDS) for call in both] == [[False], [False]]
    store.close()


def test_reads_that_were_waited_for_in_vain_switch_it_off() -> None:
    store, (page,) = KvStore(LostBackend()), pages_of(1, 1)
    store.reads_late(5.0)
    with pytest.raises(KvStoreError) as refused:
        store.contains([page.key])
    assert refused.value.failure is StoreFailure.OFF
    store.close()
