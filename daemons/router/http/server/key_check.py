"""API keys at the HTTP server: a request is refused before anything of it but its head is read."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from radixmesh.daemons.router.http.errors import Linger, RefusedBody
from radixmesh.daemons.router.http.openapi import ADMIN_PATHS, LIMITED_PATHS, is_open
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.caller import set_caller
from radixmesh.daemons.runtime.security.key_guard import KeyGuard
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

# Bound of a body that nobody wants and that is still read before the connection is cut off.
_LINGER = Linger(seconds=1.0, max_bytes=1 << 20)


# Set in the scope of a request that came without a key to a path that shows less then.
_ANONYMOUS = "radixmesh.is_anonymous"


def is_anonymous(scope: Scope) -> bool:
    """True if a key is asked for, and the request has none: show what /health shows."""
    return bool(scope.get(_ANONYMOUS, False))


class KeyCheck:
    """An ASGI application before the application."""

    def __init__(self, app: ASGIApp, guard: KeyGuard, metrics: Metrics) -> None:
        self._app = app
        self._guard = guard
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            authorization = _authorization_in(scope)
            if authorization is None and scope["path"] in LIMITED_PATHS:
                scope[_ANONYMOUS] = True
                await self._app(scope, receive, send)
                return
            try:
                set_caller(self._guard.check(authorization, scope["path"], is_admin=scope["path"] in ADMIN_PATHS))
            except MeshError as error:
                self._metrics.count_error(error)
                await RefusedBody(error, _LINGER, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization_in(scope: Scope) -> str | None:
    """The value of the header authorization; x-api-key, by which Anthropic's clients send theirs, as a bearer's."""
    own: str | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value.decode("latin-1"))
        if name == b"x-api-key":
            own = f"Bearer {value.decode('latin-1')}"
    return own
