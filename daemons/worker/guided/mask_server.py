"""Outputs of a process that fills masks, as its frames ask for, and its reports."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from abc import ABC, abstractmethod

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GrammarMatcher, GreedyTokens, MaskWords
from radixmesh.daemons.runtime.guided.source import invalid_grammar
from radixmesh.daemons.worker.guided.chain import ChainMemory, ChainShape, ChainSink
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.mask_frames import INT, Admission, Kind, frame, ints
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory, MaskSink, Rows

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


class ReportedMemory(MaskMemory):
    """Masks, the serial of the output that has each row, and who is told of what is there."""

    serials: IntArray
    reports: Reports

    @abstractmethod
    def sink(self, row: int, serial: int) -> MaskSink:
        """Of an output that has this row from now on."""

    def report(self, rows: Rows, positions: Rows) -> None:
        """Masks in these rows are there."""
        published = np.array((rows, self.serials[rows], positions), np.int32)
        self.reports.send(Kind.PUBLISHED, published.tobytes())

    def freed(self, row: int, serial: int) -> None:
        self.reports.send(Kind.FREED, ints(row, serial))

    def failed(self, row: int, serial: int, error: MeshError) -> None:
        self.reports.send(Kind.FAILED, ints(row, serial), error.to_proto().SerializeToString())


class ReportedMasks(ReportedMemory):
    """A mask an output: words int32 [rows, words]."""

    def __init__(self, words: MaskWords, reports: Reports) -> None:
        self.words = words
        self.serials = np.zeros(len(words), np.int32)
        self.reports = reports

    def sink(self, row: int, serial: int) -> MaskSink:
        return _Row(self, row, serial)

    def publish(self, rows: Rows, positions: Rows) -> None:
        self.report(rows, positions)


class ReportedChains(ChainMemory, ReportedMemory):
    """Chains, as the device finds them."""

    def __init__(self, numbers: IntArray, shape: ChainShape, reports: Reports) -> None:
        super().__init__(numbers, shape)
        self.serials = np.zeros(shape.num_rows, np.int32)
        self.reports = reports

    def sink(self, row: int, serial: int) -> MaskSink:
        return _Chain(self, row, serial)

    def told(self, rows: Rows, positions: Rows) -> None:
        self.report(rows, positions)


def shared_masks(descriptor: int, reports: Reports, **shape: int) -> ReportedMemory:
    """The worker's memory, with pages that are mapped ahead of the first masks. shape: as of `SharedMaskMemory`."""
    if "max_forced" in shape:
        chains = ChainShape(**shape)
        return ReportedChains(_mapped(descriptor, chains.num_ints), chains, reports)
    num_rows, num_words = shape["num_rows"], shape["num_words"]
    words: MaskWords = _mapped(descriptor, num_rows * num_words).reshape(num_rows, num_words)
    return ReportedMasks(words, reports)


def _mapped(descriptor: int, num: int) -> IntArray:
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    numbers: IntArray = np.frombuffer(mmap.mmap(descriptor, INT * num, flags=flags), np.int32, num)
    return numbers


class _Row(MaskSink):
    def __init__(self, masks: ReportedMasks, row: int, serial: int) -> None:
        self.memory = self._masks = masks
        self.row, self._serial = row, serial
        self._words: MaskWords = masks.words[row]

    @property
    def words(self) -> MaskWords:
        return self._words

    def publish(self, position: int) -> None:
        self._masks.publish([self.row], [position])

    def release(self) -> None:
        self._masks.freed(self.row, self._serial)

    def failed(self, error: MeshError) -> None:
        self._masks.failed(self.row, self._serial, error)


class _Chain(ChainSink):
    def __init__(self, chains: ReportedChains, row: int, serial: int) -> None:
        super().__init__(chains, row)
        self._chains, self._serial = chains, serial

    def release(self) -> None:
        self._chains.freed(self.row, self._serial)

    def failed(self, error: MeshError) -> None:
        self._chains.failed(self.row, self._serial, error)


class MaskServer:
    """Outputs of the frames that came so far. One thread calls it."""

    def __init__(self, backend: GrammarBackend, masks: ReportedMemory, vocab_size: int) -> None:
        self._backend, self._vocab_size = backend, vocab_size
        self._filler = MaskFiller()
        self.attach(masks)

    def attach(self, masks: ReportedMemory) -> None:
        """Fills these masks from now on, of other outputs and grammars than so far."""
        self._masks = masks
        self._store = GrammarStore(self._backend.format, lambda: self._backend)
        self._blobs: dict[int, bytes] = {}
        self._guides: dict[int, tuple[int, Guide]] = {}

    def take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.TOKENS:
            moves: dict[int, tuple[Guide, list[int]]] = {}
            for row, serial, token in np.frombuffer(payload, np.int32).reshape(-1, 3).tolist():
                of_row, guide = self._guides.get(row, (0, None))
                if guide is not None and of_row == serial:
                    moves.setdefault(row, (guide, []))[1].append(token)
            self._filler.follow_here(moves.values())
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
            sink=self._masks.sink(about.row, about.serial),
            has_mask=bool(about.has_mask),
        )
        self._guides[about.row] = about.serial, guide
        self._filler.begin(guide)
