"""Blobs that plans name by hash: grammars, embeddings. Bounded; the least recently named go first."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError


class BlobStore:
    """Bytes by their SHA-256 (hex, lower case). Any thread may call.

    max_bytes: of all blobs together. max_blob_bytes: of one.
    """

    def __init__(self, *, max_bytes: int, max_blob_bytes: int) -> None:
        if not 0 < max_blob_bytes <= max_bytes:
            raise ValueError(f"one blob of {max_blob_bytes} bytes must fit the store of {max_bytes}")
        self.max_blob_bytes = max_blob_bytes
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, blob_hash: str, data: bytes) -> bool:
        """Stores `data`; True if it was there already. Raises BLOB_TOO_LARGE, or INVALID_ARGUMENT for a wrong hash."""
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
            if blob_hash in self._blobs:
                self._blobs.move_to_end(blob_hash)
                return True
            self._blobs[blob_hash] = data
            self._num_bytes += len(data)
            while self._num_bytes > self._max_bytes:
                _, evicted = self._blobs.popitem(last=False)
                self._num_bytes -= len(evicted)
        return False

    def get(self, blob_hash: str) -> bytes:
        """The blob, which counts as named now. Raises UNKNOWN_BLOB."""
        with self._lock:
            data = self._blobs.get(blob_hash)
            if data is not None:
                self._blobs.move_to_end(blob_hash)
                return data
        raise MeshError(
            ErrorReason.ERROR_REASON_UNKNOWN_BLOB, f"no blob {blob_hash!r} here: put it again", {"hash": blob_hash}
        )
