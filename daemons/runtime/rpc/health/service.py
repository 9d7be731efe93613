"""The health service over a daemon's progress: a real Watch, and no probe that ever causes work.

Only SERVING answers SERVING; LOADING, STALLED and DRAINING answer NOT_SERVING (the states: progress.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress, State
from radixmesh.daemons.runtime.rpc.health.watches import HealthWatches

__all__ = ["HealthService", "Progress", "State"]

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
_Status = health_pb2.HealthCheckResponse
_MAX_REQUEST_BYTES = 1_024
_SHOWN_CHARS = 128


class HealthService(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 over one Progress: all services of a daemon share its state.

    Watch speaks first with the current status, then once per change; it ends with OK when the server closes. A slow
    reader misses intermediate states, never the last one. Both verbs need no API key: what they cost is bounded here.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._services: set[str] = {""}
        self._is_closed = False
        self.watches = HealthWatches(progress)

    def add_service(self, name: str) -> None:
        """Makes the service known to probes."""
        self._services.add(name)

    def close(self) -> None:
        """Ends all watches after their last update, so that they do not hold up the server's stop."""
        self._is_closed = True
        self.watches.notify()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:_SHOWN_CHARS]!r} here")
        # Tells a supervisor loading and draining, which it must let be, from stalled, which it must end.
        context.set_trailing_metadata((("radixmesh-state", self._progress.state.value),))
        return _response(self._status_of(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        # A watch keeps its request for as long as it lasts, fields that nobody knows included.
        if (num_bytes := request.ByteSize()) > _MAX_REQUEST_BYTES:
            message = f"the request has {num_bytes} bytes, a service's name at most {_MAX_REQUEST_BYTES}"
            raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"max_bytes": str(_MAX_REQUEST_BYTES)})
        changed = self.watches.open(context.peer())
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
                await changed.wait()
        finally:
            self.watches.close(changed)

    def _status_of(self, service: str) -> int:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._progress.state is State.SERVING else _Status.NOT_SERVING


def _response(status: int) -> health_pb2.HealthCheckResponse:
    response = _Status()
    response.status = status
    return response
