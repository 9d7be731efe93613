"""Events of a device, waited for by a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from radixmesh.daemons.worker.kv_transfer.event_waits import EventWaits
from radixmesh.daemons.worker.step_handle import DeviceEvent


class _Event(DeviceEvent):
    def __init__(self, error: Exception | None = None) -> None:
        self.is_set, self._error = threading.Event(), error

    @property
    def is_done(self) -> bool:
        return self.is_set.is_set()

    def wait(self) -> None:
        self.is_set.wait()
        if self._error is not None:
            raise self._error


async def test_each_is_told_behind_its_event_in_their_order() -> None:
    waits, events, told = EventWaits("waits"), [_Event() for _ in range(3)], list[int]()

    async def wait(number: int) -> None:
        await waits.until(events[number])
        assert events[number].is_done
        told.append(number)

    waiting = [asyncio.ensure_future(wait(number)) for number in range(3)]
    await asyncio.sleep(0.05)
    assert not told
    for event in reversed(events):
        event.is_set.set()
    await asyncio.gather(*waiting)
    assert told == [0, 1, 2]


async def test_errors_of_an_event_are_raised_and_end_no_thread() -> None:
    waits, bad, good = EventWaits("waits"), _Event(RuntimeError("the device died")), _Event()
    for event in (bad, good):
        event.is_set.set()
    with pytest.raises(RuntimeError, match="the device died"):
        await waits.until(bad)
    await waits.until(good)


async def test_who_does_not_wait_any_more_is_not_told() -> None:
    waits, event = EventWaits("waits"), _Event()
    waiting = asyncio.ensure_future(waits.until(event))
    await asyncio.sleep(0.01)
    waiting.cancel()
    event.is_set.set()
    await waits.until(event)
    assert waiting.cancelled()
