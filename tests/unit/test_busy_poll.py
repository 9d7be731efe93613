"""Polling in place of sleep: while there is work and for a while after it, and never on few cores."""

from __future__ import annotations

import asyncio
import os

import pytest

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.runtime import busy_poll
from radixmesh.daemons.runtime.busy_poll import BusyPoll
from radixmesh.daemons.scheduler.config import SchedulerSettings


class World:
    """Turns of the loop take a hundredth of a second each."""

    def __init__(self) -> None:
        self.now, self.is_busy = 0.0, False

    def clock(self) -> float:
        self.now += 0.01
        return self.now


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(busy_poll.LEAST_CORES)))
    monkeypatch.setattr(busy_poll, "_LOOK_S", 0.001)


async def until_still(poll: BusyPoll) -> int:
    """Turns, once there have been none for a while."""
    async with asyncio.timeout(30):
        turns = -1
        while turns != poll.num_turns:
            turns = poll.num_turns
            await asyncio.sleep(0.05)
    return turns


@pytest.mark.usefixtures("cores")
async def test_it_polls_while_there_is_work_and_for_a_while_after_it() -> None:
    world = World()
    poll = BusyPoll(1.0, lambda: world.is_busy, world.clock)
    running = asyncio.create_task(poll.run())
    assert await until_still(poll) == 0
    world.is_busy = True
    async with asyncio.timeout(30):
        while poll.num_turns < 1000:
            await asyncio.sleep(0)
    world.is_busy, at_end = False, poll.num_turns
    turns = await until_still(poll)
    assert 90 <= turns - at_end <= 110
    world.is_busy = True
    async with asyncio.timeout(30):
        while poll.num_turns == turns:
            await asyncio.sleep(0)
    running.cancel()


@pytest.mark.usefixtures("cores")
async def test_by_default_it_does_not() -> None:
    await asyncio.wait_for(BusyPoll(0.0, lambda: True).run(), 10)
    assert RouterSettings().busy_poll_s == SchedulerSettings(workers=("w:1",)).busy_poll_s == 0


async def test_few_cores_are_for_others(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(busy_poll.LEAST_CORES - 1)))
    poll = BusyPoll(1.0, lambda: True)
    with caplog.at_level("WARNING"):
        await asyncio.wait_for(poll.run(), 10)
    assert poll.num_turns == 0 and "busy_poll_off" in caplog.text


def test_seconds_below_zero_are_refused() -> None:
    for make in (lambda: RouterSettings(busy_poll_s=-1), lambda: SchedulerSettings(workers=("w:1",), busy_poll_s=-1)):
        with pytest.raises(ValueError, match="busy-poll-s"):
            make()
