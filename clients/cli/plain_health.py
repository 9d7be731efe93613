"""One grpc.health.v1 check over a bare HTTP/2 connection: importing gRPC takes ten times as long as the question.

In a container every check is a process, once every few seconds; this keeps it at what Python itself takes to start.
Frames and header encoding: RFC 9113 (section 4), RFC 7541 (section 6.2.2, literals without indexing).
"""

import socket
import struct
import time

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 0x1, 0x4
_HEADERS_SENT = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
# grpc's frame: not compressed, four bytes of length, the message. An empty request asks for the whole server.
_EMPTY_MESSAGE = bytes(5)
# HealthCheckResponse: field 1, a varint; zero is left out.
_STATUSES = {b"": "UNKNOWN", b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}


def ask_plain(address: str, timeout_s: float) -> str | None:
    """The status by its name; None where it was not told this way, whatever the cause: gRPC itself can say which."""
    until = time.monotonic() + timeout_s
    try:
        with _connect(address, timeout_s) as connection:
            connection.sendall(_question())
            while (remaining_s := until - time.monotonic()) > 0:
                connection.settimeout(remaining_s)
                kind, flags, stream, payload = _read_frame(connection)
                if stream == 1 and kind == _DATA and len(payload) >= len(_EMPTY_MESSAGE):
                    return _STATUSES.get(payload[len(_EMPTY_MESSAGE) :])
                if stream == 1 and flags & _END_STREAM:
                    return None
    except (OSError, ValueError):
        return None
    return None


def _connect(address: str, timeout_s: float) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        path = address.removeprefix("unix:")
        connection.connect(path[2:] if path.startswith("//") else path)
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout_s)


def _question() -> bytes:
    headers = b"".join(
        b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in _HEADERS_SENT
    )
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, headers)
        + _frame(_DATA, _END_STREAM, 1, _EMPTY_MESSAGE)
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _read_frame(connection: socket.socket) -> tuple[int, int, int, bytes]:
    head = _read(connection, 9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream & 0x7FFFFFFF, _read(connection, int.from_bytes(head[:3], "big"))


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            raise ValueError("the connection ended within a frame")
        received += piece
    return received
