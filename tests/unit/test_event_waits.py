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


async def test_what_follows_an_event_runs_behind_it_and_ahead_of_the_next() -> None:
    waits, events, notes = EventWaits("waits"), [_Event() for _ in range(3)], list[tuple[str, int, bool]]()

    async def wait(number: int) -> None:
        await waits.until(events[number], lambda: notes.append(("then", number, events[number].is_done)))
        notes.append(("told", number, True))

    waiting = [asyncio.ensure_future(wait(number)) for number in range(3)]
    await asyncio.sleep(0.05)
    assert not notes
    for event in reversed(events):
        event.is_set.set()
    await asyncio.gather(*waiting)
    assert [number for kind, number, _ in notes if kind == "then"] == [0, 1, 2]
    assert all(is_done for *_, is_done in notes) and notes.index(("then", 0, True)) < notes.index(("told", 0, True))


async def test_errors_of_an_event_and_of_what_follows_are_raised_and_end_no_thread() -> None:
    waits, bad, good = EventWaits("waits"), _Event(RuntimeError("the device died")), _Event()
    for event in (bad, good):
        event.is_set.set()
    with pytest.raises(RuntimeError, match="the device died"):
        await waits.until(bad, lambda: pytest.fail("nothing follows"))
    with pytest.raises(ZeroDivisionError):
        await waits.until(good, lambda: print(1 // 0))
    await waits.until(good)


async def test_who_does_not_wait_any_more_is_not_told() -> None:
    waits, event = EventWaits("waits"), _Event()
    waiting = asyncio.ensure_future(waits.until(event))
    await asyncio.sleep(0.01)
    waiting.cancel()
    event.is_set.set()
    await waits.until(event)
    assert waiting.cancelled()
