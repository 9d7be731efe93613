"""The client's connection, watched while a request runs for it: the work ends when the client leaves or stalls."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from radixmesh.daemons.router.http.bodies.body import ClientGone


class ClientWatch:
    """`async with`: what runs in the block is cancelled when the client closes its side, and ClientGone is raised.

    A half-closed connection counts as closed: who will not send any more cannot be told from who has left.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_interrupted = False

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.current_task()
        self._watcher = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._watcher is not None
        assert self._task is not None
        self._watcher.cancel()
        if self._is_interrupted and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise ClientGone from None

    def interrupt(self) -> None:
        """Cancels what runs in the block: the client reads nothing."""
        if self._task is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt()
