"""A folder of record files that processes share, on one host or over a shared file system, and its budget in bytes.

  FOLDER/id                  random, of the first process: two hosts may have folders of one name
  FOLDER/ledger              bytes and files of the folder, behind a flock that is held while room is made
  FOLDER/new/NAME.BYTES      a record that is being written, and the size that it will have
  FOLDER/ab/abcdef....page   a record, by its key; it comes here by a rename, so it is whole

Room is taken before a record is written: whoever writes holds the lock, makes files whose names have their size, and
adds that to the ledger. When the budget has no room, it deletes files that were read or written longest ago, by a
sample. A process that is killed leaves files in new/: they are counted, and go when they are ten minutes old. The
ledger may count too much (two writers of one page, a killed one, files that somebody has deleted), never too little;
each start of a process scans all and puts it right.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.keys import KEY_BYTES

_log = get_logger(__name__)

_LEDGER, _MAGIC = struct.Struct("<8sQQ"), b"RMKVFLD1"
_LEDGER_BYTES = _LEDGER.size + 8
_SUFFIX = ".page"
_FOLDERS = 256
# File systems give out blocks; smaller records take one.
_BLOCK = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of a file that is being written: its writer is gone.
_STALE_S = 600.0
_LOCK_POLL_S = 0.005


class NewFile(NamedTuple):
    """A record that has room and is not there yet. fd: open to be written."""

    key: bytes
    path: Path
    fd: int
    num_bytes: int


class Totals(NamedTuple):
    num_bytes: int
    num_files: int


class _Found:
    """Files of a scan: keys one after the other, bytes on the disk, and when each was used (ns). 48 bytes a file."""

    def __init__(self) -> None:
        self.keys, self.sizes, self.times = bytearray(), array("q"), array("q")

    def add(self, others: _Found) -> None:
        self.keys += others.keys
        self.sizes += others.sizes
        self.times += others.times


class SharedFolder:
    """budget_bytes: of all files of all processes, in blocks of 4 KiB. timeout_s: to wait for the lock.

    Raises KvStoreError SETTINGS or UNAVAILABLE. All calls may block as long as the file system does.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, timeout_s: float) -> None:
        self._folder, self._budget, self._timeout_s = folder, budget_bytes, timeout_s
        self._new = folder / "new"
        self.num_evicted = 0
        self.totals = Totals(0, 0)
        """As this process has seen them last."""
        self._new.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_FOLDERS):
            (folder / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)
        with self._locked() as fd:
            self._count(fd, self._recount())
            self.medium_id = self._own_id()
            """Equal in all processes that have this folder; empty: it cannot be kept."""

    @property
    def max_record_bytes(self) -> int:
        """A record that is larger would push out a quarter of all."""
        return self._budget // 4

    def path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / (name + _SUFFIX)

    def has(self, key: bytes) -> bool:
        return self.path(key).exists()

    def open(self, key: bytes) -> tuple[int, int] | None:
        """Descriptor and size of a record, which counts as used now; None: it is not there."""
        try:
            fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            # ESTALE: deleted by another host.
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise
        try:
            now = time.time_ns()
            with suppress(OSError):  # A file system that refuses it evicts by when pages were written.
                os.utime(fd, ns=(now, now))
            return fd, os.fstat(fd).st_size
        except OSError:
            os.close(fd)
            raise

    def take_room(self, records: Sequence[tuple[bytes, int]]) -> list[NewFile]:
        """Files for records (key, bytes). Raises KvStoreError FULL, and OSError."""
        needed = sum(_on_disk(num_bytes) for _, num_bytes in records)
        files: list[NewFile] = []
        with self._locked() as fd:
            totals = self._read(fd) or self._recount()
            if totals.num_bytes + needed > self._budget:
                totals = self._make_room(totals, needed)
            if totals.num_bytes + needed > self._budget:
                self._count(fd, totals)
                message = f"{self._folder} has no room for {needed} bytes that is not being written: give it more"
                raise KvStoreError(StoreFailure.FULL, message)
            # Ahead of the files: a process that is killed in between leaves a ledger that counts too much.
            self._count(fd, Totals(totals.num_bytes + needed, totals.num_files + len(records)))
            try:
                for key, num_bytes in records:
                    files.append(self._new_file(key, num_bytes))
            except OSError:
                self._count(fd, totals)
                for file in files:
                    self._discard(file)
                raise
        return files

    def publish(self, file: NewFile) -> None:
        """Has readers see a record that is written. Its descriptor is closed first: a shared file system shows others
        what is written when it is."""
        os.close(file.fd)
        try:
            os.rename(file.path, self.path(file.key))
        except OSError:
            with suppress(OSError):
                file.path.unlink()
            raise

    def give_up(self, files: Sequence[NewFile]) -> None:
        """Takes back files that were not published."""
        try:
            with self._locked() as fd:
                # Within the lock, as removals are: a scan in between would count without them, and the ledger twice.
                for file in files:
                    self._discard(file)
                self._take_away(fd, sum(_on_disk(file.num_bytes) for file in files), len(files))
        except (OSError, KvStoreError):
            for file in files:
                self._discard(file)

    def remove(self, keys: Sequence[bytes]) -> None:
        num_bytes = num_files = 0
        with self._locked() as fd:
            for key in keys:
                path = self.path(key)
                try:
                    size = path.stat().st_size
                    path.unlink()
                except FileNotFoundError:
                    continue
                num_bytes, num_files = num_bytes + _on_disk(size), num_files + 1
            self._take_away(fd, num_bytes, num_files)

    def failure(self, error: OSError) -> KvStoreError:
        if error.errno in _FULL:
            message = f"{self._folder} is full ({error}): free some space, or lower the store's budget"
            return KvStoreError(StoreFailure.FULL, message)
        message = f"{self._folder} cannot be used ({error}): look after its file system"
        return KvStoreError(StoreFailure.UNAVAILABLE, message)

    def _own_id(self) -> str:
        """Within the lock, whose holder makes it."""
        path = self._folder / "id"
        with suppress(OSError):
            if not path.exists():
                # Beside `new`, whose files are counted by their names.
                beside = path.with_suffix(".tmp")
                beside.write_text(secrets.token_hex(16))
                beside.rename(path)
            with open(path, "rb") as file:
                return file.read(32).hex()
        return ""

    def _new_file(self, key: bytes, num_bytes: int) -> NewFile:
        path = self._new / f"{secrets.token_hex(16)}.{num_bytes}"
        # Empty: its size tells how much of it was written, whatever the writer's library says.
        return NewFile(key, path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), num_bytes)

    def _discard(self, file: NewFile) -> None:
        """Once: a closed descriptor may be another file's by now."""
        with suppress(OSError):
            file.path.unlink()
            os.close(file.fd)

    def _take_away(self, fd: int, num_bytes: int, num_files: int) -> None:
        if (totals := self._read(fd)) is not None:
            self._count(fd, Totals(max(0, totals.num_bytes - num_bytes), max(0, totals.num_files - num_files)))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The ledger's descriptor, whose lock nobody else has: no thread and no process."""
        fd = os.open(self._folder / "ledger", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            ends = time.monotonic() + self._timeout_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > ends:
                        message = (
                            f"another process holds {self._folder}/ledger for {self._timeout_s:g} s: look after it"
                        )
                        raise KvStoreError(StoreFailure.UNAVAILABLE, message) from error
                    time.sleep(_LOCK_POLL_S)
            yield fd
        finally:
            os.close(fd)

    def _read(self, fd: int) -> Totals | None:
        data = os.pread(fd, _LEDGER_BYTES, 0)
        if len(data) != _LEDGER_BYTES or data[_LEDGER.size :] != xxhash.xxh3_64_digest(data[: _LEDGER.size]):
            return None
        magic, num_bytes, num_files = _LEDGER.unpack(data[: _LEDGER.size])
        return Totals(num_bytes, num_files) if magic == _MAGIC else None

    def _count(self, fd: int, totals: Totals) -> None:
        self.totals = totals
        data = _LEDGER.pack(_MAGIC, *totals)
        os.pwrite(fd, data + xxhash.xxh3_64_digest(data), 0)

    def _recount(self) -> Totals:
        """Totals by a scan of everything, without what the budget has no room for. Holds the lock."""
        # Files that are renamed meanwhile are counted twice that way, otherwise not at all.
        num_new_bytes = self._num_new_bytes()
        found = self._found(range(_FOLDERS))
        totals = Totals(sum(found.sizes) + num_new_bytes, len(found.sizes))
        too_many = totals.num_bytes - self._budget
        return self._without_oldest(totals, found, too_many) if too_many > 0 else totals

    def _make_room(self, totals: Totals, needed: int) -> Totals:
        """Deletes what was used longest ago, of a sample, until so many bytes have room. Holds the lock.

        Keys are hashes: any of the folders are as good a sample as others. It has eight times what is to go.
        """
        goal = totals.num_bytes + needed - self._budget + self._budget // 256
        num_new_bytes = self._num_new_bytes()
        first, num = secrets.randbelow(_FOLDERS), 0
        found = _Found()
        while num < _FOLDERS and sum(found.sizes) < 8 * goal:
            found.add(self._found([(first + at) % _FOLDERS for at in range(num, min(2 * num or 1, _FOLDERS))]))
            num = min(2 * num or 1, _FOLDERS)
        if num == _FOLDERS:
            totals = Totals(sum(found.sizes) + num_new_bytes, len(found.sizes))
            goal = totals.num_bytes + needed - self._budget
        return self._without_oldest(totals, found, goal)

    def _without_oldest(self, totals: Totals, found: _Found, goal: int) -> Totals:
        """Deletes so many bytes; the totals without them."""
        freed = num_files = 0
        for at in np.argsort(np.frombuffer(found.times, np.int64), kind="stable").tolist():
            if freed >= goal:
                break
            with suppress(FileNotFoundError):
                self.path(bytes(found.keys[KEY_BYTES * at : KEY_BYTES * (at + 1)])).unlink()
                self.num_evicted += 1
            freed, num_files = freed + found.sizes[at], num_files + 1
        return Totals(max(0, totals.num_bytes - freed), max(0, totals.num_files - num_files))

    def _found(self, numbers: Iterable[int]) -> _Found:
        found = _Found()
        for number in numbers:
            with os.scandir(self._folder / f"{number:02x}") as entries:
                for entry in entries:
                    if (key := _key_of(entry.name)) is None:
                        continue
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.keys += key
                        found.sizes.append(_on_disk(status.st_size))
                        found.times.append(status.st_mtime_ns)
        return found

    def _num_new_bytes(self) -> int:
        """Bytes of what is being written, without what nobody writes any more: that is deleted."""
        num_bytes, stale = 0, time.time() - _STALE_S
        with os.scandir(self._new) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_mtime < stale:
                        os.unlink(entry.path)
                        _log.info("kv_store_unfinished_page_deleted", path=entry.path)
                    else:
                        _, _, planned = entry.name.partition(".")
                        size = int(planned) if planned.isdecimal() else 0
                        num_bytes += _on_disk(max(size, status.st_size))
        return num_bytes


def _key_of(name: str) -> bytes | None:
    if len(name) != 2 * KEY_BYTES + len(_SUFFIX) or not name.endswith(_SUFFIX):
        return None
    try:
        return bytes.fromhex(name[: 2 * KEY_BYTES])
    except ValueError:
        return None


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK
