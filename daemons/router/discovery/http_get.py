"""A GET request over HTTP/1.1, for APIs of engines: to a unix socket, or over TCP with TLS or without.

The parser is h11. A response is read in pieces as they come, for answers that never end.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11

from radixmesh.daemons.router.discovery.source import SourceError

_CONNECT_S = 5.0
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of an API: a unix socket's path, or host and port. tls: None = plain."""

    host: str = "localhost"
    port: int = 80
    unix_path: str = ""
    tls: ssl.SSLContext | None = None


class Response:
    """status: of HTTP. Reading takes at most idle_s between two pieces."""

    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader, idle_s: float) -> None:
        self.status = 0
        self._connection = connection
        self._reader = reader
        self._idle_s = idle_s

    async def begin(self) -> None:
        """Reads the head."""
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        if not isinstance(event, h11.Response):
            raise SourceError("the API's answer is no HTTP response")
        self.status = event.status_code

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                return

    async def whole(self, max_bytes: int) -> bytes:
        """The body to its end. Raises SourceError beyond max_bytes."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > max_bytes:
                raise SourceError(f"the API's answer has more than {max_bytes} bytes")
        return bytes(body)

    async def lines(self, max_bytes: int) -> AsyncIterator[bytes]:
        """The body's lines, as they come. Raises SourceError for one beyond max_bytes."""
        rest = bytearray()
        async for piece in self.pieces():
            rest += piece
            while (end := rest.find(b"\n")) >= 0:
                line = bytes(rest[:end])
                del rest[: end + 1]
                if line.strip():
                    yield line
            if len(rest) > max_bytes:
                raise SourceError(f"a line of the API's answer has more than {max_bytes} bytes")

    async def _next(self) -> object:
        try:
            while True:
                event = self._connection.next_event()
                if not isinstance(event, type) or event is h11.PAUSED:
                    return event
                async with asyncio.timeout(self._idle_s):
                    self._connection.receive_data(await self._reader.read(_PIECE))
        except h11.RemoteProtocolError as error:
            raise SourceError(f"the API speaks no HTTP: {error}") from None
        except TimeoutError:
            raise SourceError(f"the API said nothing for {self._idle_s:g} s") from None


@asynccontextmanager
async def get(
    endpoint: Endpoint, target: str, headers: Mapping[str, str], *, idle_s: float = 10.0
) -> AsyncIterator[Response]:
    """The response to GET target. Raises OSError or SourceError where there is none."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            if endpoint.unix_path:
                reader, writer = await asyncio.open_unix_connection(endpoint.unix_path)
            else:
                reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.tls)
    except TimeoutError:
        raise SourceError(f"no connection within {_CONNECT_S:g} s") from None
    try:
        connection = h11.Connection(our_role=h11.CLIENT)
        sent = [("host", endpoint.host), ("connection", "close"), ("accept", "application/json"), *headers.items()]
        writer.write(connection.send(h11.Request(method="GET", target=target, headers=sent)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        response = Response(connection, reader, idle_s)
        await response.begin()
        yield response
    finally:
        writer.close()
