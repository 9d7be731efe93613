"""Bounds on the head of an HTTP request, counted while it arrives."""

from __future__ import annotations

MAX_HEAD_BYTES = 64 << 10
MAX_REQUEST_LINE_BYTES = 8 << 10
MAX_HEADERS = 100


class HeadTooLarge(Exception):
    """The message says which bound was passed, and what to do."""


class HeadLimits:
    """Counts the head of one request after the other, on one connection.

    The parser reports a header when it is whole and keeps what is not, so two things are counted: what it has reported
    of this head (trailers count with the head that they follow), and the bytes it was fed since it last reported the
    end of a head, a part of a body or the end of a message.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_headers = 0
        self._num_unreported = 0
        self._has_reported = False

    def begin_head(self) -> None:
        self._num_bytes = self._num_headers = 0

    def add_to_request_line(self, num_bytes: int) -> None:
        """Raises HeadTooLarge."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_REQUEST_LINE_BYTES:
            raise HeadTooLarge(f"the request line is longer than {MAX_REQUEST_LINE_BYTES} bytes: shorten the path")

    def add_header(self, num_bytes: int) -> None:
        """Raises HeadTooLarge."""
        self._num_bytes += num_bytes
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise HeadTooLarge(f"the request has more than {MAX_HEADERS} headers: send fewer")
        if self._num_bytes > MAX_HEAD_BYTES:
            raise _too_many_bytes()

    def report(self) -> None:
        """The parser has reported something that it keeps no part of."""
        self._has_reported = True

    def fed(self, num_bytes: int) -> None:
        """The parser was fed so many bytes. Raises HeadTooLarge if it keeps more than a head may have."""
        self._num_unreported = 0 if self._has_reported else self._num_unreported + num_bytes
        self._has_reported = False
        if self._num_unreported > MAX_HEAD_BYTES:
            raise _too_many_bytes()


def _too_many_bytes() -> HeadTooLarge:
    return HeadTooLarge(f"the head of the request is longer than {MAX_HEAD_BYTES} bytes: send fewer or shorter headers")
