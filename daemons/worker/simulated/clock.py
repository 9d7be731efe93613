"""The simulated device's time: steps that really take it, or that only say so."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from enum import StrEnum


class ClockKind(StrEnum):
    REAL = "real"
    VIRTUAL = "virtual"


class StepClock(ABC):
    """A device that runs one step after the other. Nanoseconds on a monotonic clock."""

    @abstractmethod
    def now_ns(self) -> int:
        """The time now."""

    @abstractmethod
    def run(self, duration_ns: int, ready_ns: int) -> tuple[int, int]:
        """Runs a step that was ready at `ready_ns`, or as soon as the one before ends. Returns its start and end."""


class RealClock(StepClock):
    """Steps take their time: run() returns when the step has ended.

    A step that was ready before its predecessor ended starts right then, as queued work does on a GPU: what the host
    did in between does not delay it.
    """

    def __init__(self) -> None:
        self._end_ns = 0

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def run(self, duration_ns: int, ready_ns: int) -> tuple[int, int]:
        start_ns = max(self._end_ns, ready_ns)
        end_ns = start_ns + duration_ns
        late_ns = time.monotonic_ns() - end_ns
        if late_ns < 0:
            time.sleep(-late_ns * 1e-9)
        else:
            # The host was slower than the device: a real one would have answered no earlier.
            start_ns, end_ns = start_ns + late_ns, end_ns + late_ns
        self._end_ns = end_ns
        return start_ns, end_ns


class VirtualClock(StepClock):
    """Steps take no time: their durations add up on a clock of their own, which starts at 0."""

    def __init__(self) -> None:
        self._end_ns = 0

    def now_ns(self) -> int:
        return self._end_ns

    def run(self, duration_ns: int, ready_ns: int) -> tuple[int, int]:
        start_ns = max(self._end_ns, ready_ns)
        self._end_ns = start_ns + duration_ns
        return start_ns, self._end_ns


def make_clock(kind: ClockKind) -> StepClock:
    """A clock that starts now."""
    return RealClock() if kind is ClockKind.REAL else VirtualClock()
