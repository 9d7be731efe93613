"""Pages in a dictionary: the simplest backend, against which the others are tested."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from radixmesh.daemons.worker.kv_store.backend import (
    KvBackend,
    KvStoreError,
    ReadResult,
    ReadTarget,
    StoredPage,
    StoreFailure,
    Usage,
)


class MemoryBackend(KvBackend):
    """budget_bytes: of all records together; the least recently read or written go first."""

    def __init__(self, *, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self.records: dict[bytes, bytes] = {}
        self._num_bytes = self._written = self._evicted = 0

    def write(self, pages: Sequence[StoredPage]) -> int:
        num = 0
        with self._lock:
            for page in pages:
                record = page.head + bytes(page.payload)
                if len(record) > self._budget:
                    message = f"a page of {len(record)} bytes fits no store of {self._budget}: give it more bytes"
                    raise KvStoreError(StoreFailure.TOO_LARGE, message)
                if page.key in self.records:
                    continue
                while self._num_bytes + len(record) > self._budget:
                    self._num_bytes -= len(self.records.pop(next(iter(self.records))))
                    self._evicted += 1
                self.records[page.key] = record
                self._num_bytes += len(record)
                self._written += len(record)
                num += 1
        return num

    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        with self._lock:
            return [self._read(target) for target in targets]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.records for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._num_bytes -= len(self.records.pop(key, b""))

    def usage(self) -> Usage:
        return Usage(len(self.records), self._num_bytes, self._written, self._evicted)

    def close(self) -> None:
        self.records.clear()

    def _read(self, target: ReadTarget) -> ReadResult:
        if (record := self.records.pop(target.key, None)) is None:
            return ReadResult.ABSENT
        self.records[target.key] = record
        return fill(target, record)


def fill(target: ReadTarget, record: bytes) -> ReadResult:
    """Copies a whole record to where it is wanted."""
    if len(record) != target.num_bytes:
        return ReadResult.DAMAGED
    view, num = memoryview(record), len(target.head)
    target.head[:], target.payload[:] = view[:num], view[num:]
    return ReadResult.READ
