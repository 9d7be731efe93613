"""Frames between a worker and a process that fills masks, over a socket of theirs alone.

    MEMORY   worker -> process   JSON of the memory's shape (`mask_memory.py`), with its descriptor
    GRAMMAR, DROP    ->          a number, and behind it the artefact; a number: nobody who comes follows that one
    ADMIT            ->          int32: Admission, then the tokens that the output has already
    TOKENS           ->          int32 [tokens, 3]: row, serial, token; those of an output follow each other
    CLOSE            ->          int32: row, serial
    READY            <-          the library is there
    PUBLISHED        <-          int32 [3, outputs]: row, serial, position of the token that the row's mask is for;
                                 nobody is told of what a chain is made longer by
    FAILED           <-          int32: row, serial; then an Error
    FREED            <-          int32: row, serial: nothing is written to the row any more
    ALIVE            <-          each second

A row of the memory holds one output's mask, or its chains (`chain.py`). Its serial tells outputs apart that have it one
after the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np

HEAD = struct.Struct("<BI")
"""Kind, and bytes of the payload."""
INT = 4
MAX_REPORT_BYTES = 1 << 20
"""Of a frame that a process sends."""


class Kind(IntEnum):
    MEMORY = 1
    GRAMMAR = 2
    DROP = 3
    ADMIT = 4
    TOKENS = 5
    CLOSE = 6
    READY = 7
    PUBLISHED = 8
    FAILED = 9
    FREED = 10
    ALIVE = 11


class Admission(NamedTuple):
    """grammar: its number. position: of the next token in prompt and output. has_mask: 1: the mask of that token is
    published."""

    row: int
    serial: int
    grammar: int
    position: int
    has_mask: int


def frame(kind: Kind, *parts: bytes) -> bytes:
    """One frame of these parts, one after the other."""
    return b"".join((HEAD.pack(kind, sum(map(len, parts))), *parts))


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


class FrameReader:
    """Cuts what a stream brought into frames."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of one payload; ValueError beyond."""
        self._max_bytes = max_bytes
        self._data = bytearray()

    def read(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Kind and payload of each frame that is whole now."""
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= HEAD.size:
                kind, size = HEAD.unpack_from(self._data, start)
                if size > self._max_bytes:
                    raise ValueError(f"a frame of {size} bytes, {self._max_bytes} at most")
                end = start + HEAD.size + size
                if end > len(self._data):
                    break
                payload = bytes(memoryview(self._data)[start + HEAD.size : end])
                start = end
                yield kind, payload
        finally:
            del self._data[:start]
