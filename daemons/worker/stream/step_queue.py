"""One thread that runs everything which touches slots, records and the model, in the order it was handed in.

A job that only starts something (a forward on a device) hands back its StepHandle; the next job starts at once, and the
first is collected, on the same thread, when a second thread has seen its end. So the device always has its next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from radixmesh.daemons.worker.step_handle import StepHandle

T = TypeVar("T")
# An answer is written in a fifth of it; a loop that does something longer is not waited for.
_LOOP_S = 0.001


class _Started(NamedTuple):
    last: StepHandle[object]
    deliver: Callable[[], None]


class StepQueue:
    """Jobs start one after the other off the event loop; what comes of them comes back on the loop.

    Jobs hand their errors back as values where somebody expects them: submit()'s jobs, and their steps, must not raise.
    """

    def __init__(self, *, loop_s: float = _LOOP_S) -> None:
        """loop_s: the longest that a job waits for the event loop behind an urgent outcome."""
        self._loop_s = loop_s
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: deque[_Started] = deque()
        self._waits: SimpleQueue[StepHandle[object] | None] = SimpleQueue()
        # Not joined at exit: a wedged device must not keep the process alive.
        threading.Thread(target=self._work, name="steps", daemon=True).start()
        threading.Thread(target=self._wait, name="waits", daemon=True).start()

    def submit(
        self, start: Callable[[], StepHandle[T]], on_done: Callable[[T], None], *, is_urgent: bool = False
    ) -> None:
        """Queues `start`; `on_done` gets the outcome on the calling thread's event loop."""
        self.submit_all([start], lambda results: on_done(results[0]), is_urgent=is_urgent)

    def submit_all(
        self,
        starts: Sequence[Callable[[], StepHandle[T]]],
        on_done: Callable[[Sequence[T]], None],
        *,
        is_urgent: bool = False,
    ) -> None:
        """Queues all of `starts`, at least one, to follow each other; `on_done` gets their outcomes at once, when the
        last has its own. Threads hand over to each other once for all of them.

        is_urgent: where the runner computes at once, the next job lets the event loop have the interpreter's lock
        until what `on_done` led to has been done, for a short time at most. An asynchronous runner leaves it anyway.
        """
        loop = asyncio.get_running_loop()

        def run() -> None:
            steps: list[StepHandle[T]] = []
            for start in starts:
                steps.append(start())
                if steps[-1].is_done:
                    # A runner that computes at once reads tokens of the step before: those have to be settled.
                    self._finish_all()
                    for step in steps:
                        step.result()
            last = steps[-1]
            self._running.append(_Started(last, lambda: _call_on(loop, on_done, [step.result() for step in steps])))
            if last.is_done:
                self._finish_all()
                if is_urgent and not self._jobs.empty():
                    _let_run(loop, self._loop_s)
            else:
                self._waits.put(last)

        self._jobs.put(run)

    async def run(self, job: Callable[[], T]) -> T:
        """Runs `job` after all that were queued before are finished; its result or exception."""

        def after_all() -> T:
            self._finish_all()
            return job()

        return await self.start(after_all)

    def start(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `job` behind all that was queued before this call, whose steps may still run on the device, and ahead of
        all that is queued after it; its result or exception."""
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
        return done

    def close(self) -> None:
        """No further jobs run once those queued have."""
        self._jobs.put(None)
        self._waits.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _wait(self) -> None:
        while (step := self._waits.get()) is not None:
            # An error here is raised again by result(), where it is expected.
            with contextlib.suppress(Exception):
                step.wait()
            self._jobs.put(self._finish_done)

    def _finish_done(self) -> None:
        """Finishes what is over, oldest first. Something that had to wait for all may have done so by now."""
        while self._running and self._running[0].last.is_done:
            self._running.popleft().deliver()

    def _finish_all(self) -> None:
        while self._running:
            self._running.popleft().deliver()


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[T], object], value: T) -> None:
    # A step may outlive the loop when the process leaves in a hurry: nobody waits for it then.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, value)


def _let_run(loop: asyncio.AbstractEventLoop, most_s: float) -> None:
    """Waits until the loop has gone round once more behind what it was called for."""
    has_run = threading.Lock()
    has_run.acquire()
    _call_on(loop, loop.call_soon, has_run.release)
    has_run.acquire(timeout=most_s)


def _succeed(pair: tuple[asyncio.Future[T], T]) -> None:
    if not pair[0].done():
        pair[0].set_result(pair[1])


def _fail(pair: tuple[asyncio.Future[T], BaseException]) -> None:
    if not pair[0].done():
        pair[0].set_exception(pair[1])
