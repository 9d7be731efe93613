"""Pages that KV transfers read or write: they stay the transfer's, whatever becomes of the scheduler that began it.

pin() --> HELD, listed by snapshots --release()--> RELEASED --told by the next result, or a new epoch--> forgotten
"""

from __future__ import annotations

import threading

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import MAX_PINNED_TRANSFERS, MAX_TRANSFER_ID_BYTES


class TransferPins:
    """By transfer id. Transfers pin and release on threads of their own; the step thread tells the scheduler."""

    def __init__(self) -> None:
        self._held: dict[str, IntArray] = {}
        self._released: list[str] = []
        self._lock = threading.Lock()

    def pin(self, transfer_id: str, pages: IntArray) -> None:
        """The transfer uses these pages, int32, until release(). Raises INVALID_ARGUMENT or OVERLOADED."""
        if not 0 < len(transfer_id.encode()) <= MAX_TRANSFER_ID_BYTES:
            message = f"transfer_id has {len(transfer_id.encode())} bytes: send 1 to {MAX_TRANSFER_ID_BYTES}"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "transfer_id"})
        with self._lock:
            if transfer_id in self._held:
                message = f"transfer {transfer_id!r} holds pages already: choose another id"
                raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "transfer_id"})
            if len(self._held) >= MAX_PINNED_TRANSFERS:
                message = f"{MAX_PINNED_TRANSFERS} transfers hold pages here: retry when some are over"
                raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000"})
            self._held[transfer_id] = pages.copy()

    def release(self, transfer_id: str) -> None:
        """No reader or writer of the transfer is left. Unknown ids are fine."""
        with self._lock:
            if self._held.pop(transfer_id, None) is not None:
                self._released.append(transfer_id)

    def begin_epoch(self) -> None:
        """The snapshot that the claimant reads does not list what was released before."""
        with self._lock:
            self._released.clear()

    def held(self) -> dict[str, IntArray]:
        """Pages by transfer id."""
        with self._lock:
            return dict(self._held)

    def take_released(self) -> tuple[str, ...]:
        """Transfers that were released and not told of yet."""
        if not self._released:
            return ()
        with self._lock:
            released, self._released = tuple(self._released), []
            return released
