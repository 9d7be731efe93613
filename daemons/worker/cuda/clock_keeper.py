"""Work for a device that would be idle just before it is needed.

An idle GPU lowers its clocks, an H200 from 1,980 to 345 MHz, and takes milliseconds to raise them again. That is taken
to be why the first step behind a pause was as slow as two in a hand-over; bench/gpu/first_step.py tells. A kernel of
one thread should be enough for the clocks to stay up. No GPU has run it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from radixmesh.daemons.runtime.telemetry.logs import get_logger

_log = get_logger(__name__)

# Between two looks at a device that has other work.
_BUSY_S = 0.001


class ClockKeeper:
    """spin: keeps the device busy for about a millisecond, and returns behind that. is_busy: it has work of its own.
    Both are called on one thread, which begins with the first request."""

    def __init__(self, spin: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        self._spin, self._is_busy = spin, is_busy
        self._until_s = 0.0
        self._wanted = threading.Condition()
        self._thread: threading.Thread | None = None

    def stay(self, seconds: float) -> None:
        """Work is expected within so many seconds. Any thread."""
        with self._wanted:
            self._until_s = max(self._until_s, time.monotonic() + seconds)
            self._wanted.notify()
            if self._thread is None:
                # Not joined at exit: a wedged device must not keep the process alive.
                self._thread = threading.Thread(target=self._work, name="awake", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        try:
            while True:
                with self._wanted:
                    self._wanted.wait_for(lambda: time.monotonic() < self._until_s)
                if self._is_busy():
                    time.sleep(_BUSY_S)
                else:
                    self._spin()
        except Exception as error:
            # A device that is lost: the steps find that out.
            _log.warning("device_not_kept_awake", error=str(error))
