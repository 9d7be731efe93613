"""A least pace of request bodies."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixmesh.daemons.router.http.bodies.body import UnreadBody
from radixmesh.daemons.router.http.server.connection import connection_of
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

# Before the pace counts: the start of a connection is slow.
GRACE_S = 5.0


class BodyPace:
    """An ASGI application before the application: reading a body that comes more slowly than min_rate (bytes a second,
    after the first GRACE_S) raises UnreadBody DEADLINE_EXCEEDED. Only time spent in waiting for the client counts."""

    def __init__(self, app: ASGIApp, min_rate: int) -> None:
        self._app = app
        self._min_rate = min_rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not connection_of(scope).has_whole_body:
            receive = _PacedBody(receive, self._min_rate).receive
        await self._app(scope, receive, send)


class _PacedBody:
    def __init__(self, receive: Receive, min_rate: int) -> None:
        self._receive = receive
        self._min_rate = min_rate
        self._left_s = GRACE_S
        self._is_arriving = True

    async def receive(self) -> Message:
        if not self._is_arriving:
            return await self._receive()
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            self._is_arriving = False
            raise self._too_slow() from None
        self._left_s += len(message.get("body", b"")) / self._min_rate - (loop.time() - start)
        self._is_arriving = bool(message.get("more_body", False))
        return message

    def _too_slow(self) -> MeshError:
        message = f"the body arrived at less than {self._min_rate} bytes a second: send it at once"
        return UnreadBody(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message)
