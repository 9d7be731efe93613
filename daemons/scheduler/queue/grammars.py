"""Compiled grammars as routers bring them: kept by hash, once for all requests that follow them."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

# Of grammars that live requests follow, each once.
MAX_LIVE_BYTES = 256 << 20
# Grammars that no request follows any more, for those that name one without bringing it.
_MAX_KEPT_BYTES = 64 << 20
# Small ones take more memory than their bytes.
_MAX_KEPT = 4096
MAX_GRAMMAR_BYTES = 16 << 20


class Grammar:
    """hash: SHA-256 (hex) of data, as the worker is given it."""

    __slots__ = ("__weakref__", "data", "hash")

    def __init__(self, blob_hash: str, data: bytes) -> None:
        self.hash = blob_hash
        self.data = data


class GrammarShelf:
    """Bounded in bytes, whatever routers send."""

    def __init__(self, max_live_bytes: int = MAX_LIVE_BYTES, max_kept_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_live_bytes = max_live_bytes
        self._max_kept_bytes = max_kept_bytes
        self._live: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._num_kept_bytes = 0
        self.num_live_bytes = 0
        """Of all grammars here, followed or kept."""

    def find(self, blob_hash: str) -> Grammar:
        """Raises UNKNOWN_BLOB: the router sends the grammar with its next submit then."""
        found = self._live.get(blob_hash)
        if found is None:
            message = f"the grammar {blob_hash[:64]!r} is not here: send its blob with the submit"
            raise MeshError(ErrorReason.ERROR_REASON_UNKNOWN_BLOB, message, {"hash": blob_hash[:64]})
        self._keep(found)
        return found

    def add(self, blob_hash: str, data: bytes) -> Grammar:
        """Raises BLOB_TOO_LARGE, INVALID_ARGUMENT for a wrong hash, OVERLOADED beyond the bound."""
        found = self._live.get(blob_hash)
        if found is not None:
            self._keep(found)
            return found
        size = len(data)
        if size > MAX_GRAMMAR_BYTES:
            message = f"the grammar has {size} bytes: {MAX_GRAMMAR_BYTES} at most"
            details = {"size": str(size), "max": str(MAX_GRAMMAR_BYTES)}
            raise MeshError(ErrorReason.ERROR_REASON_BLOB_TOO_LARGE, message, details)
        if hashlib.sha256(data).hexdigest() != blob_hash:
            message = "a blob's hash is not the SHA-256 of its data: send lower-case hex of the content"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "blobs.hash"})
        while self._kept and self.num_live_bytes + size > self._max_live_bytes:
            self._drop_oldest()
        if self.num_live_bytes + size > self._max_live_bytes:
            message = f"grammars of running requests take {self.num_live_bytes} bytes here: retry later or elsewhere"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000"})
        grammar = Grammar(blob_hash, data)
        self.num_live_bytes += size
        weakref.finalize(grammar, self._gone, size)
        self._live[blob_hash] = grammar
        self._keep(grammar)
        return grammar

    def _gone(self, size: int) -> None:
        self.num_live_bytes -= size

    def _keep(self, grammar: Grammar) -> None:
        if grammar.hash not in self._kept:
            self._num_kept_bytes += len(grammar.data)
        self._kept[grammar.hash] = grammar
        self._kept.move_to_end(grammar.hash)
        while len(self._kept) > _MAX_KEPT or (self._num_kept_bytes > self._max_kept_bytes and len(self._kept) > 1):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, dropped = self._kept.popitem(last=False)
        self._num_kept_bytes -= len(dropped.data)
