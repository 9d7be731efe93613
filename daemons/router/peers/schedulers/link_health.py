"""Trust in one scheduler, by what happened to outputs there.

SOUND --losses or failures in a row of seconds--> PASSED_OVER --after a pause--> SLOW_START --some seconds--> SOUND
  |                                                                                  ^
  +---------------------lost, and back----------------------------------------------+

PASSED_OVER: gets no outputs while another scheduler can take them. SLOW_START: gets its share bit by bit, so that one
that fails again, or is cold, has few of them. Each further trip doubles the pause.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# Failures within so many seconds that make a scheduler one to be passed over.
_TRIP_FAILURES, _TRIP_S = 3, 30.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0
SLOW_START_S = 10.0
_LEAST_SHARE = 0.05


class LinkHealth:
    """clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=_TRIP_FAILURES)
        self._pause_s = _MIN_PAUSE_S
        self.passed_until = float("-inf")
        """Moment of the end of its pause, in monotonic seconds; its slow start is of SLOW_START_S from slow_since."""
        self.slow_since = float("-inf")

    @property
    def is_passed_over(self) -> bool:
        return self._clock() < self.passed_until

    @property
    def share(self) -> float:
        """Part of its share that it may have: 1.0 for a sound one, grows from 0.05 in a slow start."""
        return float(shares(self._clock(), np.array([self.slow_since]))[0])

    @property
    def state(self) -> str:
        if self.is_passed_over:
            return "passed over"
        return "slow start" if self.share < 1.0 else "sound"

    def failed(self) -> bool:
        """Outputs lost it or its worker group, or one failed by its fault; True if it is passed over from now on."""
        now = self._clock()
        self._failures.append(now)
        if len(self._failures) < _TRIP_FAILURES or now - self._failures[0] > _TRIP_S:
            return False
        self._failures.clear()
        if now - self.passed_until > 2 * _MAX_PAUSE_S:
            self._pause_s = _MIN_PAUSE_S
        self.passed_until = self.slow_since = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        return True

    def came_back(self) -> None:
        """It was lost and is connected again, or its worker group was and serves again."""
        self.slow_since = max(self._clock(), self.passed_until)


def shares(now: float, slow_since: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """LinkHealth.share of many schedulers at that moment."""
    return np.clip((now - slow_since) / SLOW_START_S, _LEAST_SHARE, 1.0)
