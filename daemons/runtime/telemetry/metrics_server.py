"""Serves a daemon's metrics over HTTP, from one thread, within bounds: the port needs no key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from threading import Thread
from typing import cast
from urllib.parse import urlsplit

from prometheus_client import make_wsgi_app

from radixmesh.daemons.runtime.addresses import split_host_port
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

# A newcomer beyond these ends the oldest connection: a client that behaves is served within milliseconds.
MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 16 << 10
# From the accept to the last byte of the answer.
CONNECTION_S = 10.0
_BACKLOG = 128

_StartResponse = Callable[[str, list[tuple[str, str]]], object]
_Application = Callable[[dict[str, str], _StartResponse], Iterable[bytes]]


def serve_metrics(metrics: Metrics, address: str) -> MetricsServer:
    """Serves metrics over HTTP at "host:port" (0: any free port) from a thread, until closed.

    Raises MeshError INVALID_ARGUMENT for other text, OSError if the port is taken.
    """
    host, port = split_host_port(address)
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
    )
    return MetricsServer(metrics, listener)


class MetricsServer:
    """A running metrics endpoint: one request a connection."""

    def __init__(self, metrics: Metrics, listener: socket.socket) -> None:
        # Knows the formats that scrapers ask for.
        self._application = cast("_Application", make_wsgi_app(metrics.registry))
        self._listener = listener
        self._host, self._port = listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        # Oldest first.
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._thread = Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Bound "host:port"."""
        return f"{self._host}:{self._port}"

    def close(self) -> None:
        """Stops serving and frees the port. Idempotent."""
        with suppress(RuntimeError):  # The loop is closed: it was called before.
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=MAX_HEAD_BYTES)
        await self._stop.wait()
        server.close()
        for writer in tuple(self._connections):
            self._end(writer)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._end(next(iter(self._connections)))
        self._connections[writer] = self._loop.create_task(self._answer(reader, writer))

    def _end(self, writer: asyncio.StreamWriter) -> None:
        # A task that is cancelled before its first step does not run its own end.
        self._connections.pop(writer).cancel()
        writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECTION_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    answer = _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                else:
                    answer = self._answer_to(head.decode("latin-1"))
                writer.write(answer)
                await writer.drain()
                writer.write_eof()
                await reader.read()  # Until the client has closed: else what it still sends resets the answer.
        except (OSError, EOFError, TimeoutError):
            pass  # The client's doing.
        finally:
            self._connections.pop(writer, None)
            writer.transport.abort()

    def _answer_to(self, head: str) -> bytes:
        line, *headers = head.split("\r\n")
        method, _, target = line.partition(" ")
        if method not in ("GET", "HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            url = urlsplit(target.rpartition(" ")[0])
        except ValueError:
            return _plain(HTTPStatus.BAD_REQUEST)
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": url.path, "QUERY_STRING": url.query}
        for header in headers:
            name, _, value = header.partition(":")
            if name.lower() in ("accept", "accept-encoding"):
                environ["HTTP_" + name.upper().replace("-", "_")] = value.strip()
        told: list[tuple[str, list[tuple[str, str]]]] = []
        body = b"".join(self._application(environ, lambda status, fields: told.append((status, fields))))
        ((status, fields),) = told
        return _response(status, fields, body, with_body=method == "GET")


def _plain(status: HTTPStatus) -> bytes:
    return _response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain")], status.phrase.encode())


def _response(status: str, fields: list[tuple[str, str]], body: bytes, *, with_body: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in fields if name.lower() != "content-length"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body if with_body else b"")
