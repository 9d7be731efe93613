"""Health as progress: what a daemon says of itself to probes and load balancers. Pure: no I/O.

LOADING ---loaded---> SERVING ---work pending, nothing completed for stall_s---> STALLED
   |                    |  ^- something completed, nothing pending, or more patience -|
   |                    |                                                            |
   +-------drain--------+----------------------------drain---------------------------+---> DRAINING (for good)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError


class State(StrEnum):
    LOADING = "loading"
    SERVING = "serving"
    STALLED = "stalled"
    DRAINING = "draining"


class Progress:
    """Work that a daemon has, and the time of its last progress. No I/O; may be called from any thread.

    stall_s: seconds of pending work without a completion after which the daemon counts as stalled.
    clock: monotonic seconds.
    """

    def __init__(self, *, stall_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        if stall_s <= 0:
            raise ValueError(f"stall_s must be > 0, not {stall_s}")
        self.stall_s = stall_s
        self._clock = clock
        self._lock = threading.Lock()
        self._is_loaded = False
        self._is_draining = False
        self._num_pending = 0
        self._patience_s = stall_s
        self._num_completed = 0
        self._since = clock()  # Of the last completion, or of the first pending item after none.
        self._listeners: list[Callable[[], None]] = []

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    @property
    def num_pending(self) -> int:
        return self._num_pending

    @property
    def num_completed(self) -> int:
        return self._num_completed

    @property
    def state(self) -> State:
        with self._lock:
            if self._is_draining:
                return State.DRAINING
            if not self._is_loaded:
                return State.LOADING
            return State.STALLED if self._is_stalled() else State.SERVING

    def loaded(self) -> None:
        """Loading is over. Pending work counts from now."""
        with self._lock:
            self._is_loaded = True
            self._since = self._clock()
        self._tell()

    def work_pending(self, num: int, *, patience_s: float = 0.0) -> None:
        """num items are pending now (absolute; 0 = idle). From none to some starts the stall clock.

        patience_s: how long the item under way may take; counts where it is more than stall_s.
        """
        assert num >= 0, f"pending work cannot be {num}"
        with self._lock:
            was_stalled = self._is_stalled()
            if self._num_pending == 0:
                self._since = self._clock()
            self._num_pending = num
            self._patience_s = max(self.stall_s, patience_s)
            has_recovered = was_stalled and not self._is_stalled()
        if has_recovered:
            self._tell()

    def completed(self, num: int = 1) -> None:
        """num items were completed just now."""
        with self._lock:
            was_stalled = self._is_stalled()
            self._num_completed += num
            self._since = self._clock()
        if was_stalled:
            self._tell()

    def drain(self) -> None:
        """No new work from now on, for good."""
        with self._lock:
            self._is_draining = True
        self._tell()

    def require_serving(self) -> None:
        """Raises MeshError NOT_SERVING while the daemon takes no new work. A stalled one does: it may recover."""
        state = self.state
        if state in (State.LOADING, State.DRAINING):
            message = f"this daemon is {state.value} and takes no new work: retry on another replica, or later"
            raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": state.value})

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls listener, in whatever thread, after state changes but those into STALLED, which only time brings about.

        Returns what ends the subscription.
        """
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    def stalls_in_s(self) -> float | None:
        """Seconds until pending work counts as stalled unless something completes; None: nothing pends, or it does."""
        with self._lock:
            if self._num_pending == 0 or self._is_stalled():
                return None
            return self._since + self._patience_s - self._clock()

    def _is_stalled(self) -> bool:
        return self._num_pending > 0 and self._clock() - self._since >= self._patience_s

    def _tell(self) -> None:
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()
