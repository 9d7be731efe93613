"""The session of an HTTP request, from its header to the task that handles it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from radixmesh.daemons.router.requests.sessions import SESSION_HEADERS, set_session


class SessionHeader:
    """An ASGI application before the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = {name: value for name, value in scope["headers"] if name in SESSION_HEADERS and value}
            if found:
                set_session(next(found[name] for name in SESSION_HEADERS if name in found).decode("latin-1"))
        await self._app(scope, receive, send)
