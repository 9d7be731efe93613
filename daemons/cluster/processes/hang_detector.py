"""Decides from the answers to health checks whether a process is starting, healthy, unwell or hung.

STARTING --serving--> HEALTHY --anything else--> UNWELL --for the window--> HUNG
    |                    ^------serving------------'
    '--silent for start period + window--> HUNG
"""

import enum

from radixmesh.daemons.cluster.compose.compose import HealthCheck

# Of the time between two checks, the largest part that want of a CPU excuses: what hangs while it computes waits for a
# CPU as well on a loaded machine, and is found hung after five windows at most.
_MOST_STARVED = 0.8


class ProbeAnswer(enum.Enum):
    """Answer to one health check."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    """It answers and says that it does not serve: loading, or work pending without progress."""
    DRAINING = "draining"
    """It answers that it finishes what it has and then leaves."""
    REFUSED = "refused"
    """Nothing listens at its address: not there yet, or it has closed its listener to finish what it has."""
    SILENT = "silent"
    """The connection is taken and no answer comes: stopped or wedged."""


class Liveness(enum.Enum):
    """State of a process, by its answers so far."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UNWELL = "unwell"
    HUNG = "hung"


class HangDetector:
    """Judges one run of a process; a new run gets a new detector.

    Silence counts against a process at once; draining and a closed listener only after the time it has for stopping.
    NOT_SERVING before it ever served is loading and counts never; later it counts unless `excused`, which the caller
    says while something the process depends on is itself not healthy: then it is not the cause, and killing it
    would only spread the damage. Time in which it waited for a CPU counts never: on a loaded machine everybody is slow
    to answer, and restarts make it more so. A process that is stopped or blocked waits for none.
    """

    def __init__(self, check: HealthCheck, *, window_s: float, stop_grace_s: float) -> None:
        self._check = check
        self._window_s = window_s
        self._stop_grace_s = stop_grace_s
        self._has_served = False
        self._unwell_s = 0.0
        self._leaving_s = 0.0

    def observe(self, answer: ProbeAnswer, *, elapsed_s: float, excused: bool, starved_s: float = 0.0) -> Liveness:
        """Takes an answer and the seconds since the previous one, and returns the state of the process.

        starved_s: of those seconds, the ones that the process, or the one that asks it, had to wait for a CPU.
        """
        elapsed_s -= min(starved_s, _MOST_STARVED * elapsed_s)
        # A pause of the supervisor itself (a suspended machine) must not be read as a pause of the process.
        elapsed_s = min(elapsed_s, 2 * (self._check.interval_s + self._check.timeout_s))
        if answer is ProbeAnswer.SERVING:
            self._has_served = True
            self._unwell_s = self._leaving_s = 0.0
            return Liveness.HEALTHY
        if not self._has_served:
            is_alive = answer in (ProbeAnswer.NOT_SERVING, ProbeAnswer.DRAINING)
            self._unwell_s = 0.0 if is_alive else self._unwell_s + elapsed_s
            return Liveness.HUNG if self._unwell_s >= self._check.start_period_s + self._window_s else Liveness.STARTING
        if answer in (ProbeAnswer.DRAINING, ProbeAnswer.REFUSED):
            self._leaving_s += elapsed_s
            return Liveness.HUNG if self._leaving_s >= max(self._window_s, self._stop_grace_s) else Liveness.UNWELL
        is_excused = answer is ProbeAnswer.NOT_SERVING and excused
        self._unwell_s = 0.0 if is_excused else self._unwell_s + elapsed_s
        return Liveness.HUNG if self._unwell_s >= self._window_s else Liveness.UNWELL
