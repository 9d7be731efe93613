"""A unix socket between a scheduler and a worker that share a thread."""

from __future__ import annotations

import socket
import struct
from types import TracebackType

_BUFFER_BYTES = 1 << 22
_READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


class StepSocket:
    """One direction of a step stream: messages with their lengths before them. A context manager.

    Nobody waits: what the kernel's buffer does not take is taken out at the other end before the next piece goes in.
    """

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (self._near, self._far):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def __enter__(self) -> StepSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._near.close()
        self._far.close()

    def write(self, message: bytes) -> None:
        """Sends as much as the kernel takes now; read() sees to the rest."""
        self._unsent = memoryview(_LENGTH.pack(len(message)) + message)
        self._push()

    def read(self) -> bytes:
        """The message that was written last."""
        received = self._received
        while True:
            if len(received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
                if len(received) >= end:
                    message = bytes(received[_LENGTH.size : end])
                    del received[:end]
                    return message
            if len(self._unsent):
                self._push()
            received += self._far.recv(_READ_BYTES)

    def _push(self) -> None:
        try:
            while len(self._unsent):
                self._unsent = self._unsent[self._near.send(self._unsent) :]
        except BlockingIOError:
            return
