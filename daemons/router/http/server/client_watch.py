"""The client's connection, watched while a request runs for it: the work ends when the client leaves or stalls."""

from __future__ import annotations

import asyncio
from types import TracebackType

from radixmesh.daemons.router.http.bodies.body import ClientGone
from radixmesh.daemons.router.http.server.connection import ConnectionHandle


class ClientWatch:
    """`async with`: what runs in the block is cancelled when the client closes its side, and ClientGone is raised.

    A half-closed connection counts as closed: who will not send any more cannot be told from who has left.
    """

    def __init__(self, connection: ConnectionHandle) -> None:
        self._connection = connection
        self._task: asyncio.Task[object] | None = None
        self._is_interrupted = False

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.current_task()
        self._connection.on_gone = self.interrupt
        if self._connection.is_gone:
            self.interrupt()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._connection.on_gone = None
        if self._is_interrupted and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise ClientGone from None

    def interrupt(self) -> None:
        """Cancels what runs in the block: the client has left, or reads nothing."""
        if self._task is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()
