"""Gives the workers the grammars that requests wait for, while steps go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.group.group_stream import GroupStream
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.queue.grammars import Grammar

log = get_logger(__name__)

# Of one grammar: the first one has the worker load its library.
_TIMEOUT_S = 60.0
_AGAIN_S = 0.2


class GrammarPuts:
    """Of one epoch. changed: called when requests were unparked, or have failed."""

    def __init__(self, planner: Planner, stream: GroupStream, changed: Callable[[], None]) -> None:
        self._planner = planner
        self._stream = stream
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, grammars: Iterable[Grammar]) -> None:
        for grammar in grammars:
            task = asyncio.create_task(self._put(grammar))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """The epoch is over: what its workers had counts no more."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _put(self, grammar: Grammar) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._stream.put_blob(grammar.hash, grammar.data)
        except (MeshError, TimeoutError) as error:
            if isinstance(error, MeshError) and _is_final(error):
                self._planner.grammar_failed(grammar.hash, error)
            else:
                # A rank that is lost ends the epoch; one that has no room has it when slots are released.
                log.info("grammar_not_put", hash=grammar.hash, error=str(error) or "timeout")
                await asyncio.sleep(_AGAIN_S)
                self._planner.grammars.want(grammar)
        else:
            self._planner.grammars.ready(grammar.hash)
        self._changed()


def _is_final(error: MeshError) -> bool:
    """True for what a worker says of the grammar itself: asking again does not help."""
    is_too_large = error.reason == ErrorReason.ERROR_REASON_BLOB_TOO_LARGE
    return is_too_large or error.status in ("INVALID_ARGUMENT", "UNIMPLEMENTED")
