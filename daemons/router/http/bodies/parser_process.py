"""A process that parses large bodies: jobs in, the router's messages out, over one socket. Started by ParserPool.

A job is a frame J {kind, size, contexts}, then `size` bytes. The answer is a frame B (the body's fields), a frame M
per message (serialised), and a frame E; or at any moment a frame X, a serialised common.v1.Error, and no more.
A frame is a length (4 bytes, little-endian), a letter, and so many bytes; those of J and B are MessagePack.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import struct
import sys

import msgspec

from radixmesh.daemons.router.http.bodies.body import Body, parse
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.embedding_request import ClassifyRequest, EmbeddingRequest
from radixmesh.daemons.router.http.request_types.native_request import NativeRequest
from radixmesh.daemons.router.http.request_types.score_requests import RerankRequest, ScoreRequest
from radixmesh.daemons.router.http.request_types.text_requests import DetokenizeRequest, TokenizeRequest
from radixmesh.daemons.router.http.translated.anthropic_request import CountTokensRequest, MessagesRequest
from radixmesh.daemons.router.http.translated.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from radixmesh.daemons.router.http.translated.responses_request import ResponsesRequest
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

KINDS: dict[str, type[Body]] = {
    kind.__name__: kind
    for kind in (
        *(ChatRequest, CompletionRequest, EmbeddingRequest, NativeRequest, TokenizeRequest, DetokenizeRequest),
        *(ScoreRequest, RerankRequest, ClassifyRequest),
        *(MessagesRequest, CountTokensRequest, ResponsesRequest),
        *(OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest),
    )
}
_HEAD = struct.Struct("<Ic")
# On top of what the interpreter has: the body, its texts as Python has them, and the messages. Past it the body is
# refused.
_MEMORY_PER_BYTE = 10
_MEMORY_BASE = 64 << 20


class _Job(msgspec.Struct):
    kind: str
    size: int
    contexts: dict[str, int]


def serve(connection: socket.socket) -> None:
    """Runs until the other end is closed."""
    while (head := _receive(connection, _HEAD.size)) is not None:
        packed = _receive(connection, _HEAD.unpack(head)[0])
        job = msgspec.msgpack.decode(packed or b"", type=_Job)
        data = _receive(connection, job.size)
        if data is None:
            return
        try:
            _answer(connection, job, data)
        except MeshError as error:
            _send(connection, b"X", error.to_proto().SerializeToString())
        except (MemoryError, RecursionError):
            message = f"a body of {job.size} bytes takes more memory than one may: send less at once"
            too_large = MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"size": str(job.size)})
            _send(connection, b"X", too_large.to_proto().SerializeToString())
        del data


def _answer(connection: socket.socket, job: _Job, data: bytearray) -> None:
    body = parse(data, KINDS[job.kind])
    _send(connection, b"B", msgspec.msgpack.encode(body.without_bulk()))
    for message in body.to_messages(job.contexts):
        _send(connection, b"M", message.SerializeToString())
    _send(connection, b"E", b"")


def _send(connection: socket.socket, letter: bytes, payload: bytes) -> None:
    connection.sendall(_HEAD.pack(len(payload), letter))
    connection.sendall(payload)


def _receive(connection: socket.socket, size: int) -> bytearray | None:
    """size bytes; None at the connection's end."""
    data = bytearray(size)
    view, start = memoryview(data), 0
    while start < size:
        num = connection.recv_into(view[start:])
        if not num:
            return None
        start += num
    return data


def _bound_memory(max_bytes: int) -> None:
    used = 0
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmData:"):
                used = int(line.split()[1]) << 10
    most = used + _MEMORY_BASE + _MEMORY_PER_BYTE * max_bytes
    inherited = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if inherited != resource.RLIM_INFINITY:
        most = min(most, inherited)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # The kernel kills this process before the router where a container's memory runs out: one body is lost.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def main() -> None:
    """Arguments: the number of the socket's file, and the bytes of the largest body."""
    # Signals to the process group are the router's: when it ends, so does the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _bound_memory(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except ConnectionError:
            return


if __name__ == "__main__":
    main()
