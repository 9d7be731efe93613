"""The tokenizer's queue: turns by tenant, short before long, an end between steps, bounds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.tokenizer.work_queue import HEAVY_STEP_BYTES, WorkQueue, in_one_step


class Work:
    """Calls that note their steps. By its own clock each step takes the same time, on a busy machine too."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = threading.Event()

    def clock(self) -> float:
        return 0.002 * len(self.done)

    def steps(self, name: str, num: int, *, num_bytes: int = 0) -> Generator[int, None, str]:
        for _ in range(num - 1):
            self._step(name)
            yield num_bytes
        self._step(name)
        return name

    def _step(self, name: str) -> None:
        assert self.go.wait(60)
        self.done.append(name)


def new_queue(work: Work | None = None, *, num_threads: int = 1, max_queued: int = 64) -> WorkQueue:
    progress = Progress()
    progress.loaded()
    clock = time.monotonic if work is None else work.clock
    return WorkQueue(progress, num_threads=num_threads, max_queued=max_queued, clock=clock)


async def test_tenants_take_turns_whatever_each_has_waiting() -> None:
    work = Work()
    queue = new_queue(work)
    greedy = [asyncio.ensure_future(queue.run(work.steps("a", 10), tenant="a")) for _ in range(8)]
    await asyncio.sleep(0)
    modest = asyncio.ensure_future(queue.run(work.steps("b", 5), tenant="b"))
    await asyncio.sleep(0)
    work.go.set()
    assert await modest == "b"
    # One of a's steps may have run before b came.
    last = len(work.done) - 1 - work.done[::-1].index("b")
    assert work.done[:last].count("a") <= 6, work.done
    assert await asyncio.gather(*greedy) == ["a"] * 8


async def test_a_short_call_overtakes_long_ones_of_its_own_tenant() -> None:
    work = Work()
    queue = new_queue(work)
    long = [asyncio.ensure_future(queue.run(work.steps("long", 200))) for _ in range(6)]
    await asyncio.sleep(0)
    work.go.set()
    while len(work.done) < 12:
        await asyncio.sleep(0.001)
    work.go.clear()
    short = asyncio.ensure_future(queue.run(work.steps("short", 1)))
    await asyncio.sleep(0)
    begun = len(work.done)
    work.go.set()
    assert await short == "short"
    assert work.done.index("short") - begun <= 3
    await asyncio.gather(*long)


async def test_a_call_that_nobody_waits_for_ends_with_its_step() -> None:
    queue, work = new_queue(max_queued=2), Work()
    calls = [asyncio.ensure_future(queue.run(work.steps("gone", 1000))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(MeshError) as error:
        await queue.run(work.steps("x", 1))
    assert error.value.reason == ErrorReason.ERROR_REASON_OVERLOADED
    for call in calls:
        call.cancel()
    work.go.set()
    await asyncio.wait_for(queue.wait_until_idle(), 60)
    assert len(work.done) <= 2
    assert await queue.run(work.steps("x", 1)) == "x"


async def test_one_heavy_step_at_a_time_and_light_ones_beside_it() -> None:
    queue, work = new_queue(num_threads=2), Work()
    running, most = 0, 0
    lock = threading.Lock()

    def heavy() -> Generator[int, None, None]:
        nonlocal running, most
        yield HEAVY_STEP_BYTES + 1
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    work.go.set()
    calls = [queue.run(heavy()) for _ in range(4)]
    await asyncio.gather(*calls, *(queue.run(work.steps("light", 3)) for _ in range(4)))
    assert most == 1


async def test_what_a_call_raises_is_its_own() -> None:
    queue = new_queue()

    def broken() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await queue.run(in_one_step(broken))
    assert await queue.run(in_one_step(lambda: 5)) == 5
    await asyncio.wait_for(queue.wait_until_idle(), 10)


async def test_a_short_call_runs_at_once_on_the_loop_unless_others_wait() -> None:
    queue, threads = new_queue(), []

    def steps() -> Generator[int, None, str]:
        threads.append(threading.current_thread() is threading.main_thread())
        yield 1
        return "done"

    def failing() -> Generator[int, None, str]:
        yield 1
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "no text")

    assert await queue.run(steps(), is_short=True) == "done"
    with pytest.raises(MeshError, match="no text"):
        await queue.run(failing(), is_short=True)
    gate = threading.Event()
    waiting = asyncio.ensure_future(queue.run(in_one_step(lambda: gate.wait(60))))
    await asyncio.sleep(0)
    behind = asyncio.ensure_future(queue.run(steps(), is_short=True))
    await asyncio.sleep(0)
    gate.set()
    assert await behind == "done" and await waiting
    assert threads == [True, False]
    queue.close()
