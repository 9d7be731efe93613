"""The trace that an HTTP request belongs to, from its header to the task that handles it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from radixmesh.daemons.runtime.telemetry.tracing import TRACEPARENT, is_traceparent, set_context

_HEADER = TRACEPARENT.encode()


class TraceHeader:
    """An ASGI application before the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == _HEADER and is_traceparent(value.decode("latin-1")):
                    set_context(value.decode("latin-1"))
        await self._app(scope, receive, send)
