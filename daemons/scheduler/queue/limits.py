"""Limits of the waiting queue, and the time after which a refused router may retry."""

from __future__ import annotations

import math

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

# Rates are of about the last so many seconds in which anything waited.
_MEMORY_S = 10.0
_LEAST_MS, _MOST_MS = 100, 60_000
# Until a rate is known.
_FIRST_MS = 1_000


class QueueLimits:
    """max_requests, max_tokens (None = no bound): what may wait at a time. Learns how fast the queue moves."""

    def __init__(self, max_requests: int, max_tokens: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._last_s: float | None = None
        self._seconds = 0.0
        self._num_admitted = 0.0

    def planned(self, now: float, num_admitted: int, num_waiting: int) -> None:
        """A plan was made: so many got out of the queue, so many still wait."""
        passed = max(0.0, now - self._last_s) if self._last_s is not None else 0.0
        self._last_s = now
        if not num_admitted and not num_waiting:
            return  # Nobody waited: that says nothing of how fast the queue could move.
        kept = math.exp(-passed / _MEMORY_S)
        self._seconds = self._seconds * kept + passed
        self._num_admitted = self._num_admitted * kept + num_admitted

    def retry_after_ms(self, num_waiting: int) -> int:
        """Time that the queue of now takes to get through, at the rate of late."""
        if self._num_admitted < 1.0 or self._seconds <= 0.0:
            return _FIRST_MS
        wait_ms = 1000.0 * num_waiting * self._seconds / self._num_admitted
        return int(min(max(wait_ms, _LEAST_MS), _MOST_MS))

    def check(self, num_waiting: int, waiting_tokens: int) -> None:
        """Raises OVERLOADED, with retry_after_ms, if nobody else may wait."""
        if num_waiting < self._max_requests and (self._max_tokens is None or waiting_tokens < self._max_tokens):
            return
        retry_after_ms = self.retry_after_ms(num_waiting)
        raise MeshError(
            ErrorReason.ERROR_REASON_OVERLOADED,
            f"{num_waiting} requests of {waiting_tokens} tokens wait: retry in {retry_after_ms} ms, or elsewhere",
            {"retry_after_ms": str(retry_after_ms), "num_waiting": str(num_waiting)},
        )
