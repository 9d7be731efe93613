"""One HTTP connection: uvicorn's protocol, with bounds on what a client sends before it has a request, on how long it
takes for that, and on how long it reads nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools
from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from radixmesh.daemons.router.http.errors import ErrorResponse, plain_error
from radixmesh.daemons.router.http.server.head_limits import HeadLimits, HeadTooLarge
from radixmesh.daemons.router.http.server.write_progress import WriteProgress
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

# scope["extensions"][CONNECTION_EXTENSION] is the ConnectionHandle.
CONNECTION_EXTENSION = "radixmesh.connection"
MAX_PIPELINED = 16
# Bytes that wait in a connection for its client before writers do.
_WRITE_HIGH, _WRITE_LOW = 32 << 10, 16 << 10
# The parser is fed in pieces, so that what it keeps can be bounded in between.
_PIECE_BYTES = 16 << 10
# A client whose request is answered while it still sends may go on for so long: a connection that is closed with bytes
# unread is reset, and the answer is lost.
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20
# Of a connection without a request, once its server has retired.
_RETIRED_IDLE_S = 2.0


def _takes_nothing(data: bytes) -> bool:
    return False


@dataclass(slots=True, eq=False)
class ConnectionHandle:
    """A request's handle on its connection. cut(): ends it at once, whatever its client has not read yet.
    write_part(): a part of the body of an answer without a length, past the application's layers; False if the client
    takes no more for now. has_whole_body: all of the request's body is here; False where that is not sure. is_gone: the
    client has left. on_progress: called when the client has taken bytes while more wait. on_writable: called when it
    takes more again. on_gone: called when it leaves. All three are set by the request that is being answered."""

    cut: Callable[[], None]
    write_part: Callable[[bytes], bool]
    has_whole_body: bool = False
    is_gone: bool = False
    on_progress: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None
    on_gone: Callable[[], None] | None = None

    def progressed(self) -> None:
        if self.on_progress is not None:
            self.on_progress()

    def lost(self) -> None:
        """There is no client any more."""
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()


def connection_of(scope: Scope) -> ConnectionHandle:
    """The connection of a request in this server."""
    handle = scope["extensions"][CONNECTION_EXTENSION]
    assert isinstance(handle, ConnectionHandle)
    return handle


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectionLimits:
    """Of all connections of one server. head_s: from the first byte of a head to its end. idle_s: without a byte of a
    request. stall_s: without reading a byte of what is ready. waiting: connections without a request, oldest first.
    is_retiring: the next answer on each connection is its last. last_made: monotonic seconds of the latest one."""

    head_s: float
    idle_s: float
    stall_s: float
    max_connections: int
    is_retiring: bool = False
    last_made: float = float("-inf")
    waiting: dict[BoundedProtocol, None] = field(default_factory=dict)


class BoundedProtocol(HttpToolsProtocol):
    """States: waiting (no byte yet) -> in a head -> in a message -> answered -> waiting; or over: what still comes is
    thrown away."""

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(_WRITE_HIGH, _WRITE_LOW)
        self.limits.last_made = time.monotonic()
        self._head = HeadLimits()
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._is_in_message = False
        self._is_over = False
        self._num_discarded = 0
        self._handle = ConnectionHandle(transport.abort, self._write_part)
        self._writing = WriteProgress(transport, self.limits.stall_s, self._handle.progressed)
        if len(self.connections) > self.limits.max_connections and not self._make_room():
            self._is_over = True
            transport.write(_as_bytes(_all_taken(self.limits.max_connections)))
            transport.close()
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._writing.stop()
        self.limits.waiting.pop(self, None)
        super().connection_lost(exc)
        self._handle.lost()
        # The handle leads back here. A connection that waits for the garbage collector keeps its TLS session, which the
        # next one could resume without its certificate.
        self._handle.write_part = _takes_nothing

    def data_received(self, data: bytes) -> None:
        if self._is_over or (self._is_in_message and self.cycle.response_complete):
            self._num_discarded += len(data)
            if self._num_discarded > _LINGER_BYTES:
                self.transport.abort()
                return
        if self._is_over:
            return
        if self in self.limits.waiting and not self._is_in_head:
            self._start_head()
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserUpgrade:
            pass  # No other protocol is offered: the request is answered as if it had not asked.
        except (httptools.HttpParserError, HeadTooLarge) as error:
            self._refuse_for(error if isinstance(error, HeadTooLarge) else error.__context__)

    def _feed(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self.parser.feed_data(piece)
            self._head.fed(len(piece))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head.begin_head()
        if not self._is_in_head:
            self._start_head()

    def on_url(self, url: bytes) -> None:
        self._head.add_to_request_line(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.add_header(len(name) + len(value))
        # Trailers are no headers: the request is judged by its head.
        if not self._is_in_message:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _PipelineFull
        self._head.report()
        # A target that is no URL is the head's fault: the request never begins.
        httptools.parse_url(self.url).path.decode("ascii")
        self._is_in_head = False
        self._is_in_message = True
        self._num_discarded = 0
        self._stop_timer()
        self.limits.waiting.pop(self, None)
        self._handle.has_whole_body = False
        self.scope["extensions"] = {CONNECTION_EXTENSION: self._handle}  # type: ignore[dict-item]
        super().on_headers_complete()
        if self.limits.is_retiring:
            self.end_after_answer()

    def on_body(self, body: bytes) -> None:
        self._head.report()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head.report()
        self._is_in_message = False
        self._handle.has_whole_body = True
        super().on_message_complete()
        if self.cycle.response_complete:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's timer; ours also runs while a head arrives.
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._is_in_message:
            self._restart_timer(_LINGER_S, self.transport.close)
        elif not self._is_in_head:
            self._wait_for_request()

    def end_after_answer(self) -> None:
        """The answer under way is the last one, and says so. One that has begun cannot say it any more: its client may
        ask once more, which must not meet a closed connection, and is told then."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    def close_when_idle(self) -> None:
        """Closes soon unless a request comes: one that its client has just sent must not meet a closed connection."""
        if self in self.limits.waiting and not self._is_in_head:
            self._restart_timer(_RETIRED_IDLE_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing.start()

    def resume_writing(self) -> None:
        self._writing.stop()
        super().resume_writing()
        if self._handle.on_writable is not None:
            self._handle.on_writable()

    def _write_part(self, data: bytes) -> bool:
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self.flow.write_paused

    def _wait_for_request(self) -> None:
        self.limits.waiting[self] = None
        self._restart_timer(_RETIRED_IDLE_S if self.limits.is_retiring else self.limits.idle_s, self.transport.close)

    def _start_head(self) -> None:
        self._is_in_head = True
        self._restart_timer(self.limits.head_s, self._refuse_late_head)

    def _restart_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> bool:
        """Ends the connection that has been without a request for longest. False if all have one."""
        oldest = next(iter(self.limits.waiting), None)
        if oldest is None:
            return False
        del self.limits.waiting[oldest]
        oldest.transport.abort()
        return True

    def _refuse_late_head(self) -> None:
        message = f"the head of the request did not arrive within {self.limits.head_s:g} s: send it at once"
        self._refuse(plain_error(408, "HEAD_TOO_SLOW", message))

    def _refuse_for(self, error: BaseException | None) -> None:
        if isinstance(error, HeadTooLarge):
            self._refuse(plain_error(431, "HEAD_TOO_LARGE", str(error)))
        else:
            message = "this is no HTTP/1.1 that the router can read: look for a proxy or client that breaks requests"
            self._refuse(plain_error(400, "MALFORMED_MESSAGE", message))

    def _refuse(self, answer: Response) -> None:
        """Reads nothing more. Answers if it is this answer's turn, and closes."""
        self._is_over = True
        self._is_in_head = False
        self._stop_timer()
        cycle: RequestResponseCycle | None = self.cycle
        if self._is_in_message:  # Its body is broken off: nobody waits for the rest.
            assert cycle is not None
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
        elif cycle is not None and not cycle.response_complete:
            # Earlier requests are answered first; the connection ends with the last of them.
            cycle.keep_alive = False
            return
        self.transport.write(_as_bytes(answer))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._restart_timer(_LINGER_S, self.transport.abort)


class _PipelineFull(Exception):
    pass


def protocol_class(limits: ConnectionLimits) -> type[BoundedProtocol]:
    """uvicorn makes protocols itself: what they are to know is put into a class of their own."""
    return type("Protocol", (BoundedProtocol,), {"limits": limits})


def _all_taken(max_connections: int) -> Response:
    message = f"this router has {max_connections} connections: retry later or elsewhere"
    return ErrorResponse(MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message))


def _as_bytes(answer: Response) -> bytes:
    answer.headers["connection"] = "close"
    head = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
    return b"HTTP/1.1 %d Refused\r\n" % answer.status_code + head + b"\r\n" + bytes(answer.body)
