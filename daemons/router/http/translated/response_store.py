"""Answers of /v1/responses that may be asked for, or gone on from, by their ids: bounded, in memory, a router's own."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

_MAX_ENTRIES = 65_536
# One conversation may take so much of the store: a longer one would throw out everybody else's.
_SHARE = 8
# Beside its bytes an entry costs about this.
_ENTRY_BYTES = 512


class StoredResponse(NamedTuple):
    """chat: ChatInput with all messages up to the answer, instructions left out. body: the answer as JSON."""

    chat: bytes
    body: bytes


class ResponseStore:
    """The least recently used leave first. max_bytes: of all; 0 = nothing is kept. Each tenant has names of its own."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keeps an answer, unless it is longer than one may be."""
        size = _size(stored)
        if size > self._max_bytes // _SHARE:
            return
        self.remove(tenant, response_id)
        self._entries[tenant, response_id] = stored
        self._num_bytes += size
        while self._num_bytes > self._max_bytes or len(self._entries) > _MAX_ENTRIES:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= _size(oldest)

    def get(self, tenant: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """Raises UNKNOWN_REQUEST naming the field."""
        found = self._entries.get((tenant, response_id))
        if found is None:
            message = (
                f"{field}: this router keeps no response {response_id[:64]!r}: it was made by another router, with "
                "store false, or so long ago that others took its place; send the conversation as input"
            )
            raise MeshError(ErrorReason.ERROR_REASON_UNKNOWN_REQUEST, message, {"field": field})
        self._entries.move_to_end((tenant, response_id))
        return found

    def remove(self, tenant: str, response_id: str) -> bool:
        """True if it was there."""
        found = self._entries.pop((tenant, response_id), None)
        if found is not None:
            self._num_bytes -= _size(found)
        return found is not None


def _size(stored: StoredResponse) -> int:
    return len(stored.chat) + len(stored.body) + _ENTRY_BYTES
