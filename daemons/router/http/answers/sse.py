"""Server-sent events: a request's deltas as `data:` lines, written as fast as the client takes them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixmesh.daemons.router.http.answers.request_group import GroupMessage, RequestGroup
from radixmesh.daemons.router.http.bodies.body import ClientGone
from radixmesh.daemons.router.http.bodies.json_text import dump, split_at
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.errors import error_body
from radixmesh.daemons.router.http.request_types.constraints import named_by
from radixmesh.daemons.router.http.server.client_watch import ClientWatch
from radixmesh.daemons.router.http.server.connection import ConnectionHandle, connection_of
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Update
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2

# Until then a request that fails before its first output is answered with the error's own status; after it the client
# sees that it is being served, and would be told of a failure by an event.
_HEADERS_AFTER_S = 5.0


class EventWriter(ABC):
    """Puts the messages of one HTTP request into the words of one API. Used once.

    media_type: of its stream. done: written behind all events of a stream that is complete.
    """

    media_type: ClassVar[str] = "text/event-stream"
    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    @abstractmethod
    async def prepare(self, resolved: ResolvedRequest) -> None:
        """Before all else, with what the first prompt was resolved to. Raises MeshError."""

    @abstractmethod
    def begin(self) -> bytes:
        """Events before any output; may be empty."""

    @abstractmethod
    def write(self, prompt_index: int, update: Update) -> bytes:
        """Events for news of the prompt at `prompt_index`; none for its resolved request, which comes first. Raises the
        MeshError of a failed output."""

    @abstractmethod
    def end(self) -> bytes:
        """Events after all output; may be empty."""

    def failed(self, error: MeshError, path: str) -> bytes:
        """The event of an error that comes after the first output; path: of the request."""
        return event(error_body(error, path))


class EventStream(Response):
    """Runs the requests while it is sent, and ends them when the client leaves."""

    def __init__(
        self,
        context: HttpContext,
        requests: Sequence[router_pb2.GenerateRequest],
        writer: EventWriter,
        headers: Mapping[str, str],
        *,
        constrained_by: str = "",
    ) -> None:
        """constrained_by: the field that brought the requests' grammar, empty if the path alone tells its name."""
        quick = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        # Not Response's own, which gives an answer a length.
        self.status_code, self.media_type, self.background = 200, writer.media_type, None
        self.init_headers({**headers, **quick})
        self._context = context
        self._requests = requests
        self._writer = writer
        self._constrained_by = constrained_by
        self._is_started = False
        self._path = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        group: RequestGroup | None = None
        self._path = scope["path"]
        connection = connection_of(scope)
        try:
            async with ClientWatch(connection) as watch:
                group = RequestGroup(self._context.router, self._requests, watch.interrupt)
                connection.on_progress = group.progressed
                connection.on_writable = group.resume
                running = self._run(group, send, connection)
                if not group.is_single:
                    # A task of its own: every event would otherwise be resumed through the server's and the framework's
                    # coroutines (a sixth of the router's time at 40,000 tokens/s).
                    await asyncio.create_task(running)
                else:
                    await running
        except ClientGone:
            if not self._is_started:
                raise
            if group is not None and group.error() is not None:
                await _cut(connection, receive)
        finally:
            connection.on_progress = connection.on_writable = None
            if group is not None:
                group.close()

    async def _run(self, group: RequestGroup, send: Send, connection: ConnectionHandle) -> None:
        item = await self._first_news(group)
        await self._send_all(group, item, send, connection)

    async def _first_news(self, group: RequestGroup) -> GroupMessage | None:
        """The first message that is no resolved request, None if that takes long."""
        with named_by(self._constrained_by):
            first = await group.next()
        assert first is not None and first[1].resolved is not None, "a stream begins with its resolved request"
        await self._writer.prepare(first[1].resolved)
        self._writer.write(*first)
        try:
            async with asyncio.timeout(_HEADERS_AFTER_S):
                while (item := await group.next()) is not None and item[1].resolved is not None:
                    self._writer.write(*item)
                return item
        except TimeoutError:
            return None

    async def _send_all(
        self, group: RequestGroup, item: GroupMessage | None, send: Send, connection: ConnectionHandle
    ) -> None:
        events, last = self._writer.begin(), b""
        num_open = _num_outputs(self._requests[0])
        try:
            if item is not None:
                events += self._writer.write(*item)
                num_open -= len(item[1].finished)
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if events:
                await send(_part(events))
            if group.is_single:
                sink = _Sink(self._writer, connection, num_open)
                await group.push(sink)
                last = sink.last
            while (item := await group.next()) is not None:
                events = self._writer.write(*item)
                if events:
                    # Returns when the connection lets it: meanwhile what comes up merges into the next message.
                    await send(_part(events))
            events = last + self._writer.end() + self._writer.done
        except MeshError as error:
            if not self._is_started:
                raise
            # Without what ends a whole stream: a client that reads no error events sees that it is cut short.
            self._context.metrics.count_error(error)
            events = self._writer.failed(error, self._path)
        await send({"type": "http.response.body", "body": events, "more_body": False})


def event_around(value: object, mark: str) -> tuple[bytes, bytes]:
    """One event of a JSON value that holds the text `mark` once: write any JSON between the two."""
    before, after = split_at(value, mark)
    return b"data: " + before, after + b"\n\n"


def event(value: object) -> bytes:
    """One event of a JSON value."""
    return b"data: " + dump(value) + b"\n\n"


class _Sink:
    """Events of a single request, straight to its connection: the hot path, once per stream and frame.

    num_open: outputs whose finish is still to come. last: events of the update with the last finish, which are written
    with the end of the stream: a client reads once, and the router writes once.
    """

    def __init__(self, writer: EventWriter, connection: ConnectionHandle, num_open: int) -> None:
        self._write = writer.write
        self._write_part = connection.write_part
        self._num_open = num_open
        self.last = b""

    def __call__(self, update: Update) -> bool:
        events = self._write(0, update)
        if update.finished:
            self._num_open -= len(update.finished)
            if not self._num_open:
                self.last = events
                return True
        return self._write_part(events) if events else True


def _num_outputs(request: router_pb2.GenerateRequest) -> int:
    return request.n if request.HasField("n") else 1


def _part(events: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": events, "more_body": True}


async def _cut(connection: ConnectionHandle, receive: Receive) -> None:
    """Drops a client that reads nothing: an error event would never reach it."""
    connection.cut()
    while (await receive())["type"] != "http.disconnect":
        pass
