"""The size of one frame of a stream: bytes as serialised, and entries.

Servers refuse messages of more than is named below, and a stream that carried one is over. So every sender counts what
it puts into a frame, and begins another long before that.
"""

from __future__ import annotations

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

MAX_FRAME_BYTES = 4 << 20
MAX_FRAME_ENTRIES = 4096
# One entry may be larger than a frame, and has one for itself: a prompt of a million tokens is 4 MiB of ids.
MAX_ENTRY_BYTES = 32 << 20
# An output that a detokenizer is told of: a million ids, as many as it takes, and its stops.
MAX_OPEN_BYTES = 8 << 20
# Receive limits of servers: the largest frame, and tags, lengths and a hello around it. A plan holds as much as one
# frame and then one entry more, with the pages that are granted.
MAX_OPEN_FRAME_BYTES = MAX_OPEN_BYTES + (1 << 20)
MAX_SERVE_FRAME_BYTES = MAX_ENTRY_BYTES + MAX_FRAME_BYTES
MAX_PLAN_BYTES = MAX_ENTRY_BYTES + 2 * MAX_FRAME_BYTES
# Tag and length of an entry.
_FRAMING_BYTES = 8


class FrameBudget:
    """Room left in one frame. The first entry always fits."""

    __slots__ = ("_max_bytes", "_max_entries", "num_bytes", "num_entries")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES, max_entries: int = MAX_FRAME_ENTRIES) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self.num_bytes = 0
        self.num_entries = 0

    def take(self, num_bytes: int) -> bool:
        """True if an entry of so many bytes fits, which is counted then; False: it begins the next frame."""
        num_bytes += _FRAMING_BYTES
        if self.num_entries and (self.num_entries >= self._max_entries or self.num_bytes + num_bytes > self._max_bytes):
            return False
        self.num_entries += 1
        self.num_bytes += num_bytes
        return True


def too_large(what: str, size: int, largest: int = MAX_ENTRY_BYTES) -> MeshError:
    """The error for what no frame can carry, not even alone."""
    message = f"{what} takes {size} bytes, a message between daemons takes {largest}: send a smaller request"
    return MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"size": str(size), "max": str(largest)})
