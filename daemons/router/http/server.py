"""The HTTP server in the router's event loop: uvicorn's protocol, with bounds on clients that do nothing."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.errors import ErrorResponse
from radixmesh.daemons.router.http.tls import FollowedContext
from radixmesh.daemons.runtime.addresses import split_host_port
from radixmesh.daemons.runtime.errors import MeshError

# scope["extensions"][CUT_EXTENSION]["cut"]() ends the connection at once, whatever its client has not read yet.
CUT_EXTENSION = "radixmesh.cut"
_BACKLOG = 4096
_CLOSE_GRACE_S = 1
# Bytes that wait in a connection for its client before writers do.
_WRITE_HIGH, _WRITE_LOW = 32 << 10, 16 << 10


class HttpServer:
    """bind(), then serve() until stop().

    idle_s: how long a connection may be without a request, or with half of one's head. stall_s: how long a client may
    read nothing of what is ready for it. max_connections: further ones are refused. tls: None = plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        address: str,
        *,
        idle_s: float,
        stall_s: float,
        max_connections: int,
        tls: FollowedContext | None = None,
    ) -> None:
        self._host, self._port = split_host_port(address)
        config = uvicorn.Config(
            cast("uvicorn._types.ASGIApplication", app),
            http=_protocol_class(idle_s, stall_s, max_connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(idle_s) or 1,
            timeout_graceful_shutdown=_CLOSE_GRACE_S,
        )
        config.load()
        # uvicorn would read the files itself, once.
        config.ssl = tls.context if tls is not None else None
        self._server = _EmbeddedServer(config)
        self._listener: socket.socket | None = None

    def bind(self) -> str:
        """Takes the port; the bound "host:port". Raises OSError if somebody has it."""
        _raise_file_limit()
        self._listener = _listen(self._host, self._port)
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    async def serve(self) -> None:
        """Runs until stop(). Call once, after bind()."""
        assert self._listener is not None, "bind() comes first"
        await self._server.serve([self._listener])

    def retire(self) -> None:
        """Takes no more connections and closes each after the answer that it is giving. Before stop()."""
        for listener in self._server.servers:
            listener.close()
        for connection in tuple(self._server.server_state.connections):
            connection.shutdown()

    def stop(self) -> None:
        """Takes no more connections, gives requests a moment, closes all: serve() returns then. Idempotent."""
        self._server.should_exit = True


class _EmbeddedServer(uvicorn.Server):
    """Signals are the daemon's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed when its client sends no whole head, or reads nothing, for too long."""

    idle_s: float
    stall_s: float
    max_connections: int

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(_WRITE_HIGH, _WRITE_LOW)
        if len(self.connections) > self.max_connections:
            transport.write(_refusal(self.max_connections))
            transport.close()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self.scope["extensions"] = {CUT_EXTENSION: {"cut": self.transport.abort}}
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.idle_s, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _protocol_class(idle_s: float, stall_s: float, max_connections: int) -> type[BoundedProtocol]:
    """uvicorn makes protocols itself: what they are to know is put into a class of their own."""
    bounds = {"idle_s": idle_s, "stall_s": stall_s, "max_connections": max_connections}
    return type("Protocol", (BoundedProtocol,), bounds)


def _refusal(max_connections: int) -> bytes:
    message = f"this router has {max_connections} connections: retry later or elsewhere"
    answer = ErrorResponse(MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message))
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"content-length: {len(answer.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + bytes(answer.body)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _raise_file_limit() -> None:
    """Every connection is a file: as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
