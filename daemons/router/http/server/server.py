"""The HTTP server in the router's event loop."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from radixmesh.daemons.router.http.server.connection import BoundedProtocol, ConnectionLimits, protocol_class
from radixmesh.daemons.router.http.server.handshakes import TlsListener
from radixmesh.daemons.router.http.server.tls import FollowedContext
from radixmesh.daemons.runtime.addresses import split_host_port

_BACKLOG = 4096
_CLOSE_GRACE_S = 1
_RECENT_S = 5.0


class HttpServer:
    """bind(), then serve() until stop().

    tls: None = plain HTTP.
    """

    def __init__(
        self, app: ASGIApp, address: str, *, limits: ConnectionLimits, tls: FollowedContext | None = None
    ) -> None:
        self._host, self._port = split_host_port(address)
        self._limits = limits
        config = uvicorn.Config(
            cast("uvicorn._types.ASGIApplication", app),
            http=protocol_class(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSE_GRACE_S,
        )
        config.load()
        self._server = _EmbeddedServer(config, tls)
        self._listener: socket.socket | None = None

    def bind(self) -> str:
        """Takes the port; the bound "host:port". Raises OSError if somebody has it."""
        _raise_file_limit()
        self._listener = _listen(self._host, self._port)
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def port(self) -> int:
        """The port that bind() got."""
        assert self._listener is not None, "bind() comes first"
        return int(self._listener.getsockname()[1])

    async def serve(self) -> None:
        """Runs until stop(). Call once, after bind()."""
        assert self._listener is not None, "bind() comes first"
        await self._server.serve([self._listener])

    @property
    def num_connections(self) -> int:
        """Clients that are connected."""
        return len(self._server.server_state.connections)

    @property
    def may_be_asked(self) -> bool:
        """A client is connected, or one was lately: a proxy that asks for /health counts."""
        return bool(self.num_connections) or time.monotonic() - self._limits.last_made < _RECENT_S

    def begin_retiring(self) -> None:
        """From now on the next answer on each connection is its last ("Connection: close")."""
        self._limits.is_retiring = True
        for connection in self._connections():
            connection.end_after_answer()

    def retire(self) -> None:
        """Takes no more connections, and closes those without a request soon. After begin_retiring()."""
        for listener in self._server.servers:
            listener.close()
        for connection in self._connections():
            connection.close_when_idle()

    def stop(self) -> None:
        """Takes no more connections, gives requests a moment, closes all: serve() returns then. Idempotent."""
        self._server.should_exit = True

    def _connections(self) -> list[BoundedProtocol]:
        return cast("list[BoundedProtocol]", list(self._server.server_state.connections))


class _EmbeddedServer(uvicorn.Server):
    """Signals are the daemon's, and so is TLS: uvicorn would read the files once."""

    def __init__(self, config: uvicorn.Config, tls: FollowedContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        assert sockets is not None
        listeners = [TlsListener(listener, self._make_protocol, self._tls) for listener in sockets]
        for listener in listeners:
            listener.start()
        self.servers = cast("list[asyncio.base_events.Server]", listeners)
        self.started = True

    def _make_protocol(self) -> asyncio.Protocol:
        protocol = cast("type[BoundedProtocol]", self.config.http_protocol_class)
        return protocol(self.config, self.server_state, {})


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
