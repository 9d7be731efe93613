"""The seam of what carries KV from one worker's memory to another's."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod

from radixmesh.daemons.worker.kv_transfer.staging import ByteArray
from radixmesh.worker.v1 import worker_pb2

# Bytes of one write: an event loop copies as many in about a tenth of a millisecond.
WRITE_BYTES = 1 << 20


class KvTransport(ABC):
    """Writes whole regions. Any number of calls at a time."""

    writes_are_seen: bool
    """True if the receiver itself copies what arrives: a region that it gives up is not written any more."""

    @abstractmethod
    async def send(self, address: str, region: worker_pb2.TransferRegion, writer: str, memory: ByteArray) -> None:
        """Writes memory, all bytes of it, to the region of the worker at `address`, and says the last word.

        writer: instance id of this process. Returns when the receiver has heard the last word. Raises MeshError where
        it refused, was lost, or took nothing for too long. Afterwards `memory` is not read any more, whatever came.
        """


def checksum_of(memory: ByteArray) -> int:
    """CRC-32 of all bytes."""
    return zlib.crc32(memory.data)
