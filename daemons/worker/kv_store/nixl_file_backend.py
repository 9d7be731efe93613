"""Pages as files of a folder that replicas share, moved by NIXL's file plugins (`pip install radixmesh[kv-nixl]`).

One file is one record. It is written under another name and renamed, so a reader finds all of it or none, whatever is
killed; what a loss of power leaves half written has a wrong checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from radixmesh.daemons.worker.kv_store.backend import (
    KvBackend,
    KvStoreError,
    ReadResult,
    ReadTarget,
    StoredPage,
    StoreFailure,
    Usage,
)
from radixmesh.daemons.worker.kv_store.batches import groups
from radixmesh.daemons.worker.kv_store.nixl_storage import NixlStorage, Place
from radixmesh.daemons.worker.kv_store.registered_memory import Lane, LanePool, aligned
from radixmesh.daemons.worker.kv_store.shared_folder import NewFile, SharedFolder

T = TypeVar("T")

PLUGINS = ("POSIX", "GDS", "GDS_MT")
# Files that are open at a time, by each of four lanes: a process may have 1,024.
_MAX_FILES = 128
# Names that are looked up by one call.
_MAX_NAMES = 1024


class NixlFileBackend(KvBackend):
    """budget_bytes: of the folder, for all who share it. plugin: one of PLUGINS. pool_bytes: of registered memory; a
    record takes at most a quarter. timeout_s: of a group of at most 128 files. Raises KvStoreError SETTINGS or
    UNAVAILABLE."""

    is_shared = True

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        plugin: str = "POSIX",
        pool_bytes: int = 256 << 20,
        timeout_s: float = 5.0,
    ) -> None:
        self._lanes = LanePool(pool_bytes, name=str(folder), timeout_s=timeout_s)
        self._nixl = NixlStorage(plugin, "FILE", {}, self._lanes)
        try:
            self._folder = SharedFolder(folder, budget_bytes=budget_bytes, timeout_s=timeout_s / 2)
        except OSError as error:
            message = f"{folder} cannot be used ({error}): give a folder that this process may write to"
            raise KvStoreError(StoreFailure.UNAVAILABLE, message) from error
        self.medium_id = self._folder.medium_id
        self._written = 0

    def write(self, pages: Sequence[StoredPage]) -> int:
        num, most = 0, min(self._lanes.lane_bytes, self._folder.max_record_bytes)
        for page in pages:
            if aligned(page.num_bytes) > most:
                message = f"a page of {page.num_bytes} bytes is larger than {most}: give budget and pool more"
                raise KvStoreError(StoreFailure.TOO_LARGE, message)
        has = self.contains([page.key for page in pages])
        missing = {page.key: page for page, is_there in zip(pages, has, strict=True) if not is_there}
        for group in groups(
            missing.values(), lambda page: aligned(page.num_bytes), max_bytes=most, max_items=_MAX_FILES
        ):
            with self._lanes.lane() as lane:
                places = lane.fill(group)
                self._run(lane, lambda lane=lane, group=group, places=places: self._write(lane, group, places))  # type: ignore[misc]
            num += len(group)
            self._written += sum(page.num_bytes for page in group)
        return num

    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        results: list[ReadResult] = []
        for group in groups(
            targets, lambda target: aligned(target.num_bytes), max_bytes=self._lanes.lane_bytes, max_items=_MAX_FILES
        ):
            if aligned(group[0].num_bytes) > self._lanes.lane_bytes:
                results.append(ReadResult.ABSENT)  # Of a store with a larger pool.
                continue
            with self._lanes.lane() as lane:
                places = lane.places([target.num_bytes for target in group])
                found = self._run(lane, lambda lane=lane, group=group, places=places: self._read(lane, group, places))  # type: ignore[misc]
                for target, (offset, _), result in zip(group, places, found, strict=True):
                    if result is ReadResult.READ:
                        lane.copy_out(target, offset)
            results += found
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for part in _parts(keys):
            with self._lanes.lane() as lane:
                found += self._run(lane, lambda part=part: [self._folder.has(key) for key in part])  # type: ignore[misc]
        return found

    def remove(self, keys: Sequence[bytes]) -> None:
        for part in _parts(keys):
            with self._lanes.lane() as lane:
                self._run(lane, lambda part=part: self._folder.remove(part))  # type: ignore[misc]

    def usage(self) -> Usage:
        folder = self._folder
        return Usage(folder.totals.num_files, folder.totals.num_bytes, self._written, folder.num_evicted)

    def close(self) -> None:
        if self._lanes.close():
            self._nixl.close()

    def _run(self, lane: Lane, call: Callable[[], T]) -> T:
        try:
            return lane.run(call)
        except OSError as error:
            raise self._folder.failure(error) from error

    def _write(self, lane: Lane, group: Sequence[StoredPage], places: Sequence[tuple[int, int]]) -> None:
        left = self._folder.take_room([(page.key, page.num_bytes) for page in group])
        try:
            wanted = [Place(*at, file.fd) for at, file in zip(places, left, strict=True)]
            # NIXL before 1.5 says that a transfer is done of which a full disk has taken a part.
            if not self._nixl.write(lane, wanted) or not all(map(_is_whole, wanted)):
                raise self._why(lane, places, left)
            while left:
                self._folder.publish(left.pop(0))
        finally:
            if left:
                self._folder.give_up(left)

    def _why(self, lane: Lane, places: Sequence[tuple[int, int]], files: Sequence[NewFile]) -> KvStoreError:
        """The failure of a transfer, which NIXL does not name: the file system is asked by a write of our own."""
        for (offset, num_bytes), file in zip(places, files, strict=True):
            try:
                written = os.pwrite(file.fd, lane.memory[offset : offset + num_bytes].data, 0)
                if written < num_bytes:
                    os.pwrite(file.fd, lane.memory[offset + written : offset + num_bytes].data, written)
            except OSError as error:
                return self._folder.failure(error)
        return KvStoreError(StoreFailure.UNAVAILABLE, "NIXL could not write what the file system takes: see its log")

    def _read(self, lane: Lane, group: Sequence[ReadTarget], places: Sequence[tuple[int, int]]) -> list[ReadResult]:
        results = [ReadResult.ABSENT] * len(group)
        files: dict[int, int] = {}
        """Descriptors, by the index of their target."""
        try:
            for at, target in enumerate(group):
                if (found := self._folder.open(target.key)) is None:
                    continue
                files[at], size = found
                results[at] = ReadResult.READ if size == target.num_bytes else ReadResult.DAMAGED
            for at in files:
                # Of an earlier record: it must not complete a file that is cut now.
                lane.memory[places[at][0] : places[at][0] + len(group[at].head)] = 0
            wanted = {at: Place(*places[at], fd) for at, fd in files.items() if results[at] is ReadResult.READ}
            if wanted and not self._nixl.read(lane, list(wanted.values())):
                # One file that was cut meanwhile, or lies on a bad sector, fails all of them.
                bad = {at: place for at, place in wanted.items() if not self._nixl.read(lane, [place])}
                if bad.keys() == wanted.keys() and all(_is_whole(place) for place in bad.values()):
                    raise KvStoreError(StoreFailure.UNAVAILABLE, "NIXL can read none of the files: look after the disk")
                for at in bad:
                    results[at] = ReadResult.DAMAGED
        finally:
            for fd in files.values():
                with suppress(OSError):
                    os.close(fd)
        return results


def _is_whole(place: Place) -> bool:
    return os.fstat(place.device).st_size == place.num_bytes


def _parts(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[at : at + _MAX_NAMES] for at in range(0, len(keys), _MAX_NAMES)]
