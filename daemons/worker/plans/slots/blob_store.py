"""Blobs that plans name by hash (grammars): pinned while a slot names them, kept for a while after each put.

PUT, kept for a TTL --a slot names it--> PINNED --no slot names it any more--> LEFT (least recently named goes first)
   `--TTL over, or a new epoch--> LEFT
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

# From the answer to a put until the plan with the admit that names it: a scheduler puts what it admits next.
TTL_S = 30.0
# A blob of a few bytes costs some hundred.
MAX_BLOBS = 4096


class _Blob:
    __slots__ = ("data", "kept_until", "num_pins")

    def __init__(self, data: bytes, kept_until: float) -> None:
        self.data = data
        self.kept_until = kept_until
        self.num_pins = 0


class BlobStore:
    """Bytes by their SHA-256 (hex, lower case). Any thread may call.

    max_bytes: of all blobs together. max_blob_bytes: of one. clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_blob_bytes: int,
        max_blobs: int = MAX_BLOBS,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < max_blob_bytes <= max_bytes:
            raise ValueError(f"one blob of {max_blob_bytes} bytes must fit the store of {max_bytes}")
        self.max_blob_bytes = max_blob_bytes
        self.ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._max_blobs = max_blobs
        self._clock = clock
        self._num_bytes = 0
        # The least recently named first.
        self._blobs: OrderedDict[str, _Blob] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, blob_hash: str, data: bytes) -> bool:
        """Stores `data`, and keeps it for ttl_s; True if it was there already.

        Raises BLOB_TOO_LARGE, INVALID_ARGUMENT for a wrong hash, or OVERLOADED where slots and the TTLs of other blobs
        leave no room.
        """
        if len(data) > self.max_blob_bytes:
            raise MeshError(
                ErrorReason.ERROR_REASON_BLOB_TOO_LARGE,
                f"the blob has {len(data)} bytes: at most {self.max_blob_bytes} are kept",
                {"size": str(len(data)), "max": str(self.max_blob_bytes)},
            )
        actual = hashlib.sha256(data).hexdigest()
        if blob_hash != actual:
            raise MeshError(
                ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
                f"the blob's SHA-256 is {actual}, not {blob_hash!r}: send lower-case hex of the content",
                {"field": "hash"},
            )
        with self._lock:
            now = self._clock()
            blob = self._blobs.get(blob_hash)
            if blob is None:
                self._make_room(len(data), now)
                self._blobs[blob_hash] = _Blob(data, now + self.ttl_s)
                self._num_bytes += len(data)
                return False
            self._blobs.move_to_end(blob_hash)
            blob.kept_until = now + self.ttl_s
        return True

    def pin(self, blob_hash: str) -> bytes:
        """The blob, which stays until unpin(). A slot names it: its TTL is over. Raises UNKNOWN_BLOB."""
        with self._lock:
            blob = self._blobs.get(blob_hash)
            if blob is not None:
                self._blobs.move_to_end(blob_hash)
                blob.num_pins += 1
                blob.kept_until = 0.0
                return blob.data
        raise MeshError(
            ErrorReason.ERROR_REASON_UNKNOWN_BLOB,
            f"no blob {blob_hash!r} here: put it again, then admit again",
            {"hash": blob_hash},
        )

    def unpin(self, blob_hash: str) -> None:
        """One slot less names the blob, which pin() returned."""
        with self._lock:
            blob = self._blobs[blob_hash]
            assert blob.num_pins > 0, blob_hash
            blob.num_pins -= 1

    def begin_epoch(self) -> None:
        """Ends the TTLs of the epoch before; slots keep their pins."""
        with self._lock:
            for blob in self._blobs.values():
                blob.kept_until = 0.0

    def _make_room(self, num_bytes: int, now: float) -> None:
        """Drops blobs that nobody holds, the least recently named first, until one of num_bytes fits."""
        surplus = self._num_bytes + num_bytes - self._max_bytes
        num_surplus = len(self._blobs) + 1 - self._max_blobs
        if surplus <= 0 and num_surplus <= 0:
            return
        dropped: list[str] = []
        for name, blob in self._blobs.items():
            if blob.num_pins or blob.kept_until > now:
                continue
            dropped.append(name)
            surplus -= len(blob.data)
            num_surplus -= 1
            if surplus <= 0 and num_surplus <= 0:
                break
        else:
            message = (
                f"slots and blobs put in the last {self.ttl_s:g} s hold the store's {self._max_blobs} entries or"
                f" {self._max_bytes} bytes: retry later, or start the worker with more --blob-store-bytes"
            )
            details = {"retry_after_ms": "1000", "max": str(self._max_bytes)}
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, details)
        for name in dropped:
            self._num_bytes -= len(self._blobs.pop(name).data)
