"""A process that moves a part of a worker's outputs on through their grammars, in an interpreter of its own.

    python -m radixmesh.daemons.worker.guided.mask_process DESCRIPTOR FOLDER BACKEND

DESCRIPTOR: of the socket to the worker (`mask_frames.py`). Masks are written to memory that the worker shares, and
reported; the worker copies them to its device. The process ends when the worker does, however that ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import (
    GrammarBackend,
    GrammarMatcher,
    GreedyTokens,
    GuidedVocabulary,
    MaskWords,
    load_backend,
)
from radixmesh.daemons.runtime.guided.source import invalid_grammar
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.mask_frames import HEAD, INT, Admission, Kind, frame, ints
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory, MaskSink

_ALIVE_S = 1.0
_ADMISSION_BYTES = INT * len(Admission._fields)


class Reports:
    """Frames to the worker, from any thread. Ends the process when the worker is gone."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()

    def send(self, kind: Kind, *parts: bytes) -> None:
        data = frame(kind, *parts)
        try:
            with self._lock:
                self._link.sendall(data)
        except OSError:
            os._exit(0)


class SharedMasks(MaskMemory):
    """The worker's memory of masks, int32 [rows, words], and the serial of the output that has each row."""

    def __init__(self, descriptor: int, num_rows: int, num_words: int, reports: Reports) -> None:
        memory = mmap.mmap(descriptor, INT * num_rows * num_words)
        self.words: MaskWords = np.frombuffer(memory, np.int32, num_rows * num_words).reshape(num_rows, num_words)
        self.serials: IntArray = np.zeros(num_rows, np.int32)
        self.reports = reports

    def publish(self, rows: Sequence[int] | IntArray, positions: Sequence[int] | IntArray) -> None:
        published = np.array((rows, self.serials[rows], positions), np.int32)
        self.reports.send(Kind.PUBLISHED, published.tobytes())


class _Row(MaskSink):
    def __init__(self, masks: SharedMasks, row: int, serial: int) -> None:
        self.memory = self._masks = masks
        self.row, self._serial = row, serial
        self.words = masks.words[row]

    def publish(self, position: int) -> None:
        self._masks.publish([self.row], [position])

    def release(self) -> None:
        self._masks.reports.send(Kind.FREED, ints(self.row, self._serial))

    def failed(self, error: MeshError) -> None:
        head = ints(self.row, self._serial)
        self._masks.reports.send(Kind.FAILED, head, error.to_proto().SerializeToString())


class MaskServer:
    """Outputs of the frames that came so far. One thread calls it."""

    def __init__(self, backend: GrammarBackend, masks: SharedMasks, vocab_size: int) -> None:
        self._masks, self._vocab_size = masks, vocab_size
        self._store = GrammarStore(backend.format, lambda: backend)
        self._blobs: dict[int, bytes] = {}
        self._guides: dict[int, tuple[int, Guide]] = {}
        self._filler = MaskFiller()

    def take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.TOKENS:
            moves = []
            for row, serial, token in zip(*np.frombuffer(payload, np.int32).reshape(3, -1).tolist(), strict=True):
                of_row, guide = self._guides.get(row, (0, None))
                if guide is not None and of_row == serial:
                    moves.append((guide, (token,)))
            self._filler.follow_here(moves)
        elif kind == Kind.ADMIT:
            self._admit(payload)
        elif kind == Kind.CLOSE:
            row, serial = np.frombuffer(payload, np.int32).tolist()
            of_row, guide = self._guides.get(row, (0, None))
            if guide is not None and of_row == serial:
                del self._guides[row]
                guide.close()
            else:
                # It was never sent here: it had failed before.
                self._masks.reports.send(Kind.FREED, ints(row, serial))
        elif kind == Kind.GRAMMAR:
            self._blobs[int.from_bytes(payload[:INT], "little")] = payload[INT:]
        elif kind == Kind.DROP:
            del self._blobs[int.from_bytes(payload, "little")]

    def _admit(self, payload: bytes) -> None:
        about = Admission(*np.frombuffer(payload[:_ADMISSION_BYTES], np.int32).tolist())
        blob = self._blobs.get(about.grammar)
        self._masks.serials[about.row] = about.serial

        def start() -> tuple[GrammarMatcher, GreedyTokens]:
            if blob is None:
                raise invalid_grammar("the grammar is not where its masks are filled: send the request anew", "")
            return self._store.get(str(about.grammar), blob).matcher(), self._store.tokens

        guide = Guide(
            start,
            self._vocab_size,
            position=about.position,
            output_ids=np.frombuffer(payload[_ADMISSION_BYTES:], np.int32),
            sink=_Row(self._masks, about.row, about.serial),
            has_mask=bool(about.has_mask),
        )
        self._guides[about.row] = about.serial, guide
        self._filler.begin(guide)


def _tell_alive(reports: Reports, parent: int) -> None:
    while True:
        time.sleep(_ALIVE_S)
        if os.getppid() != parent:  # The main thread may be in a mask that takes long.
            os._exit(0)
        reports.send(Kind.ALIVE)


def serve(link: socket.socket, backend: GrammarBackend, vocab_size: int) -> None:
    """Takes frames until the worker is gone."""
    reports = Reports(link)
    threading.Thread(target=_tell_alive, args=(reports, os.getppid()), daemon=True).start()
    backend.use_one_thread()
    # A collection takes longer than a step's masks.
    gc.collect()
    gc.freeze()
    reports.send(Kind.READY)
    head, descriptors, _, _ = socket.recv_fds(link, HEAD.size, 1)
    if len(head) < HEAD.size or not descriptors:
        return
    stream = link.makefile("rb", buffering=1 << 16)
    about = json.loads(stream.read(HEAD.unpack(head)[1]))
    masks = SharedMasks(descriptors[0], about["rows"], about["words"], reports)
    server = MaskServer(backend, masks, vocab_size)
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
    vocabulary = GuidedVocabulary.of(Vocabulary.load(folder))
    with contextlib.suppress(OSError):
        serve(link, load_backend(backend, vocabulary), vocabulary.vocab_size)
    os._exit(0)


if __name__ == "__main__":
    main()
