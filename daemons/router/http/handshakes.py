"""TLS connections from their accept to the end of their handshake, bounded in number and time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from radixmesh.daemons.router.http.tls import FollowedContext
from radixmesh.daemons.runtime.logs import get_logger

log = get_logger(__name__)

# A handshake costs about 75 KB of memory and, alive, some milliseconds.
MAX_HANDSHAKES = 512
HANDSHAKE_S = 10.0
# The oldest handshake gives way to a newcomer once it is so old: younger ones may be alive on a busy machine.
_YIELDING_AGE_S = 2.0
_PAUSE_S = 0.05


class TlsListener:
    """Accepts connections, and hands those that get through their handshake to a protocol each. While there are
    MAX_HANDSHAKES, newcomers wait in the kernel's backlog. close() and wait_closed() as of asyncio's Server."""

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], tls: FollowedContext
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._accepting: asyncio.Task[None] | None = None
        # Handshake -> when it began, oldest first.
        self._handshakes: dict[asyncio.Task[None], float] = {}
        self._has_room = asyncio.Event()

    @property
    def num_handshakes(self) -> int:
        return len(self._handshakes)

    def start(self) -> None:
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accepts no more; handshakes go on. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
            self._listener.close()

    async def wait_closed(self) -> None:
        """Ends what is left of handshakes. After close()."""
        handshakes = tuple(self._handshakes)
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_room()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # No file left, or a client that was gone before it was accepted.
                log.warning("accept_failed", error=str(error))
                await asyncio.sleep(_PAUSE_S)
                continue
            handshake = loop.create_task(self._shake_hands(connection))
            self._handshakes[handshake] = loop.time()
            handshake.add_done_callback(self._on_done)

    async def _wait_for_room(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._handshakes) >= MAX_HANDSHAKES:
            oldest, began_at = next(iter(self._handshakes.items()))
            yields_in = began_at + _YIELDING_AGE_S - loop.time()
            if yields_in <= 0:
                oldest.cancel()
                del self._handshakes[oldest]
                return
            self._has_room.clear()
            try:
                async with asyncio.timeout(yields_in):
                    await self._has_room.wait()
            except TimeoutError:
                pass

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
        self._has_room.set()
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            log.error("handshake_failed", error=repr(error))
