"""One file of the disk store's log: records one after the other, and an index behind them once it is full.

  | magic 8 | sequence number 8 | XXH3-64 of these 8 | record | record | ... | index | trailer 40 |

  index:   all keys (32 each), then offsets and lengths of records (uint64 each); length | 1 << 63 marks a removal
  trailer: magic 8 | number of entries 8 | offset of the index 8 | XXH3-64 of the index 8 | XXH3-64 of these 8

A file without a sound trailer is scanned head by head; what follows the last whole record is cut off. That is what a
process leaves that was killed: bytes that pwrite() took are in the page cache. After a loss of power, heads may be
there without their payloads: their checksum tells when they are read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from radixmesh.daemons.worker.kv_store.keys import KEY_BYTES
from radixmesh.daemons.worker.kv_store.records import HEAD_BYTES, RecordKind, parse_head

_START, _MAGIC = struct.Struct("<8sQ"), b"RMKVSEG1"
START_BYTES = _START.size + 8
_TRAILER, _TRAILER_MAGIC = struct.Struct("<8sQQ8s"), b"RMKVIDX1"
_TRAILER_BYTES = _TRAILER.size + 8
_ENTRY_BYTES = KEY_BYTES + 16
_REMOVAL = np.uint64(1 << 63)
# Buffers of one preadv() or pwritev(), and bytes: Linux takes 1,024 and 2 GiB.
_MAX_BUFFERS = 1000
_MAX_BYTES = 64 << 20

Buffer = bytes | memoryview


class Segment:
    """Entries of one file, in memory. `end`: of its last record, in bytes. `users`: reads under way.

    `used`: entry by entry, 1 if it was read since it was written. `num_live`: entries that the store's index has.
    """

    def __init__(self, path: Path, sequence: int) -> None:
        self.path, self.sequence = path, sequence
        self.keys = bytearray()
        self.offsets: list[int] | npt.NDArray[np.uint64] = []
        self.lengths: list[int] | npt.NDArray[np.uint64] = []
        self.used = bytearray()
        self.end = START_BYTES
        self.file_bytes = START_BYTES
        self.users = 0
        self.is_sealed = False

    def __len__(self) -> int:
        return len(self.used)

    @property
    def index_bytes(self) -> int:
        """Bytes of index and trailer, were the segment sealed now."""
        return len(self) * _ENTRY_BYTES + _TRAILER_BYTES

    def has_room(self, num_bytes: int, most: int) -> bool:
        """True if a record of so many bytes, and the index, fit a file of `most` bytes."""
        return self.end + num_bytes + self.index_bytes + _ENTRY_BYTES <= most

    def key(self, entry: int) -> bytes:
        return bytes(self.keys[entry * KEY_BYTES : (entry + 1) * KEY_BYTES])

    def extent(self, entry: int) -> tuple[int, int]:
        """(offset, length) of a record in the file."""
        return int(self.offsets[entry]), int(self.lengths[entry]) & ~int(_REMOVAL)

    def is_removal(self, entry: int) -> bool:
        return bool(int(self.lengths[entry]) & int(_REMOVAL))

    def append(self, key: bytes, length: int, kind: RecordKind = RecordKind.PAGE) -> int:
        """A record was written at `end`; the number of its entry."""
        assert isinstance(self.offsets, list) and isinstance(self.lengths, list), "the segment is sealed"
        self.keys += key
        self.offsets.append(self.end)
        self.lengths.append(length if kind is RecordKind.PAGE else length | int(_REMOVAL))
        self.used.append(0)
        self.end += length
        self.file_bytes = max(self.file_bytes, self.end)
        return len(self.used) - 1

    def all_keys(self) -> list[bytes]:
        """Keys of all entries, in order."""
        # Not dtype S: that drops trailing zeros.
        keys: list[bytes] = np.frombuffer(bytes(self.keys), f"V{KEY_BYTES}").tolist()
        return keys

    def removals(self) -> bool:
        """True if any entry is a removal."""
        return bool((np.asarray(self.lengths, np.uint64) & _REMOVAL).any())

    def create(self) -> int:
        """Makes the file; its descriptor, for reading and writing."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        start = _START.pack(_MAGIC, self.sequence)
        try:
            write_all(fd, [start + xxhash.xxh3_64_digest(start)], 0)
        except OSError:
            os.close(fd)
            self.path.unlink()
            raise
        return fd

    def seal(self, fd: int) -> None:
        """Writes index and trailer. Nothing is appended afterwards."""
        offsets, lengths = np.asarray(self.offsets, "<u8"), np.asarray(self.lengths, "<u8")
        index = bytes(self.keys) + offsets.tobytes() + lengths.tobytes()
        trailer = _TRAILER.pack(_TRAILER_MAGIC, len(self), self.end, xxhash.xxh3_64_digest(index))
        write_all(fd, [index, trailer + xxhash.xxh3_64_digest(trailer)], self.end)
        self.offsets, self.lengths = offsets, lengths
        self.file_bytes = self.end + self.index_bytes
        self.is_sealed = True


