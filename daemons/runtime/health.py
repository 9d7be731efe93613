"""The health service over a daemon's progress: a real Watch, and no probe that ever causes work.

Only SERVING answers SERVING; LOADING, STALLED and DRAINING answer NOT_SERVING (the states: progress.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .progress import Progress, State

__all__ = ["HealthService", "Progress", "State"]

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
_Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 over one Progress: all services of a daemon share its state.

    Watch speaks first with the current status, then once per change; it ends with OK when the server closes. A slow
    reader misses intermediate states, never the last one.
    """

    def __init__(self, progress: Progress, *, poll_s: float = 0.25) -> None:
        self._progress = progress
        self.poll_s = min(poll_s, progress.stall_s / 4)
        """How often watches look for what only time brings about."""
        self._services: set[str] = {""}
        self._is_closed = False
        self._watchers: set[asyncio.Event] = set()

    def add_service(self, name: str) -> None:
        """Makes the service known to probes."""
        self._services.add(name)

    def close(self) -> None:
        """Ends all watches after their last update, so that they do not hold up the server's stop."""
        self._is_closed = True
        for changed in self._watchers:
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        # Tells a supervisor loading and draining, which it must let be, from stalled, which it must end.
        context.set_trailing_metadata((("radixmesh-state", self._progress.state.value),))
        return _response(self._status_of(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        unsubscribe = self._progress.subscribe(lambda: _set_from_any_thread(loop, changed))
        self._watchers.add(changed)
        last: int | None = None
        try:
            while True:
                changed.clear()
                is_last = self._is_closed
                status = self._status_of(request.service)
                if status != last:
                    last = status
                    yield _response(status)
                if is_last:
                    return
                await _wait(changed, self.poll_s)
        finally:
            self._watchers.discard(changed)
            unsubscribe()

    def _status_of(self, service: str) -> int:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._progress.state is State.SERVING else _Status.NOT_SERVING


def _response(status: int) -> health_pb2.HealthCheckResponse:
    response = _Status()
    response.status = status
    return response


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return


def _set_from_any_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
