"""A process that moves a part of a worker's outputs on through their grammars, in an interpreter of its own.

    python -m radixmesh.daemons.worker.guided.mask_process DESCRIPTOR FOLDER BACKEND

DESCRIPTOR: of the socket to the worker (`mask_frames.py`). The process is READY when it has filled masks for nobody
(`mask_warm_up.py`). From then on masks are written to memory that the worker shares, and reported; the worker copies
them to its device, or its device reads chains of them where they are. The process ends when the worker does, however
that ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.worker.guided.mask_frames import HEAD, Kind
from radixmesh.daemons.worker.guided.mask_server import Reports, WorkerReports, shared_masks
from radixmesh.daemons.worker.guided.mask_warm_up import warm_server

_ALIVE_S = 1.0


def _tell_alive(reports: Reports, parent: int) -> None:
    while True:
        time.sleep(_ALIVE_S)
        if os.getppid() != parent:  # The main thread may be in a mask that takes long.
            os._exit(0)
        reports.send(Kind.ALIVE)


def serve(link: socket.socket, reports: Reports, backend: GrammarBackend, vocab_size: int) -> None:
    """Takes frames until the worker is gone."""
    backend.use_one_thread()
    server = warm_server(backend, vocab_size)
    # A collection takes longer than a step's masks.
    gc.collect()
    gc.freeze()
    reports.send(Kind.READY)
    head, descriptors, _, _ = socket.recv_fds(link, HEAD.size, 1)
    if len(head) < HEAD.size or not descriptors:
        return
    stream = link.makefile("rb", buffering=1 << 16)
    shape = json.loads(stream.read(HEAD.unpack(head)[1]))
    server.attach(shared_masks(descriptors[0], reports, **shape))
    while True:
        head = stream.read(HEAD.size)
        if len(head) < HEAD.size:
            return
        kind, size = HEAD.unpack(head)
        payload = stream.read(size)
        if len(payload) < size:
            return
        server.take(kind, payload)


def main() -> None:
    descriptor, folder, backend = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM):
        # Of a whole process group: the worker may still serve what it has.
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    reports = WorkerReports(link)
    # Ahead of the library, which takes seconds to import: the worker may end meanwhile.
    threading.Thread(target=_tell_alive, args=(reports, os.getppid()), daemon=True).start()
    vocabulary = GuidedVocabulary.of(Vocabulary.load(folder))
    with contextlib.suppress(OSError):
        serve(link, reports, load_backend(backend, vocabulary), vocabulary.vocab_size)
    os._exit(0)


if __name__ == "__main__":
    main()
