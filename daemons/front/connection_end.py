"""One side of a connection that is handed on: what one side gets, the other writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class ConnectionEnd(asyncio.Protocol):
    """join() ties two ends. What one says before (a gRPC server speaks first, at once) is kept: one read of it, then it
    is paused. An end that cannot write stops the other's reading, so that nothing piles up here.

    on_made, on_lost: told when the connection is there, and once when it is gone.
    """

    def __init__(self, *, on_lost: Callable[[], object], on_made: Callable[[], object] | None = None) -> None:
        self._on_lost = on_lost
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._other: ConnectionEnd | None = None
        self._is_at_end = False
        self._early: list[bytes] = []
        self.is_closed = False

    def join(self, other: ConnectionEnd) -> None:
        """Ties both, and lets them speak."""
        if self.is_closed or other.is_closed:
            self.close()
            other.close()
            return
        self._other, other._other = other, self
        for end in (self, other):
            end._say_early()
            end.resume()

    def pause(self) -> None:
        """Reads no more until resume()."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection once what was written to it is out. Idempotent."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._on_made is not None:
            self._on_made()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            # Pausing in connection_made() would do nothing: uvloop starts to read right after it.
            self._early.append(data)
            self.pause()
            return
        assert self._other._transport is not None
        self._other._transport.write(data)

    def eof_received(self) -> bool:
        """A side that has said all it wants still hears the other out."""
        self._is_at_end = True
        other = self._other
        if other is None:
            return True  # It may still hear an answer.
        if other._is_at_end or other._transport is None or other._transport.is_closing():
            return False  # Closes this end, and with it the other.
        other._transport.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self._other is not None:
            self._other.close()
        self._on_lost()

    def _say_early(self) -> None:
        assert self._other is not None and self._other._transport is not None
        self._other._transport.writelines(self._early)
        self._early.clear()
        if self._is_at_end and not self._other._transport.is_closing():
            self._other._transport.write_eof()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.pause()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.resume()
