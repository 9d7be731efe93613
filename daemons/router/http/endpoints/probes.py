"""/health and /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.runtime.rpc.health.progress import State


class HealthEndpoint:
    """GET: 200 while this router serves, else 503: the same as gRPC health. Runs no forward pass."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        state = self._context.progress.state
        return JSONResponse({"status": state.value}, 200 if state is State.SERVING else 503)


class MetricsEndpoint:
    """GET: the router's metrics in Prometheus' text format."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        return Response(generate_latest(self._context.metrics.registry), media_type=CONTENT_TYPE_LATEST)
