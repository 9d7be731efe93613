"""A device is kept busy while work is expected for it, and no longer."""

from __future__ import annotations

import threading
import time

from radixmesh.daemons.worker.cuda.clock_keeper import ClockKeeper


class _Device:
    def __init__(self, *, is_busy: bool = False, fails_at: int = 0) -> None:
        self.num_spins = self.num_looks = 0
        self._is_busy, self._fails_at = is_busy, fails_at
        self.has_looked, self.has_failed = threading.Event(), threading.Event()

    def spin(self) -> None:
        self.num_spins += 1
        if self.num_spins == self._fails_at:
            self.has_failed.set()
            raise RuntimeError("the device is lost")
        time.sleep(0.001)

    def is_busy(self) -> bool:
        self.num_looks += 1
        self.has_looked.set()
        return self._is_busy


def _wait(device: _Device, num_spins: int) -> None:
    deadline = time.monotonic() + 10.0
    while device.num_spins < num_spins:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_spins_while_work_is_expected_and_again_when_it_is_expected_again() -> None:
    device = _Device()
    awake = ClockKeeper(device.spin, device.is_busy)
    assert not device.num_looks, "nobody expects anything"
    for _ in range(2):
        before = device.num_spins
        awake.stay(0.02)
        _wait(device, before + 1)
        time.sleep(0.1)
        settled = device.num_spins
        time.sleep(0.05)
        assert device.num_spins == settled, "the time is over"


def test_a_later_end_counts_whichever_was_told_first() -> None:
    device = _Device()
    awake = ClockKeeper(device.spin, device.is_busy)
    awake.stay(60.0)
    awake.stay(0.0)
    _wait(device, 20)


def test_a_device_with_work_is_left_alone() -> None:
    device = _Device(is_busy=True)
    ClockKeeper(device.spin, device.is_busy).stay(60.0)
    assert device.has_looked.wait(10.0)
    time.sleep(0.02)
    assert not device.num_spins


def test_a_device_that_is_lost_is_asked_no_more() -> None:
    device = _Device(fails_at=2)
    awake = ClockKeeper(device.spin, device.is_busy)
    awake.stay(60.0)
    assert device.has_failed.wait(10.0)
    awake.stay(60.0)
    time.sleep(0.02)
    assert device.num_spins == 2
