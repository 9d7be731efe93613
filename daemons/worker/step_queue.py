"""One thread that runs everything which touches slots, records and the model, in the order it was handed in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class StepQueue:
    """Jobs run one after the other off the event loop; what they return comes back on the loop.

    Jobs hand their errors back as values where somebody expects them: submit()'s jobs must not raise.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Not joined at exit: a wedged device must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], on_done: Callable[[T], None]) -> None:
        """Queues `job`; `on_done` gets its result on the calling thread's event loop."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            _call_on(loop, on_done, job())

        self._jobs.put(run)

    async def run(self, job: Callable[[], T]) -> T:
        """Runs `job` after all that were queued before; its result or exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = job()
            except BaseException as error:
                _call_on(loop, _fail, (done, error))
                return
            _call_on(loop, _succeed, (done, result))

        self._jobs.put(run)
        return await done

    def close(self) -> None:
        """No further jobs run once those queued have."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[T], object], value: T) -> None:
    # A step may outlive the loop when the process leaves in a hurry: nobody waits for it then.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, value)


def _succeed(pair: tuple[asyncio.Future[T], T]) -> None:
    if not pair[0].done():
        pair[0].set_result(pair[1])


def _fail(pair: tuple[asyncio.Future[T], BaseException]) -> None:
    if not pair[0].done():
        pair[0].set_exception(pair[1])
