"""A thread that waits for events of a device: it is told of one at once, where a poll would sleep, or keep the loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

from radixmesh.daemons.worker.step_handle import DeviceEvent

# Seconds for which a thread may keep the interpreter while another wants it: copies take about a millisecond.
_SWITCH_S = 0.0002


class EventWaits:
    """Waits for one event after the other, as those of one stream come. The thread begins with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def until(self, event: DeviceEvent) -> None:
        """Returns when the event is done. Raises what it does."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wait() -> None:
            error: BaseException | None = None
            try:
                event.wait()
            except BaseException as raised:
                error = raised
            # The event may outlive the loop when the process leaves in a hurry: nobody waits for it then.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_tell, done, error)

        self._waits.put(wait)
        if self._thread is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            # Not joined at exit: a wedged device must not keep the process alive.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        await done

    def _work(self) -> None:
        while True:
            self._waits.get()()


def _tell(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