def open_segment(path: Path, sequence: int) -> Segment | None:
    """The segment in a file; None if it is none of ours. Cuts off a torn tail."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        start = os.pread(fd, START_BYTES, 0)
        fields = _START.pack(_MAGIC, sequence)
        if start != fields + xxhash.xxh3_64_digest(fields):
            return None
        segment = Segment(path, sequence)
        if not _read_index(segment, fd, size):
            _scan(segment, fd, size)
            if segment.end < size:
                os.ftruncate(fd, segment.end)
            segment.file_bytes = segment.end
        return segment
    finally:
        os.close(fd)


def _read_index(segment: Segment, fd: int, size: int) -> bool:
    if size < START_BYTES + _TRAILER_BYTES:
        return False
    trailer = os.pread(fd, _TRAILER_BYTES, size - _TRAILER_BYTES)
    if len(trailer) < _TRAILER_BYTES or trailer[-8:] != xxhash.xxh3_64_digest(trailer[:-8]):
        return False
    magic, num, at, checksum = _TRAILER.unpack(trailer[:-8])
    num_bytes = num * _ENTRY_BYTES
    if magic != _TRAILER_MAGIC or at < START_BYTES or at + num_bytes + _TRAILER_BYTES != size:
        return False
    index = bytearray(num_bytes)
    read_all(fd, [memoryview(index)], at)
    if xxhash.xxh3_64_digest(index) != checksum:
        return False
    numbers = np.frombuffer(index, "<u8", 2 * num, num * KEY_BYTES)
    segment.keys = index[: num * KEY_BYTES]
    segment.offsets, segment.lengths = numbers[:num].copy(), numbers[num:].copy()
    segment.used = bytearray(num)
    segment.end, segment.file_bytes, segment.is_sealed = at, size, True
    return True


def _scan(segment: Segment, fd: int, size: int) -> None:
    while segment.end + HEAD_BYTES <= size:
        head = parse_head(os.pread(fd, HEAD_BYTES, segment.end))
        if head is None or segment.end + head.num_bytes > size:
            return
        segment.append(head.key, head.num_bytes, head.kind)


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Writes buffers one after the other from `offset` on, in as few calls as the system takes. Raises OSError."""
    for views in _batches(buffers):
        left = views
        while left:
            num = os.pwritev(fd, left, offset)
            offset += num
            left = _after(left, num)


def read_all(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fills buffers one after the other from `offset` on; False if the file ends before. Raises OSError."""
    for views in _batches(buffers):
        left = views
        while left:
            num = os.preadv(fd, left, offset)
            if not num:
                return False
            offset += num
            left = _after(left, num)
    return True


def _batches(buffers: Sequence[Buffer]) -> list[list[memoryview]]:
    batches: list[list[memoryview]] = []
    num_bytes = _MAX_BYTES
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            continue
        if num_bytes + view.nbytes > _MAX_BYTES or len(batches[-1]) == _MAX_BUFFERS:
            batches.append([])
            num_bytes = 0
        batches[-1].append(view)
        num_bytes += view.nbytes
    return batches


def _after(views: list[memoryview], num: int) -> list[memoryview]:
    for at, view in enumerate(views):
        if num < view.nbytes:
            return [view[num:], *views[at + 1 :]]
        num -= view.nbytes
    return []
