"""The time after which a step without a result means that its worker is dead."""

from __future__ import annotations

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep

_HANG_FACTOR = 3.0
_MOST_PATIENCE_S = 600.0


class StepTimeout:
    """A step is dead after 3 x its expected time, never before least_s.

    Nothing is expected before the first result: a worker whose steps are longer than that gets twice the time in
    each epoch, or no result of it would ever come. Times are seconds of the caller's clock.
    """

    def __init__(self, least_s: float, now: float) -> None:
        self._least_s = least_s
        self._patience_s = least_s
        self._last_heard_s = now

    def restart(self, now: float) -> None:
        """The worker had nothing to answer until now."""
        self._last_heard_s = now

    def heard(self, now: float) -> None:
        """A result came."""
        self._last_heard_s = now
        self._patience_s = self._least_s

    def limit_s(self, oldest: PlannedStep | None) -> float:
        """Timeout of the oldest step in flight."""
        expected_us = oldest.plan.expected_us if oldest is not None else 0
        return max(self._patience_s, _HANG_FACTOR * expected_us / 1e6)

    def check(self, oldest: PlannedStep | None, now: float) -> None:
        """Raises STEP_TIMEOUT if the oldest step in flight is late; the next epoch is more patient."""
        if oldest is None:
            return
        limit_s = self.limit_s(oldest)
        waited_s = now - max(self._last_heard_s, oldest.sent_s)
        if waited_s > limit_s:
            self._patience_s = min(2 * limit_s, max(_MOST_PATIENCE_S, self._least_s))
            message = f"step {oldest.plan.step_id} has no result after {waited_s:.1f} s: the worker counts as dead"
            raise MeshError(ErrorReason.ERROR_REASON_STEP_TIMEOUT, message)
