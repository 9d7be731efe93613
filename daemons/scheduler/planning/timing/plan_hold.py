"""The time for which the next plan is held while a long step runs, so that it has the requests that come until then.

A plan that leaves as soon as the last result is in waits at the worker for a whole step, and a request that comes in
that time waits for two. Held until a gap before the end of what is in flight, it has that request too: half a step
less to the first token in the mean, and the device does not idle. The end must not be guessed late: the shortest of
the last steps, by what was expected of them, tells the earliest one. A result that comes earlier ends the hold, so a
wrong guess costs one gap. How long the device stood still between two steps is in their results: by so much, plans
behind leave earlier, and then bit by bit later again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.scheduler.planning.timing.step_estimate import StepEstimate
from radixmesh.daemons.scheduler.planning.timing.token_time import TokenTime
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep

# Steps whose shortest one counts, and as many as it takes before anything is held.
_REMEMBERED, _LEAST_KNOWN = 32, 8
# Beyond the gap: the loop wakes late on a busy core. What it keeps of that, step by step.
_FIRST_SLACK_US, _LEAST_SLACK_US, _MOST_SLACK_US = 2_000.0, 500.0, 50_000.0
_KEPT = 0.99
# A device that stands still for less does so between any two steps.
_IDLE_US = 150.0
# A step has to be so many gaps long for the device to wait one; what is gained, as a multiple of what is lost.
_LEAST_GAPS, _WORTH = 4.0, 4.0
# A shorter hold gains less than a timer costs.
_SHORTEST_US = 2_000.0


class PlanHold:
    """Learns how much shorter than expected steps are, those of decodes alone apart from those with prompts."""

    def __init__(self, estimate: StepEstimate, token_time: TokenTime) -> None:
        self._estimate = estimate
        self._token_time = token_time
        self._ratios: dict[bool, deque[float]] = {}
        self._is_line_known = False
        self._last_end_ns = 0
        """Of the last step; 0 = what was before the next one is no time that the device stood still for a plan."""
        self.slack_us = _FIRST_SLACK_US
        """Time before the end of what is in flight, beyond a gap."""

    def observe(self, step: PlannedStep, result: StepResult, *, followed: bool) -> None:
        """A step's result came. followed: its plan was sent while the one before ran. Call it before the estimates
        learn of it."""
        if not step.plan.has_forward:
            # Releases or a barrier, of times that are the host's: the device had nothing to do before the next step.
            self._last_end_ns = 0
            return
        device_us = (result.device_end_ns - result.device_start_ns) / 1000
        idle_us, has_last = (result.device_start_ns - self._last_end_ns) / 1000, self._last_end_ns > 0
        self._last_end_ns = result.device_end_ns
        if followed and has_last:
            late_us = idle_us if idle_us > _IDLE_US else 0.0
            self.slack_us = min(max(_KEPT * self.slack_us + late_us, _LEAST_SLACK_US), _MOST_SLACK_US)
        if self._is_line_known != bool(self._token_time.us):
            # Another estimate, other ratios.
            self._is_line_known = bool(self._token_time.us)
            self._ratios.clear()
        expected_us = self._expected_us(step)
        if expected_us > 0 and device_us > 0:
            self._ratios_of(step).append(device_us / expected_us)

    def least_us(self, step: PlannedStep) -> float:
        """Microseconds that the step takes at least, as far as is known; 0 = not known."""
        ratios = self._ratios_of(step)
        return min(ratios) * self._expected_us(step) if len(ratios) >= _LEAST_KNOWN else 0.0

    def seconds(self, steps: Sequence[PlannedStep], started_s: float, now: float, gap_us: float) -> float:
        """For how long the next plan can wait; 0 = not at all.

        steps: in flight, not empty; the first one runs since started_s.
        """
        least_us = sum(map(self.least_us, steps))
        hold_us = least_us - gap_us - self.slack_us - 1e6 * (now - started_s)
        return hold_us / 1e6 if hold_us >= _SHORTEST_US else 0.0

    def is_worth_a_gap(self, step: PlannedStep, num_followers: int, num_rows: int, gap_us: float) -> bool:
        """True if the device shall wait a gap for the plan behind the running step, which is made of its result then.

        num_followers: requests that wait for a prefix which this step completes, and would be a step late otherwise.
        num_rows: outputs that stand still meanwhile.
        """
        least_us = self.least_us(step)
        return least_us >= _LEAST_GAPS * gap_us and num_followers * least_us >= _WORTH * (num_rows + 1) * gap_us

    def _ratios_of(self, step: PlannedStep) -> deque[float]:
        return self._ratios.setdefault(bool(step.chunks), deque(maxlen=_REMEMBERED))

    def _expected_us(self, step: PlannedStep) -> float:
        if not step.plan.has_forward:
            return 0.0  # Releases, or a barrier: of no length that is known.
        if self._token_time.us:
            return self._token_time.expect_us(step.num_tokens)
        # That of another size is meant to be too long rather than too short.
        return self._estimate.expect_us(step.num_tokens) if self._estimate.knows(step.num_tokens) else 0.0
