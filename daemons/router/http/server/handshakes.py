"""TLS connections from their accept to the end of their handshake, bounded in number and time."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from radixmesh.daemons.router.http.server.tls import FollowedContext
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

# A handshake costs about 75 KB of memory and, alive, some milliseconds.
MAX_HANDSHAKES = 512
# From the accept to a hello, and from there to the handshake's end.
HANDSHAKE_S = 10.0
# A connection that has not sent its hello costs a socket: beyond so many the oldest gives way at once.
MAX_SILENT = 2048
# The shortest hello is longer: until then the kernel says nothing.
_HELLO_BYTES = 48
# The oldest handshake gives way to the next once it is so old: younger ones may be alive on a busy machine.
_YIELDING_AGE_S = 2.0
_PAUSE_S = 0.05


class TlsListener:
    """Accepts connections, and hands those that get through their handshake to a protocol each.

    accepted -> silent (no hello yet) -> ready (for one of MAX_HANDSHAKES) -> in its handshake -> the protocol's.
    close() and wait_closed() as of asyncio's Server.
    """

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: FollowedContext
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._tasks: list[asyncio.Task[None]] = []
        # All oldest first. Silent connection -> its end, handshake -> when it began.
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._ready: deque[socket.socket] = deque()
        self._handshakes: dict[asyncio.Task[None], float] = {}
        self._has_changed = asyncio.Event()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept()), loop.create_task(self._begin_handshakes())]

    def close(self) -> None:
        """Accepts no more, and ends what has no handshake yet; handshakes go on. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._listener.close()
        for connection in tuple(self._silent):
            self._end_silent(connection)
        while self._ready:
            self._ready.popleft().close()

    async def wait_closed(self) -> None:
        """Ends what is left of handshakes. After close()."""
        handshakes = tuple(self._handshakes)
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _HELLO_BYTES)
            except OSError as error:  # No file left, or a client that was gone before it was accepted.
                log.warning("accept_failed", error=str(error))
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._silent) + len(self._ready) >= MAX_SILENT:
                if self._silent:
                    self._end_silent(next(iter(self._silent)))
                else:
                    self._ready.popleft().close()
            self._silent[connection] = loop.call_later(HANDSHAKE_S, self._end_silent, connection)
            loop.add_reader(connection, self._on_hello, connection)

    def _end_silent(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        self._silent.pop(connection).cancel()
        connection.close()

    def _on_hello(self, connection: socket.socket) -> None:
        """It has sent enough, or has left."""
        asyncio.get_running_loop().remove_reader(connection)
        self._silent.pop(connection).cancel()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._ready.append(connection)
        self._has_changed.set()

    async def _begin_handshakes(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._has_changed.clear()
            oldest = next(iter(self._handshakes), None)
            yields_in: float | None = None
            if self._ready and oldest is not None and len(self._handshakes) >= MAX_HANDSHAKES:
                yields_in = self._handshakes[oldest] + _YIELDING_AGE_S - loop.time()
                if yields_in <= 0:
                    oldest.cancel()
                    del self._handshakes[oldest]
            if self._ready and len(self._handshakes) < MAX_HANDSHAKES:
                handshake = loop.create_task(self._shake_hands(self._ready.popleft()))
                self._handshakes[handshake] = loop.time()
                handshake.add_done_callback(self._on_done)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(yields_in):
                    await self._has_changed.wait()

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls.current(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # Of the client: no TLS, no certificate, too slow, gone.
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    def _on_done(self, handshake: asyncio.Task[None]) -> None:
        self._handshakes.pop(handshake, None)
        self._has_changed.set()
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            log.error("handshake_failed", error=repr(error))
