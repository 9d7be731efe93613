"""Outputs of a process that fills masks, as its frames ask for, and its reports."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GrammarMatcher, GreedyTokens, MaskWords
from radixmesh.daemons.runtime.guided.source import invalid_grammar
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.mask_frames import INT, Admission, Kind, frame, ints
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory, MaskSink

_ADMISSION_BYTES = INT * len(Admission._fields)


class Reports(ABC):
    """Frames that a process tells, from any thread."""

    @abstractmethod
    def send(self, kind: Kind, *parts: bytes) -> None:
        """One frame of these parts."""


class WorkerReports(Reports):
    """Frames to the worker. Ends the process when that is gone."""

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


class ReportedMasks(MaskMemory):
    """Masks int32 [rows, words], the serial of the output that has each row, and who is told of what is there."""

    def __init__(self, words: MaskWords, reports: Reports) -> None:
        self.words = words
        self.serials: IntArray = np.zeros(len(words), np.int32)
        self.reports = reports

    @classmethod
    def of_worker(cls, descriptor: int, num_rows: int, num_words: int, reports: Reports) -> ReportedMasks:
        """The worker's memory, with pages that are mapped ahead of the first masks."""
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = mmap.mmap(descriptor, INT * num_rows * num_words, flags=flags)
        return cls(np.frombuffer(memory, np.int32, num_rows * num_words).reshape(num_rows, num_words), reports)

    def publish(self, rows: Sequence[int] | IntArray, positions: Sequence[int] | IntArray) -> None:
        published = np.array((rows, self.serials[rows], positions), np.int32)
        self.reports.send(Kind.PUBLISHED, published.tobytes())


class _Row(MaskSink):
    def __init__(self, masks: ReportedMasks, row: int, serial: int) -> None:
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

    def __init__(self, backend: GrammarBackend, masks: ReportedMasks, vocab_size: int) -> None:
        self._backend, self._vocab_size = backend, vocab_size
        self._filler = MaskFiller()
        self.attach(masks)

    def attach(self, masks: ReportedMasks) -> None:
        """Fills these masks from now on, of other outputs and grammars than so far."""
        self._masks = masks
        self._store = GrammarStore(self._backend.format, lambda: self._backend)
        self._blobs: dict[int, bytes] = {}
        self._guides: dict[int, tuple[int, Guide]] = {}

    def take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.TOKENS:
            moves = []
            for row, serial, token in np.frombuffer(payload, np.int32).reshape(-1, 3).tolist():
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
        # Of its time: an output of before attach() may begin behind it, and numbers of grammars mean others then.
        blob, store = self._blobs.get(about.grammar), self._store
        self._masks.serials[about.row] = about.serial

        def start() -> tuple[GrammarMatcher, GreedyTokens]:
            if blob is None:
                raise invalid_grammar("the grammar is not where its masks are filled: send the request anew", "")
            return store.get(str(about.grammar), blob).matcher(), store.tokens

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
