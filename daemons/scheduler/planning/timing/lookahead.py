"""Number of plans to send ahead, and at once. Lookahead is time: `gap` of work waits at the worker, in few plans.

With depth d (plans beyond the one that runs), steps of time s and a gap g between a result and the arrival of the plan
that it allows, the device idles for 1 - s / max(s, (s + g) / (d + 1)) of the time: nothing once d >= g / s. More depth
than that only adds to the time to first token, since a new request queues behind the plans already sent.

Short steps of decodes alone travel in batches: one message, one launch and one answer for several, since what either
side pays for a message would bound them otherwise. The plans behind the batch that runs have to last for the gap then.
"""

from __future__ import annotations

# Until measured; figures of a prototype were 1.3 to 2.7 ms.
_FIRST_GAP_US = 2_000.0
_RISE, _FALL = 0.5, 0.02
_MAX_GAP_US = 50_000.0
# Of the steps of a batch together: tokens reach clients so much later than one by one, at most.
_BATCH_US = 2_500


class Lookahead:
    """Decides whether to plan further. depth None = by time; else a fixed number of plans beyond the one that runs.

    max_in_flight: the worker's own limit of plans taken ahead.
    """

    def __init__(self, *, depth: int | None, max_in_flight: int) -> None:
        self._depth = depth
        self.max_in_flight = max(1, max_in_flight)
        self.gap_us = _FIRST_GAP_US

    def observe_round_trip(self, round_trip_us: float, device_us: float) -> None:
        """A plan sent while nothing ran came back after `round_trip_us`, of which the device took `device_us`.

        Rises fast and falls slowly: too short a gap idles the device, too long a one costs a little latency.
        """
        sample = min(max(0.0, round_trip_us - device_us), _MAX_GAP_US)
        weight = _RISE if sample > self.gap_us else _FALL
        self.gap_us += weight * (sample - self.gap_us)

    def wants_more(self, num_in_flight: int, queued_us: int) -> bool:
        """True if one more plan shall be sent now; `queued_us` is expected of the plans behind the batch that runs."""
        if num_in_flight >= self.max_in_flight:
            return False
        if num_in_flight == 0:
            return True
        if self._depth is not None:
            return num_in_flight <= self._depth
        return queued_us < self.gap_us

    def batch_size(self, step_us: int) -> int:
        """Plans of decodes alone, of steps that take `step_us`, to send as one message."""
        if self._depth is not None or step_us <= 0:
            return 1
        # Another batch has to queue behind the one that runs.
        return max(1, min(self.max_in_flight // 2, _BATCH_US // step_us))

    def depth_for(self, step_us: int) -> int:
        """Plans ahead that the rule keeps for steps of that time; what operators see."""
        limit = self.max_in_flight - 1
        if self._depth is not None:
            return min(self._depth, limit)
        if step_us <= 0:
            return min(1, limit)
        return min(max(1, -int(-self.gap_us // step_us)), limit)
