"""Staging memory of transfers: regions of one pool of bytes, each with a stamp at head and tail.

  | stamp, 32 bytes | chunk of tokens | chunk | ... | stamp, 32 bytes |

A chunk holds CHUNK_TOKENS tokens, the last one fewer: the rows of plane after plane, layer after layer. Both ends
lay it out alike, whatever their page sizes are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray

STAMP_BYTES = 32
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionKey:
    """Identity of a region: what a writer was told, and what is found at head and tail once it has written.

    incarnation: random, of this region alone. instance_id: of the receiving process. epoch: in which it was prepared.
    """

    transfer_id: str
    incarnation: int
    instance_id: str
    epoch: int

    def stamp(self) -> bytes:
        """32 bytes that differ for any two regions."""
        text = f"{self.transfer_id}\0{self.incarnation}\0{self.instance_id}\0{self.epoch}"
        return hashlib.sha256(text.encode()).digest()


class Chunk(NamedTuple):
    """Tokens [first, first + num) of a region, from byte `offset` on."""

    first: int
    num: int
    offset: int


def region_bytes(num_tokens: int, token_bytes: int) -> int:
    """Bytes of a region for so many tokens, stamps included."""
    return 2 * STAMP_BYTES + num_tokens * token_bytes


def chunks_of(num_tokens: int, token_bytes: int, size: int = CHUNK_TOKENS) -> Iterator[Chunk]:
    """Chunks of a region in order, or several at a time. size: multiple of CHUNK_TOKENS."""
    for first in range(0, num_tokens, size):
        yield Chunk(first, min(size, num_tokens - first), STAMP_BYTES + first * token_bytes)


class StagingPool:
    """Bytes of all regions and send buffers together, bounded. Each has memory of its own: what nobody reserved is not
    held."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Counts so many bytes. Raises OVERLOADED where there is no room now, NEVER_FITS where there never is."""
        if num_bytes > self.max_bytes:
            message = (
                f"the KV takes {num_bytes} bytes, staging has {self.max_bytes}: compute the prompt where it decodes"
            )
            details = {"max": str(self.max_bytes)}
            raise MeshError(ErrorReason.ERROR_REASON_NEVER_FITS, message, details)
        if self.num_bytes + num_bytes > self.max_bytes:
            message = (
                f"{self.num_bytes} of {self.max_bytes} bytes of staging are in use: compute the prompt where it decodes"
            )
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Nobody reads or writes them any more."""
        self.num_bytes -= num_bytes


def has_stamps(memory: ByteArray, stamp: bytes) -> bool:
    """True if head and tail are that region's."""
    return memory[:STAMP_BYTES].tobytes() == stamp and memory[-STAMP_BYTES:].tobytes() == stamp
