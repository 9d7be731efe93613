"""The session of a request, where its HTTP client names it in a header: proxies add those, and no body."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from radixmesh.daemons.router.requests.intake.resolver import MAX_NAME_BYTES
from radixmesh.router.v1 import router_pb2

SESSION_HEADERS = (b"x-session-id", b"x-smg-routing-key")
"""As vLLM's router and SGLang's gateway call it; the first that is there counts."""

# A context variable is per task, not global state: each handler sees its own.
_session: ContextVar[str] = ContextVar("radixmesh_session", default="")


def set_session(text: str) -> None:
    """Binds the session for the rest of the current task. One too long for a name is known by its digest."""
    is_long = len(text.encode()) > MAX_NAME_BYTES
    _session.set(hashlib.blake2b(text.encode(), digest_size=32).hexdigest() if is_long else text)


def bind_session(message: router_pb2.GenerateRequest) -> None:
    """Writes the bound session into a new request that names none itself."""
    if not message.session and not message.HasField("resume"):
        message.session = _session.get()


class SessionHeader:
    """An ASGI application before the application: binds a request's session to the task that handles it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = {name: value for name, value in scope["headers"] if name in SESSION_HEADERS and value}
            if found:
                set_session(next(found[name] for name in SESSION_HEADERS if name in found).decode("latin-1"))
        await self._app(scope, receive, send)
