"""The seam of a medium that keeps records of pages: a disk, Redis, S3, NIXL, Mooncake.

A backend moves bytes. It neither checks nor makes checksums, and it has no queue: `store.py` does both, for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from radixmesh.daemons.runtime.errors import ErrorReason, MeshError


class StoreFailure(Enum):
    """FULL: no room for what is written. UNAVAILABLE: the medium fails or does not answer. TOO_LARGE: the record fits
    no store of this size. BUSY: our own queue is full. OFF: not tried, because of a failure a moment ago. IN_USE:
    another process has the folder. SETTINGS: no store can be made of what was asked for. CLOSED: by us."""

    FULL = auto()
    UNAVAILABLE = auto()
    TOO_LARGE = auto()
    BUSY = auto()
    OFF = auto()
    IN_USE = auto()
    SETTINGS = auto()
    CLOSED = auto()


_REASONS = {
    StoreFailure.FULL: ErrorReason.ERROR_REASON_OVERLOADED,
    StoreFailure.UNAVAILABLE: ErrorReason.ERROR_REASON_NOT_SERVING,
    StoreFailure.TOO_LARGE: ErrorReason.ERROR_REASON_NEVER_FITS,
    StoreFailure.BUSY: ErrorReason.ERROR_REASON_OVERLOADED,
    StoreFailure.OFF: ErrorReason.ERROR_REASON_NOT_SERVING,
    StoreFailure.IN_USE: ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
    StoreFailure.SETTINGS: ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
    StoreFailure.CLOSED: ErrorReason.ERROR_REASON_NOT_SERVING,
}


class KvStoreError(MeshError):
    """A store did not do what it was asked for; whoever asked goes on without."""

    def __init__(self, failure: StoreFailure, message: str) -> None:
        super().__init__(_REASONS[failure], message, {"failure": failure.name.lower()})
        self.failure = failure


class StoredPage(NamedTuple):
    """A record to be written: head (`encode_head()`) and payload, one after the other."""

    key: bytes
    head: bytes
    payload: memoryview

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.payload.nbytes


class ReadTarget(NamedTuple):
    """A record to be read, into memory of exactly its size: `head` takes head and ids, `payload` the KV."""

    key: bytes
    head: memoryview
    payload: memoryview

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.payload.nbytes


class ReadResult(Enum):
    """READ: both memories are filled. ABSENT: there is no such page. DAMAGED: a record of another length."""

    READ = auto()
    ABSENT = auto()
    DAMAGED = auto()


class KvBackend(ABC):
    """All calls block and may come from several threads at once. Every call raises KvStoreError UNAVAILABLE where the
    medium fails; memory of a read that was not READ holds anything.

    is_shared: what one process writes others read. medium_id: that the medium keeps with itself, by which processes
    know that they share it; empty: its URL tells.
    """

    is_shared: bool = False
    medium_id: str = ""

    @abstractmethod
    def write(self, pages: Sequence[StoredPage]) -> int:
        """Writes pages that are not there yet; how many were written. In order: when it raises, a prefix of them may be
        there. Raises KvStoreError FULL or TOO_LARGE."""

    @abstractmethod
    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        """Reads pages, one result for each."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """True for each page that is there now. It may be gone when it is read."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Takes pages back. Those that are not there are passed over."""

    @abstractmethod
    def usage(self) -> Usage:
        """Counts of the medium, as far as they are known without asking a server."""

    @abstractmethod
    def close(self) -> None:
        """Lets the medium go, once. No call comes afterwards."""


class Usage(NamedTuple):
    """num_pages, num_bytes: held, 0 where only a server knows. written_bytes: to the medium since the start, with
    heads, indexes and rewrites. evicted_pages: to make room, since the start, by this process: servers tell of none."""

    num_pages: int = 0
    num_bytes: int = 0
    written_bytes: int = 0
    evicted_pages: int = 0
