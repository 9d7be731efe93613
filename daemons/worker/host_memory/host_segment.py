"""Host memory of KV that outlives its worker: a file, in /dev/shm for instance, that one worker at a time maps.

  | header 4 KiB | names 4 MiB | commit records, one a page | up to a multiple of 2 MiB | pages |

  page: not committed --commit(), once its bytes are complete--> committed --uncommit(), before they change--> not

What a process has stored to a shared mapping stays, in its order, when the process is killed. So a page counts while
its record's check is right: the check is written behind everything else, and taken away before anything changes. A
record that was cut short has none. Nothing is believed that another boot of the machine, another model or another
layout has left.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger

_log = get_logger(__name__)

_HEADER, _MAGIC = struct.Struct("<8sQQQ32s36s"), b"RMKVHST1"
HEADER_BYTES = 4096
NUM_NAMES, NAME_BYTES = 4096, 1024
_ALIGNMENT = 2 << 20
# Words of a commit record: check (2), name, name's hash (2), generation, previous page and its generation, ids.
_NAME, _HASH, _GENERATION, _PREVIOUS, _PREVIOUS_GENERATION, IDS = 2, 3, 5, 6, 7, 8
_MULTIPLIER = np.uint64(6364136223846793005)
# A predecessor that was killed lets go of its memory page by page.
_LOCK_S = 30.0
_POLL_S = 0.05


class Committed(NamedTuple):
    """Pages that hold whole prefixes, int32 [n]; ids int32 [n, page_size]; previous pages (-1: none); indexes of
    names."""

    pages: IntArray
    ids: npt.NDArray[np.int32]
    previous_pages: IntArray
    name_indexes: IntArray
    names: Sequence[str]


class HostSegment:
    """identity: digest of everything but tokens that the bytes of a page depend on. open() comes first, once.

    One thread calls it, which is also the one that has the pages' bytes changed.
    """

    def __init__(self, path: Path, *, identity: bytes, page_size: int) -> None:
        assert len(identity) == 32, len(identity)
        self._path, self._identity, self._page_size = path, identity, page_size
        self._words = -(-(IDS + page_size) // 2) * 2
        self.names: dict[str, int] = {}
        self.num_dropped = 0
        """Pages that a predecessor left half committed, or behind such ones."""

    def open(self, num_pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the pages, uint8 [num_pages, page_bytes]; what is committed there stays as it is.

        Raises INVALID_ARGUMENT for a file that cannot be had, or that another process has.
        """
        records_at = HEADER_BYTES + NUM_NAMES * NAME_BYTES
        pages_at = -(-(records_at + 4 * self._words * num_pages) // _ALIGNMENT) * _ALIGNMENT
        size = pages_at + num_pages * page_bytes
        header = _HEADER.pack(_MAGIC, num_pages, page_bytes, self._page_size, self._identity, boot_id())
        try:
            self._fd = self._lock()
        except OSError as error:
            raise _refused(f"{self._path} cannot be opened ({error}): set another --host-kv-segment") from error
        try:
            if os.pread(self._fd, len(header), 0) != header or os.fstat(self._fd).st_size != size:
                os.ftruncate(self._fd, 0)
                # All of it now: memory that is not there when it is written to ends the process.
                os.posix_fallocate(self._fd, 0, size)
                os.pwrite(self._fd, header, 0)
            self._map = mmap.mmap(self._fd, size)
        except OSError as error:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            message = (
                f"{self._path} cannot hold {size} bytes of KV ({error}): set another --host-kv-segment or a smaller"
            )
            raise _refused(f"{message} --host-kv-bytes") from error
        data = np.frombuffer(self._map, np.uint8)
        self.name_rows = data[HEADER_BYTES:records_at].reshape(NUM_NAMES, NAME_BYTES)
        self.rows = data[records_at:pages_at].view(np.int32)[: self._words * num_pages].reshape(num_pages, self._words)
        self._checks = self.rows[:, :2].view(np.uint64)[:, 0]
        return data[pages_at:].reshape(num_pages, page_bytes)

    def uncommit(self, pages: IntArray) -> None:
        """The bytes of these pages are about to change."""
        self._checks[pages] = 0

    def commit(
        self,
        pages: IntArray,
        *,
        ids: npt.NDArray[np.int32],
        generations: IntArray,
        previous_pages: IntArray,
        previous_generations: IntArray,
        name_indexes: IntArray,
        names: Sequence[str],
    ) -> None:
        """These pages, none of which is committed, hold what they are said to; previous pages: -1 = none."""
        if not len(pages):
            return
        new = np.zeros((len(pages), self._words), np.int32)
        used, which = np.unique(name_indexes, return_inverse=True)
        chosen = [names[index] for index in used.tolist()]
        new[:, _NAME] = as_ints([self._index_of(name) for name in chosen])[which]
        new[:, _HASH : _HASH + 2] = np.array([_hash_of(name.encode()) for name in chosen])[which]
        new[:, _GENERATION] = generations
        new[:, _PREVIOUS], new[:, _PREVIOUS_GENERATION] = previous_pages, previous_generations
        new[:, IDS : IDS + self._page_size] = ids
        # Names for which there is no room: their pages are kept for this life alone.
        has_name = new[:, _NAME] >= 0
        pages, new = pages[has_name], new[has_name]
        self.rows[pages, 2:] = new[:, 2:]
        self._checks[pages] = _checks_of(new, pages)

    def committed(self) -> Committed:
        """Pages that this life or a former one has committed, as far as they lead back to the beginning of a prefix.
        Others are uncommitted."""
        pages = np.flatnonzero(self._checks).astype(np.int32)
        rows = self.rows[pages]
        names = self._read_names()
        is_sound = (self._checks[pages] == _checks_of(rows, pages)) & _has_name(rows, names)
        sound = np.zeros(len(self.rows), np.bool_)
        sound[pages[is_sound]] = True
        rooted = pages[self._is_rooted(sound)[pages]]
        self.num_dropped = len(pages) - len(rooted)
        left = sound.copy()
        left[rooted] = False
        self.uncommit(np.concatenate([pages[~is_sound], np.flatnonzero(left).astype(np.int32)]))
        kept = self.rows[rooted]
        numbers = np.unique(kept[:, _NAME])
        return Committed(
            pages=rooted,
            ids=kept[:, IDS : IDS + self._page_size].copy(),
            previous_pages=kept[:, _PREVIOUS].copy(),
            name_indexes=np.searchsorted(numbers, kept[:, _NAME]).astype(np.int32),
            names=[names[number][0] for number in numbers.tolist()],
        )

    def clear(self) -> None:
        """No page is committed."""
        self._checks[:] = 0

    def close(self) -> None:
        """Another worker may have it from now on; no byte of it changes any more."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # The mapping has the file open too.
        os.close(self._fd)

    def _lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        stat, end = os.fstat(fd), time.monotonic() + _LOCK_S
        if not S_ISREG(stat.st_mode) or stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
            os.close(fd)
            # Whoever can write there can give this worker any KV.
            raise _refused(f"{self._path} is no file, another user's, or open to others: set another --host-kv-segment")
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() > end:
                    os.close(fd)
                    message = f"{self._path} is another worker's: give each a --host-kv-segment of its own"
                    raise _refused(message) from None
                time.sleep(_POLL_S)

    def _is_rooted(self, sound: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """By page: True if it is sound, and all pages before it are. Pointers double: log2(longest prefix) rounds."""
        num = len(self.rows)
        root, nowhere = num, num + 1
        previous = self.rows[:, _PREVIOUS].astype(np.int64)
        above = np.where((previous >= 0) & (previous < num), previous, 0)
        is_linked = (previous == above) & sound[above] & sound
        is_linked &= self.rows[above, _GENERATION] == self.rows[:, _PREVIOUS_GENERATION]
        is_linked &= self.rows[above, _NAME] == self.rows[:, _NAME]
        target = np.where(sound & (previous == -1), root, np.where(is_linked, previous, nowhere))
        target = np.append(target, [root, nowhere])
        for _ in range(num.bit_length() + 1):
            target = target[target]
        is_rooted: npt.NDArray[np.bool_] = target[:num] == root
        return is_rooted

    def _index_of(self, name: str) -> int:
        """Row of a name; -1: there is no room for it."""
        if name in self.names:
            return self.names[name]
        data = name.encode()
        if len(data) > NAME_BYTES - 2:
            return -1
        if len(self.names) == NUM_NAMES and not self._forget_names():
            return -1
        used = set(self.names.values())
        index = next(row for row in range(NUM_NAMES) if row not in used)
        row = len(data).to_bytes(2, "little") + data
        # No committed page has this row. One that will carries the name's hash.
        self.name_rows[index, : len(row)] = np.frombuffer(row, np.uint8)
        self.names[name] = index
        return index

    def _forget_names(self) -> bool:
        """Names come from users, without end: makes room by those that no page has; False: all have some."""
        used = set(np.unique(self.rows[self._checks != 0, _NAME]).tolist())
        self.names = {name: index for name, index in self.names.items() if index in used}
        return len(self.names) < NUM_NAMES

    def _read_names(self) -> dict[int, tuple[str, IntArray]]:
        """Names that committed pages have, with hashes, by row."""
        names: dict[int, tuple[str, IntArray]] = {}
        for index in np.unique(self.rows[self._checks != 0, _NAME]).tolist():
            if 0 <= index < NUM_NAMES:
                row = self.name_rows[index].tobytes()
                data = row[2 : 2 + int.from_bytes(row[:2], "little")]
                names[index] = (data.decode(errors="replace"), _hash_of(data))
        self.names = {name: index for index, (name, _) in names.items()}
        return names


def _has_name(rows: npt.NDArray[np.int32], names: dict[int, tuple[str, IntArray]]) -> npt.NDArray[np.bool_]:
    """By record: True if its name is the one that it was committed with."""
    hashes, is_known = np.zeros((NUM_NAMES, 2), np.int32), np.zeros(NUM_NAMES, np.bool_)
    for index, (_, of) in names.items():
        hashes[index], is_known[index] = of, True
    indexes = rows[:, _NAME]
    is_row = (indexes >= 0) & (indexes < NUM_NAMES)
    indexes = np.where(is_row, indexes, 0)
    is_same: npt.NDArray[np.bool_] = (hashes[indexes] == rows[:, _HASH : _HASH + 2]).all(axis=1)
    return is_row & is_known[indexes] & is_same


def _checks_of(rows: npt.NDArray[np.int32], pages: IntArray) -> npt.NDArray[np.uint64]:
    """Check of each record: a linear hash of its words and of its place; never 0."""
    powers = np.cumprod(np.full(rows.shape[1] - 1, _MULTIPLIER, np.uint64), dtype=np.uint64)
    words = rows[:, 2:].astype(np.uint64) + np.uint64(1)
    sums = (words * powers[1:]).sum(axis=1, dtype=np.uint64) + (pages.astype(np.uint64) + np.uint64(1)) * powers[0]
    # The upper half of a product depends on all bits of the word, the lower one on few.
    checks: npt.NDArray[np.uint64] = (sums ^ (sums >> np.uint64(29))) * _MULTIPLIER | np.uint64(1)
    return checks


def _hash_of(name: bytes) -> IntArray:
    """Two words."""
    return np.frombuffer(hashlib.blake2b(name, digest_size=8).digest(), np.int32)


def boot_id() -> bytes:
    """Of the running system; where it is not told, of this moment: nothing is taken over then."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.urandom(36)


def _refused(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "host_kv_segment"})
