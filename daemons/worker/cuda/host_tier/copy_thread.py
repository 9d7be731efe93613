"""A thread that gives copies to a stream, so that whoever wants them never waits for room in the stream's queue.

A load of a long prefix is hundreds of copies. A stream's queue has an end, and a worker's step thread that waited there
for copies would launch no step meanwhile: the GPU would compute nothing until nearly all of the loads were over.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from radixmesh.daemons.worker.cuda.device import CudaEvent
from radixmesh.daemons.worker.step_handle import DeviceEvent


class CopyEnd(DeviceEvent):
    """The end of a copy that a thread starts, or has failed to start."""

    def __init__(self) -> None:
        self._is_started = threading.Event()
        self._event: CudaEvent | None = None
        self._error: Exception | None = None
        self.cpu_s = 0.0
        """CPU time that it took to start it; 0.0 before that."""

    def start(self, work: Callable[[], CudaEvent]) -> None:
        """Gives the copy to its stream; work returns the event behind it."""
        begin = time.thread_time()
        try:
            self._event = work()
        except Exception as error:
            self._error = error
        self.cpu_s = time.thread_time() - begin
        self._is_started.set()

    @property
    def is_done(self) -> bool:
        return self._is_started.is_set() and (self._event is None or self._event.is_done)

    def wait(self) -> None:
        self._started().wait()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Work that the stream is given from now on waits for the copy. Blocks until it is started.

        Raises RuntimeError if that has failed.
        """
        self._started().hold(stream)

    def _started(self) -> CudaEvent:
        self._is_started.wait()
        if self._event is None:
            raise RuntimeError(f"KV pages were not copied: {self._error!r}") from self._error
        return self._event


class CopyThread:
    """Starts copies in the order in which they are asked for. Begins with the first, and ends when it is dropped."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[tuple[CopyEnd, Callable[[], CudaEvent]] | None] = SimpleQueue()
        self._has_started = False

    def start(self, work: Callable[[], CudaEvent]) -> CopyEnd:
        """work: gives the copy to its stream, and returns the event behind it."""
        if not self._has_started:
            self._has_started = True
            # Not joined at exit: a wedged device must not keep the process alive.
            threading.Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        end = CopyEnd()
        self._tasks.put((end, work))
        return end


def _run(tasks: SimpleQueue[tuple[CopyEnd, Callable[[], CudaEvent]] | None]) -> None:
    while (task := tasks.get()) is not None:
        end, work = task
        end.start(work)
        # Nothing of this one is kept while the next one is waited for.
        del task, end, work
