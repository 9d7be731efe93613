"""The process that compiles grammars: `python -m ... MODEL_FOLDER BACKEND SOCKET_FD MEMORY_BYTES TIMEOUT_S`.

Frames over a socket: a head (length of the payload, one letter), then the payload. To it: "J" and a
GrammarSource as bytes. From it: "R" once it is ready (the format), then for each job "A" with the artefact or "X" with
a common.v1.Error.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.source import GrammarSource, invalid_grammar
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

HEAD = struct.Struct("<Ic")
# A tenth of a core where something else wants it, so that a compilation of a second still ends in time there.
_NICE = 10


def main(argv: Sequence[str]) -> int:
    folder, backend_name, descriptor, memory_bytes, timeout_s = argv
    _give_way()
    with socket.socket(fileno=int(descriptor)) as link:
        try:
            backend = load_backend(backend_name, GuidedVocabulary.of(Vocabulary.load(Path(folder))))
        except MeshError as error:
            _send(link, b"X", error.to_proto().SerializeToString())
            return 1
        _limit_memory(int(memory_bytes))
        _send(link, b"R", backend.format.encode())
        while (job := _receive(link)) is not None:
            # The default action ends the process, even where its daemon, which would kill it, is gone.
            signal.setitimer(signal.ITIMER_REAL, 2 * float(timeout_s))
            answer = _compiled(backend, job)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(link, *answer)
    return 0


def _compiled(backend: GrammarBackend, job: bytes) -> tuple[bytes, bytes]:
    source = GrammarSource.of_bytes(job)
    form = source.form.value
    try:
        return b"A", backend.compile(source)
    except MeshError as error:
        return b"X", error.to_proto().SerializeToString()
    except MemoryError:
        message = f"the {form} needs more memory than a compilation may take: simplify it"
        return b"X", invalid_grammar(message, "memory").to_proto().SerializeToString()


def _give_way() -> None:
    """Streams of others do not stutter beside a compilation, nor beside the import of its library."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _limit_memory(num_bytes: int) -> None:
    """Address space beyond what is mapped by now. A library that meets the limit ends the process, as a rule."""
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = mapped_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(link: socket.socket, letter: bytes, payload: bytes) -> None:
    link.sendall(HEAD.pack(len(payload), letter))
    link.sendall(payload)


def _receive(link: socket.socket) -> bytes | None:
    """A job; None when the daemon is gone."""
    head = _read(link, HEAD.size)
    return None if head is None else _read(link, HEAD.unpack(head)[0])


def _read(link: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, start = memoryview(data), 0
    while start < size:
        num = link.recv_into(view[start:])
        if not num:
            return None
        start += num
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
