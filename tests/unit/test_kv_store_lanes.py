"""Registered memory of the KV store: calls that do not return cost their lane alone, while they last."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from radixmesh.daemons.worker.kv_store.backend import KvStoreError, ReadTarget, StoredPage, StoreFailure
from radixmesh.daemons.worker.kv_store.registered_memory import ALIGNMENT, NUM_LANES, LanePool


def test_records_lie_apart_and_come_back() -> None:
    pool = LanePool(NUM_LANES * 4 * ALIGNMENT, name="it", timeout_s=5.0)
    pages = [
        StoredPage(bytes([at]) * 32, bytes([at]) * 7, memoryview(bytes([at + 100]) * size))
        for at, size in enumerate((1, 5000, 0))
    ]
    with pool.lane() as lane:
        places = lane.fill(pages)
        assert [offset % ALIGNMENT for offset, _ in places] == [0, 0, 0]
        assert [num for _, num in places] == [page.num_bytes for page in pages]
        for page, (offset, num_bytes) in zip(pages, places, strict=True):
            target = ReadTarget(page.key, memoryview(bytearray(7)), memoryview(bytearray(num_bytes - 7)))
            lane.copy_out(target, offset)
            assert target.head == page.head and target.payload == page.payload
    with pytest.raises(KvStoreError) as refused:
        LanePool(100, name="it", timeout_s=1.0)
    assert refused.value.failure is StoreFailure.SETTINGS


def test_a_call_that_does_not_return_holds_its_lane_and_no_caller() -> None:
    pool = LanePool(1 << 20, name="it", timeout_s=0.2)
    go_on, written = threading.Event(), threading.Semaphore(0)

    def stuck(memory: np.ndarray) -> Callable[[], None]:
        def call() -> None:
            assert go_on.wait(30)
            memory[:] = 9
            written.release()

        return call

    held = []
    for _ in range(NUM_LANES):
        with pool.lane() as lane:
            held.append(lane)
            with pytest.raises(KvStoreError) as late:
                lane.run(stuck(lane.memory))
        assert late.value.failure is StoreFailure.UNAVAILABLE
    # Nobody is lent what a call may still write to.
    with pytest.raises(KvStoreError) as none, pool.lane():
        pass
    assert none.value.failure is StoreFailure.UNAVAILABLE and not pool.close()
    assert len({lane.address for lane in held}) == NUM_LANES
    go_on.set()
    for _ in held:
        assert written.acquire(timeout=30)
    assert pool.close()
    lent = set()

    def take_all(num: int) -> None:
        if num:
            with pool.lane() as lane:
                lent.add(lane.index)
                assert lane.run(lambda: "over") == "over"
                take_all(num - 1)

    # Each came back once.
    take_all(NUM_LANES)
    assert lent == set(range(NUM_LANES))


def test_what_a_call_raises_is_raised() -> None:
    pool = LanePool(1 << 20, name="it", timeout_s=5.0)
    with pytest.raises(ZeroDivisionError), pool.lane() as lane:
        lane.run(lambda: 1 // 0)
    assert pool.close()


def test_a_call_that_ends_with_its_time_gives_its_lane_back_once() -> None:
    pool = LanePool(1 << 20, name="it", timeout_s=0.01)
    for _ in range(60):
        try:
            with pool.lane() as lane:
                lane.run(lambda: time.sleep(0.01))
        except KvStoreError:
            pass
    deadline = time.monotonic() + 30
    while not pool.close():
        assert time.monotonic() < deadline
    with contextlib.ExitStack() as lent:
        indexes = {lent.enter_context(pool.lane()).index for _ in range(NUM_LANES)}
        assert indexes == set(range(NUM_LANES))
        with pytest.raises(KvStoreError), pool.lane():
            pass
