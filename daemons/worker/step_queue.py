"""One thread that runs everything which touches slots, records and the model, in the order it was handed in.

A job that only starts something (a forward on a device) hands back a RunningJob; the next job starts at once, and the
first is finished, on the same thread, when a second thread has seen its end. So the device always has its next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RunningJob(ABC, Generic[T_co]):
    """Something that was started on the step thread and is finished there."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if finish() will not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until it is done, on another thread than the steps'. May raise: finish() then says why."""

    @abstractmethod
    def finish(self) -> T_co:
        """Its outcome; on the step thread, in the order of the starts. Does not raise."""


class DoneJob(RunningJob[T_co]):
    """A job that was over when it had started."""

    is_done = True

    def __init__(self, outcome: T_co) -> None:
        self._outcome = outcome

    def wait(self) -> None:
        return

    def finish(self) -> T_co:
        return self._outcome


class _Started(NamedTuple):
    job: RunningJob[object]
    deliver: Callable[[], None]


class StepQueue:
    """Jobs start one after the other off the event loop; what comes of them comes back on the loop.

    Jobs hand their errors back as values where somebody expects them: submit()'s jobs must not raise.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: deque[_Started] = deque()
        self._waits: SimpleQueue[RunningJob[object] | None] = SimpleQueue()
        # Not joined at exit: a wedged device must not keep the process alive.
        threading.Thread(target=self._work, name="steps", daemon=True).start()
        threading.Thread(target=self._wait, name="waits", daemon=True).start()

    def submit(self, start: Callable[[], RunningJob[T]], on_done: Callable[[T], None]) -> None:
        """Queues `start`; `on_done` gets the outcome on the calling thread's event loop."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            job = start()
            self._running.append(_Started(job, lambda: _call_on(loop, on_done, job.finish())))
            if job.is_done:
                self._finish_all()
            else:
                self._waits.put(job)

        self._jobs.put(run)

    async def run(self, job: Callable[[], T]) -> T:
        """Runs `job` after all that were queued before are finished; its result or exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            self._finish_all()
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
        self._waits.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _wait(self) -> None:
        while (job := self._waits.get()) is not None:
            # An error here is raised again by finish(), where it is expected.
            with contextlib.suppress(Exception):
                job.wait()
            self._jobs.put(self._finish_done)

    def _finish_done(self) -> None:
        """Finishes what is over, oldest first. Something that had to wait for all may have done so by now."""
        while self._running and self._running[0].job.is_done:
            self._running.popleft().deliver()

    def _finish_all(self) -> None:
        while self._running:
            self._running.popleft().deliver()


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
