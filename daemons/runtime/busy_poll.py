"""An event loop that polls for messages instead of sleeping, while there is work and for a while after it.

A process that sleeps is woken for every message: on an idle core of a virtual machine that takes tens of microseconds,
and what runs then finds cold caches and a slow clock. One that polls takes a core.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

# A look at whether there is work while the loop sleeps.
_LOOK_S = 0.05
# With fewer cores a process that polls takes the time of those that it waits for.
LEAST_CORES = 8


class BusyPoll:
    """seconds: for which it polls after the last work; 0: it never does. is_busy: asked in every turn of the loop."""

    def __init__(
        self,
        seconds: float,
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._is_busy = is_busy
        self._clock = clock
        self.num_turns = 0
        """Turns of the loop in which it polled."""

    async def run(self) -> None:
        """Runs for ever, or returns where it would do harm."""
        if not self._seconds:
            return
        cores = len(os.sched_getaffinity(0))
        if cores < LEAST_CORES:
            log.warning("busy_poll_off", reason=f"this process has {cores} cores, and needs {LEAST_CORES} for it")
            return
        while True:
            if self._is_busy():
                await self._poll()
            await asyncio.sleep(_LOOK_S)

    async def _poll(self) -> None:
        until = self._clock() + self._seconds
        while (now := self._clock()) < until:
            if self._is_busy():
                until = now + self._seconds
            self.num_turns += 1
            # The loop looks at its sockets and timers, and waits for none of them.
            await asyncio.sleep(0)
