"""Work off the event loop: a few threads, a bounded number of calls, progress told to health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.progress import Progress

_T = TypeVar("_T")


class WorkQueue:
    """Runs functions in threads, first come first served."""

    def __init__(self, progress: Progress, *, num_threads: int, max_queued: int) -> None:
        self._progress = progress
        self._max_queued = max_queued
        self._num_queued = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[], _T]) -> _T:
        """work's result, or what it raises. Raises MeshError OVERLOADED when too many calls wait, NOT_SERVING.

        A call whose client went away keeps its place until its work is done: threads cannot be interrupted.
        """
        self._progress.require_serving()
        if self._num_queued >= self._max_queued:
            message = f"{self._num_queued} calls wait already: retry later, or on another replica"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        self._count(1)
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(lambda _: self._count(-1))
        return await asyncio.shield(future)

    async def wait_until_idle(self) -> None:
        await self._is_idle.wait()

    def close(self) -> None:
        """Takes no more work and does not wait for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _count(self, change: int) -> None:
        self._num_queued += change
        self._progress.work_pending(self._num_queued)
        if change < 0:
            self._progress.completed()
        if self._num_queued:
            self._is_idle.clear()
        else:
            self._is_idle.set()
