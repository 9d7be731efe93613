"""Pages in a folder of one process: a log of segment files with a fixed budget in bytes.

Writes go to the end of the newest segment. When the budget has no room for another one, the oldest is deleted, and its
pages that were read since they were written are written anew (second chance): at most a quarter of a segment, so that
the log writes at most 4/3 of what it is given, besides heads and indexes. Both files and index know removals.

The index (about 250 bytes a page) is in memory and is read back from the ends of the segments at start.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_store.backend import (
    KvBackend,
    KvStoreError,
    ReadResult,
    ReadTarget,
    StoredPage,
    StoreFailure,
    Usage,
)
from radixmesh.daemons.worker.kv_store.records import RecordKind, encode_removal
from radixmesh.daemons.worker.kv_store.segment import Segment, open_segment, read_all, write_all

_log = get_logger(__name__)

_NAME = re.compile(r"([0-9a-f]{16})\.seg")
_MIN_SEGMENTS = 4
_SEGMENT_BYTES = (1 << 20, 1 << 30)
# Of a segment that is deleted, in memory while they are written anew.
_MAX_REWRITE_BYTES = 64 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FsyncPolicy(StrEnum):
    """NEVER: the system writes when it likes. SEAL: a segment is on the disk before the next one begins. BATCH: every
    write is. A process that dies loses nothing by any of them; a machine that does loses what is not on the disk."""

    NEVER = "never"
    SEAL = "seal"
    BATCH = "batch"


class DiskBackend(KvBackend):
    """budget_bytes: of all files together, never exceeded. segment_bytes: size of a file; None: a 64th of the budget
    within 1 MiB and 1 GiB, at most a quarter of it. Raises KvStoreError SETTINGS, IN_USE or UNAVAILABLE."""

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        segment_bytes: int | None = None,
        fsync: FsyncPolicy = FsyncPolicy.SEAL,
    ) -> None:
        size = segment_bytes or min(max(budget_bytes // 64, _SEGMENT_BYTES[0]), _SEGMENT_BYTES[1])
        if size * _MIN_SEGMENTS > budget_bytes:
            message = f"a budget of {budget_bytes} bytes holds no {_MIN_SEGMENTS} segments of {size}: give it more"
            raise KvStoreError(StoreFailure.SETTINGS, message)
        self._folder, self._budget, self._segment_bytes, self._fsync = folder, budget_bytes, size, fsync
        self.index: dict[bytes, int] = {}
        """Key to segment << 32 | entry."""
        self.segments: dict[int, Segment] = {}
        """By sequence number, ascending."""
        # Of the index, of segments' entries and of their users.
        self._changed = threading.Condition()
        # Of the log's end. Taken first, where both are.
        self._writing = threading.Lock()
        self._fd: int | None = None
        self._written = self._evicted = 0
        try:
            self._lock_fd = self._lock_folder()
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            self._load()
        except OSError as error:
            os.close(self._lock_fd)
            raise self._unavailable(error) from error

    def write(self, pages: Sequence[StoredPage]) -> int:
        with self._writing:
            missing = {page.key: page for page in pages if page.key not in self.index}
            records = [(page.key, page.head, page.payload) for page in missing.values()]
            self._append(records, RecordKind.PAGE)
            return len(records)

    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        results = [ReadResult.ABSENT] * len(targets)
        found: dict[int, list[tuple[int, int]]] = {}
        """By segment: (offset, index of the target)."""
        with self._changed:
            for at, target in enumerate(targets):
                if (place := self.index.get(target.key)) is None:
                    continue
                segment, entry = self.segments[place >> 32], place & 0xFFFFFFFF
                offset, length = segment.extent(entry)
                if length != target.num_bytes:
                    results[at] = ReadResult.DAMAGED
                    continue
                segment.used[entry] = 1
                found.setdefault(segment.sequence, []).append((offset, at))
            segments = [self.segments[sequence] for sequence in found]
            for segment in segments:
                segment.users += 1
        try:
            for segment in segments:
                self._read_from(segment, sorted(found[segment.sequence]), targets, results)
        except OSError as error:
            raise self._unavailable(error) from error
        finally:
            with self._changed:
                for segment in segments:
                    segment.users -= 1
                self._changed.notify_all()
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.index for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._writing:
            with self._changed:
                removed = [key for key in keys if self.index.pop(key, None) is not None]
            # A page that is removed here and not in the log would be back after a restart.
            self._append([(key, encode_removal(key), memoryview(b"")) for key in removed], RecordKind.REMOVAL)

    def usage(self) -> Usage:
        with self._changed:
            num_bytes = sum(segment.file_bytes for segment in self.segments.values())
            return Usage(len(self.index), num_bytes, self._written, self._evicted)

    def close(self) -> None:
        with self._writing:
            try:
                if self._fd is not None:
                    self._seal()
            except OSError as error:
                _log.warning("kv_store_not_sealed", folder=str(self._folder), error=str(error))
            finally:
                os.close(self._lock_fd)

    def _append(self, records: Sequence[tuple[bytes, bytes, memoryview]], kind: RecordKind) -> None:
        """Writes records (key, head, payload) at the end of the log, and has the index know of pages."""
        at = 0
        while at < len(records):
            segment = self._segment_for(len(records[at][1]) + records[at][2].nbytes)
            assert self._fd is not None
            group, buffers = list[tuple[bytes, int]](), list[bytes | memoryview]()
            end, num = segment.end, 0
            while at < len(records):
                key, head, payload = records[at]
                length = len(head) + payload.nbytes
                # An entry of the index for each record of the group that the segment does not have yet.
                if not segment.has_room(num + length + 48 * len(group), self._segment_bytes):
                    break
                group.append((key, length))
                buffers += (head, payload)
                num += length
                at += 1
            try:
                write_all(self._fd, buffers, end)
                if self._fsync is FsyncPolicy.BATCH:
                    os.fdatasync(self._fd)
            except OSError as error:
                self._cut(self._fd, end)
                raise self._failure(error) from error
            with self._changed:
                self._written += num
                for key, length in group:
                    entry = segment.append(key, length, kind)
                    if kind is RecordKind.PAGE:
                        self.index[key] = segment.sequence << 32 | entry

    def _segment_for(self, num_bytes: int) -> Segment:
        """The newest segment, with room for a record of so many bytes."""
        newest = next(reversed(self.segments.values()), None)
        if newest is not None and self._fd is not None and newest.has_room(num_bytes, self._segment_bytes):
            return newest
        sequence = 1 if newest is None else newest.sequence + 1
        segment = Segment(self._folder / f"{sequence:016x}.seg", sequence)
        if not segment.has_room(num_bytes, self._segment_bytes):
            message = f"a page of {num_bytes} bytes fits no segment of {self._segment_bytes}: give the store more bytes"
            raise KvStoreError(StoreFailure.TOO_LARGE, message)
        try:
            if self._fd is not None:
                self._seal()
            rescued = self._make_room()
            self._fd = segment.create()
        except OSError as error:
            raise self._failure(error) from error
        with self._changed:
            self.segments[sequence] = segment
            self._written += segment.end
        if rescued:
            self._append(rescued, RecordKind.PAGE)
            # They fill at most a quarter of it.
            return self._segment_for(num_bytes)
        return segment

    def _make_room(self) -> list[tuple[bytes, bytes, memoryview]]:
        """Deletes the oldest segments until the budget has room for another one; records to write anew."""
        rescued: list[tuple[bytes, bytes, memoryview]] = []
        left = min(self._segment_bytes // 4, _MAX_REWRITE_BYTES)
        while sum(segment.file_bytes for segment in self.segments.values()) + self._segment_bytes > self._budget:
            oldest = next(iter(self.segments.values()))
            used = self._used_records(oldest, left)
            for key, data in used:
                rescued.append((key, b"", memoryview(data)))
                left -= len(data) + 48
            self._delete(oldest, num_kept=len(used))
        return rescued

    def _delete(self, segment: Segment, *, num_kept: int = 0) -> None:
        """num_kept: pages of it that are written anew."""
        with self._changed:
            self._evicted -= num_kept
            for entry, key in enumerate(segment.all_keys()):
                if self.index.get(key) == segment.sequence << 32 | entry:
                    del self.index[key]
                    self._evicted += 1
            del self.segments[segment.sequence]
            # The disk keeps the bytes until nobody reads them any more, and the budget counts them.
            while segment.users:
                self._changed.wait()
        segment.path.unlink(missing_ok=True)

    def _used_records(self, segment: Segment, most_bytes: int) -> list[tuple[bytes, bytearray]]:
        """Records that were read since they were written, of at most so many bytes; the newest first."""
        wanted = []
        for entry in reversed(range(len(segment))):
            offset, length = segment.extent(entry)
            key = segment.key(entry)
            if segment.used[entry] and self.index.get(key) == segment.sequence << 32 | entry:
                if (most_bytes := most_bytes - length - 48) < 0:
                    break
                wanted.append((key, offset, bytearray(length)))
        if not wanted:
            return []
        try:
            with open(segment.path, "rb", buffering=0) as file:
                fd = file.fileno()
                return [(key, data) for key, offset, data in wanted if read_all(fd, [memoryview(data)], offset)]
        except OSError as error:
            _log.warning("kv_store_pages_not_rewritten", segment=str(segment.path), error=str(error))
            return []

    def _seal(self) -> None:
        """Ends the newest segment. Where its index cannot be written, the next start scans it."""
        fd, self._fd = self._fd, None
        assert fd is not None
        segment = next(reversed(self.segments.values()))
        try:
            segment.seal(fd)
            self._written += segment.index_bytes
            if self._fsync is not FsyncPolicy.NEVER:
                os.fdatasync(fd)
                # KV that is on the disk need not fill the memory that this machine has for its host tier.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            self._cut(fd, segment.end)
            raise
        finally:
            os.close(fd)

    def _cut(self, fd: int, end: int) -> None:
        """Takes back what was written beyond `end`. If that fails as well, the next start does it."""
        try:
            os.ftruncate(fd, end)
        except OSError as error:
            _log.warning("kv_store_tail_left", folder=str(self._folder), error=str(error))

    def _read_from(
        self,
        segment: Segment,
        extents: Sequence[tuple[int, int]],
        targets: Sequence[ReadTarget],
        results: list[ReadResult],
    ) -> None:
        """Reads (offset, index of the target), ascending; records side by side by one call."""
        try:
            fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # Somebody else has deleted it.
            for _, at in extents:
                results[at] = ReadResult.DAMAGED
            return
        try:
            for start, run in _runs(extents, targets):
                buffers = [view for at in run for view in (targets[at].head, targets[at].payload)]
                result = ReadResult.READ if _is_read(fd, buffers, start) else ReadResult.DAMAGED
                for at in run:
                    results[at] = result
        finally:
            os.close(fd)

    def _lock_folder(self) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            message = f"{self._folder} is another process's store: give each worker a folder of its own"
            raise KvStoreError(StoreFailure.IN_USE, message) from error
        return fd

    def _load(self) -> None:
        """Reads the index back from the segments, oldest first, and deletes what the budget has no room for."""
        found = sorted((int(match[1], 16), path) for path in self._folder.iterdir() if (match := _match(path)))
        sizes = {sequence: path.stat().st_size for sequence, path in found}
        total = sum(sizes.values())
        for sequence, path in found:
            segment = open_segment(path, sequence) if total <= self._budget else None
            if segment is None:
                path.unlink()
                total -= sizes[sequence]
                continue
            self.segments[sequence] = segment
            at = sequence << 32
            keys = segment.all_keys()
            if not segment.removals():
                self.index.update(zip(keys, range(at, at + len(keys)), strict=True))
                continue
            for entry, key in enumerate(keys):
                if segment.is_removal(entry):
                    self.index.pop(key, None)
                else:
                    self.index[key] = at + entry
        newest = next(reversed(self.segments.values()), None)
        if newest is None or newest.is_sealed:
            return
        # It goes on where it ended: a store that is restarted often makes no row of short segments. It may grow to its
        # full size, which the budget has room for unless that was larger before.
        most = max(self._segment_bytes, newest.end + newest.index_bytes)
        while sum(each.file_bytes for each in self.segments.values()) - newest.file_bytes + most > self._budget:
            self._delete(next(iter(self.segments.values())))
            if newest.sequence not in self.segments:
                return
        self._fd = os.open(newest.path, os.O_RDWR | os.O_CLOEXEC)

    def _failure(self, error: OSError) -> KvStoreError:
        if error.errno in _FULL:
            message = f"{self._folder} is full ({error}): free some space, or lower the store's budget"
            return KvStoreError(StoreFailure.FULL, message)
        return self._unavailable(error)

    def _unavailable(self, error: OSError) -> KvStoreError:
        return KvStoreError(StoreFailure.UNAVAILABLE, f"{self._folder} cannot be used ({error}): look after the disk")


def _runs(extents: Sequence[tuple[int, int]], targets: Sequence[ReadTarget]) -> list[tuple[int, list[int]]]:
    """(offset, indexes of targets) of records that lie side by side."""
    runs: list[tuple[int, list[int]]] = []
    end = -1
    for offset, at in extents:
        if offset == end:
            runs[-1][1].append(at)
        else:
            runs.append((offset, [at]))
        end = offset + targets[at].num_bytes
    return runs


def _is_read(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    try:
        return read_all(fd, buffers, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False  # A bad sector: the pages on it are lost, the others are not.


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)
