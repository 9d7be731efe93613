"""Work off the event loop, in steps: a few threads, turns by tenant, a bounded number of calls, progress for health.

A call is a generator. Each of its steps runs in a thread; between steps another call may go first, and a call whose
client went away ends. The tenant that was served least so far goes next, and of its calls the one that was served
least: a short text overtakes any number of long ones. A step yields the bytes that the next one works on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, cast

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.tokenize.text_codec import run_whole

_T = TypeVar("_T")

# Encoding takes about 140 bytes of memory per byte of text: of steps beyond this only one runs at a time.
HEAVY_STEP_BYTES = 256 << 10


@dataclass(slots=True, eq=False, kw_only=True)
class _Call:
    """served_s: thread time so far. next_bytes: what its next step works on."""

    steps: Generator[int, None, object]
    tenant: str
    number: int
    future: asyncio.Future[object]
    served_s: float = 0.0
    next_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Tenant:
    """calls: those that wait for their next step. num_calls: with those that run. served_s: as far as turns go."""

    served_s: float
    num_calls: int = 0
    calls: list[_Call] = field(default_factory=list)


class WorkQueue:
    """Runs generators in threads, step by step. max_queued: calls at once. clock: seconds, to weigh steps by."""

    def __init__(
        self,
        progress: Progress,
        *,
        num_threads: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._max_queued = max_queued
        self._clock = clock
        self._num_queued = 0
        self._num_running = self._num_heavy = 0
        self._num_threads = num_threads
        self._tenants: dict[str, _Tenant] = {}
        self._numbers = itertools.count()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    @property
    def is_idle(self) -> bool:
        """True while no call waits or runs: a short one is answered without waiting for anything."""
        return not self._num_queued

    async def run(self, steps: Generator[int, None, _T], *, tenant: str = "", is_short: bool = False) -> _T:
        """The generator's result, or what it raises. Raises MeshError OVERLOADED when too much waits, NOT_SERVING.

        Cancelled: the step that runs is the last one. is_short: takes less time than waking a thread and being woken by
        it; runs at once, on the event loop, where nothing else waits.
        """
        try:
            self._progress.require_serving()
            self._require_room()
        except MeshError:
            steps.close()
            raise
        if is_short and self.is_idle:
            return run_whole(steps)
        call = _Call(
            steps=cast("Generator[int, None, object]", steps),
            tenant=tenant,
            number=next(self._numbers),
            future=asyncio.get_running_loop().create_future(),
        )
        self._enter(call)
        self._start_steps()
        try:
            return cast(_T, await call.future)
        finally:
            waiting = self._tenants[tenant].calls if tenant in self._tenants else []
            if call.future.cancelled() and call in waiting:
                waiting.remove(call)
                self._end(call)

    def require_serving(self) -> None:
        """Raises MeshError NOT_SERVING while the daemon loads or leaves: for calls that do not queue here."""
        self._progress.require_serving()

    async def wait_until_idle(self) -> None:
        await self._is_idle.wait()

    def close(self) -> None:
        """Takes no more work and does not wait for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _require_room(self) -> None:
        if self._num_queued >= self._max_queued:
            message = f"{self._num_queued} calls wait already: retry later, or on another replica"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})

    def _enter(self, call: _Call) -> None:
        tenant = self._tenants.get(call.tenant)
        if tenant is None:
            # As one that was there all the time: neither debts nor savings from before.
            served_s = min((known.served_s for known in self._tenants.values()), default=0.0)
            tenant = self._tenants[call.tenant] = _Tenant(served_s)
        tenant.num_calls += 1
        tenant.calls.append(call)
        self._num_queued += 1
        self._progress.work_pending(self._num_queued)
        self._is_idle.clear()

    def _end(self, call: _Call) -> None:
        call.steps.close()
        self._leave(call)

    def _leave(self, call: _Call) -> None:
        tenant = self._tenants[call.tenant]
        tenant.num_calls -= 1
        if not tenant.num_calls:
            del self._tenants[call.tenant]
        self._num_queued -= 1
        self._progress.work_pending(self._num_queued)
        if not self._num_queued:
            self._is_idle.set()

    def _start_steps(self) -> None:
        while self._num_running < self._num_threads and (call := self._take_next()) is not None:
            self._num_running += 1
            self._num_heavy += call.next_bytes > HEAVY_STEP_BYTES
            try:
                step = asyncio.get_running_loop().run_in_executor(self._threads, _step, call.steps, self._clock)
            except RuntimeError as error:  # The daemon closes.
                step = asyncio.get_running_loop().create_future()
                step.set_exception(error)
            step.add_done_callback(lambda done, call=call: self._ran(call, done))  # type: ignore[misc]

    def _take_next(self) -> _Call | None:
        for tenant in sorted(self._tenants.values(), key=lambda tenant: tenant.served_s):
            able = (call for call in tenant.calls if call.next_bytes <= HEAVY_STEP_BYTES or not self._num_heavy)
            call = min(able, key=lambda call: (call.served_s, call.number), default=None)
            if call is not None:
                tenant.calls.remove(call)
                return call
        return None

    def _ran(self, call: _Call, step: asyncio.Future[_Step]) -> None:
        self._num_running -= 1
        self._num_heavy -= call.next_bytes > HEAVY_STEP_BYTES
        self._progress.completed()
        error = None if step.cancelled() else step.exception()
        if call.future.done():
            self._end(call)
        elif step.cancelled() or error is not None:
            self._leave(call)
            call.future.set_exception(error or _closing())
        else:
            done = step.result()
            call.served_s += done.took_s
            self._tenants[call.tenant].served_s += done.took_s
            if done.next_bytes is None:
                self._leave(call)
                call.future.set_result(done.result)
            else:
                call.next_bytes = done.next_bytes
                self._tenants[call.tenant].calls.append(call)
        self._start_steps()


@dataclass(slots=True, frozen=True)
class _Step:
    """next_bytes: None = the call is done, with result."""

    took_s: float
    next_bytes: int | None
    result: object = None


def in_one_step(work: Callable[[], _T]) -> Generator[int, None, _T]:
    """A function as a call for the queue."""
    yield from ()
    return work()


def _step(steps: Generator[int, None, object], clock: Callable[[], float]) -> _Step:
    since_s = clock()
    try:
        next_bytes = next(steps)
    except StopIteration as end:
        return _Step(clock() - since_s, None, end.value)
    return _Step(clock() - since_s, next_bytes)


def _closing() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, "this daemon stops: retry on another replica", {})
