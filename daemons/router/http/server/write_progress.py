"""Progress of a client that reads: bytes of ours that its machine has acknowledged."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

# struct tcp_info of Linux: 8 bytes, 24 numbers of 32 bits, two of 64, then tcpi_bytes_acked.
_BYTES_ACKED_AT = 8 + 24 * 4 + 2 * 8
_BYTES_ACKED = struct.Struct("Q")
# Checks for a stall within the time after which it is one.
_LOOKS = 8


class WriteProgress:
    """Watches a connection while more is to be written than it takes.

    stall_s: a client that takes no byte for so long is cut off. on_progress: called when it has taken some.
    """

    def __init__(self, transport: asyncio.Transport, stall_s: float, on_progress: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._stall_s = stall_s
        self._on_progress = on_progress
        self._timer: asyncio.TimerHandle | None = None
        self._taken = 0
        self._taken_at = 0.0

    def start(self) -> None:
        """The connection takes no more for now. Idempotent."""
        if self._timer is None:
            self._taken = _bytes_taken(self._transport)
            self._taken_at = self._loop.time()
            self._wait()

    def stop(self) -> None:
        """It takes more again, or is gone. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._stall_s / _LOOKS, self._look)

    def _look(self) -> None:
        taken, now = _bytes_taken(self._transport), self._loop.time()
        if taken != self._taken:
            self._taken, self._taken_at = taken, now
            self._on_progress()
        elif now - self._taken_at >= self._stall_s:
            self._timer = None
            self._transport.abort()
            return
        self._wait()


def _bytes_taken(transport: asyncio.Transport) -> int:
    """A number that changes when the client takes bytes.

    The buffer of the transport alone would not do: the kernel's is up to 4 MB larger, and lets the transport write only
    when a third of it is free again, which takes a slow reader minutes.
    """
    connection = transport.get_extra_info("socket")
    if hasattr(socket, "TCP_INFO") and connection is not None:
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_AT + _BYTES_ACKED.size)
        except OSError:
            info = b""
        if len(info) == _BYTES_ACKED_AT + _BYTES_ACKED.size:
            return int(_BYTES_ACKED.unpack_from(info, _BYTES_ACKED_AT)[0])
    return transport.get_write_buffer_size()
