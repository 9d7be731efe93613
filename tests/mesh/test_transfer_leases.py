"""Pages that a transfer of a dead scheduler holds: leased by every scheduler after it, until the worker's event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from support.rank_group import RankGroup, rank_group
from support.running_daemon import Running, running
from support.serve_client import serve_client

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.kv_transfer.transfer_pins import TransferPins

TIMEOUT_S = 60.0


@asynccontextmanager
async def scheduler(workers: Sequence[str], name: str) -> AsyncIterator[Running[SchedulerDaemon]]:
    settings = SchedulerSettings(workers=tuple(workers), check_invariants=True)
    async with running(SchedulerDaemon, settings, instance_id=name) as daemon:
        yield daemon


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.01)


def num_leased(daemon: Running[SchedulerDaemon]) -> int:
    state = daemon.daemon.loop.planner.state
    assert state is not None
    return state.pages.pool.num_leased


def pins_of(group: RankGroup) -> list[TransferPins]:
    return [group.ranks[rank].daemon.core.pins for rank in range(len(group.ranks))]


async def test_leases_outlive_schedulers_and_end_by_the_workers_event() -> None:
    """Over the wire, on one worker: two transfers that share pages."""
    settings = WorkerSettings(backend=Backend.SIMULATED, num_pages=64, simulated_base_us=200.0)
    async with running(WorkerDaemon, settings) as worker:
        pins, workers = worker.daemon.core.pins, (worker.address,)
        pins.pin("t1", as_ints([3, 4, 5]))
        pins.pin("t2", as_ints([5, 6]))
        async with scheduler(workers, "a") as a:
            assert num_leased(a) == 4
        async with scheduler(workers, "b") as b, serve_client(b.address) as client:
            assert num_leased(b) == 4
            pins.release("t1")
            await until(lambda: num_leased(b) == 2)  # A heartbeat's result says so: nothing else runs.
            handle = await client.submit(list(range(3, 20)), max_tokens=40)
            pins.release("t2")
            (seen,) = await client.over(handle, timeout_s=TIMEOUT_S)
            assert len(seen.tokens) == 40
            await until(lambda: num_leased(b) == 0)
        pins.pin("t3", as_ints([1]))
        pins.release("t3")
        async with scheduler(workers, "c") as c:
            assert num_leased(c) == 0, "what ended between two schedulers is nobody's"


async def test_the_pages_of_a_transfer_on_two_ranks_come_back_with_the_last_ones_event() -> None:
    async with rank_group(2) as group:
        async with scheduler(group.addresses, "a"):
            pass
        first, second = pins_of(group)
        first.pin("t1", as_ints([3, 4]))
        second.pin("t1", as_ints([3, 4]))
        second.pin("t2", as_ints([9]))
        async with scheduler(group.addresses, "b") as b:
            assert num_leased(b) == 3
            first.release("t1")
            second.release("t2")
            await until(lambda: num_leased(b) == 2)
            planner = b.daemon.loop.planner
            num_steps = planner.counters.num_steps
            await until(lambda: planner.counters.num_steps > num_steps + 1)
            assert num_leased(b) == 2, "rank 1 may still read them"
            second.release("t1")
            await until(lambda: num_leased(b) == 0)


def test_pins_are_bounded_and_an_event_is_told_once() -> None:
    pins = TransferPins()
    pins.pin("t", as_ints([1, 2]))
    for name, reason in (("t", "INVALID_ARGUMENT"), ("", "INVALID_ARGUMENT"), ("x" * 257, "INVALID_ARGUMENT")):
        with pytest.raises(Exception, match="transfer") as caught:
            pins.pin(name, as_ints([1]))
        assert getattr(caught.value, "reason_name", "") == reason
    pins.release("t")
    pins.release("t")
    pins.release("unknown")
    assert pins.take_released() == ("t",) and pins.take_released() == ()
    for number in range(4096):
        pins.pin(str(number), np.zeros(0, np.int32))
    with pytest.raises(Exception, match="4096 transfers") as caught:
        pins.pin("one more", as_ints([1]))
    assert getattr(caught.value, "reason_name", "") == "OVERLOADED"
