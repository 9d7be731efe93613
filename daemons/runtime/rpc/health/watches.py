"""All Watch calls of one health service: told when the state changes, bounded in number, one timer for all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress

# Watches need no API key: a load balancer keeps one a backend, a client of gRPC's own health checks one a channel.
MAX_WATCHES = 1_024
MAX_WATCHES_OF_A_CONNECTION = 32
# An item that ends exactly when the timer fires must not make it fire again and again.
_MIN_TIMER_S = 0.01


class HealthWatches:
    """Events of open watches, set after each change of the state. One event loop; idle while nobody watches.

    `Progress` tells of every change but the one into STALLED, which only time brings about: for that one a timer runs
    to the earliest moment at which it could happen, once for all watches and no more often than about every stall_s.
    """

    def __init__(self, progress: Progress) -> None:
        self.num_timer_runs = 0
        self._progress = progress
        self._events: dict[asyncio.Event, str] = {}
        self._num_of_peer: Counter[str] = Counter()
        self._unsubscribe: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._events)

    def open(self, peer: str) -> asyncio.Event:
        """An event that is set at each change, until close(). peer: the connection. Raises OVERLOADED at the bounds."""
        if len(self._events) >= MAX_WATCHES or self._num_of_peer[peer] >= MAX_WATCHES_OF_A_CONNECTION:
            message = (
                f"{len(self._events)} calls watch the health of this daemon, {self._num_of_peer[peer]} of them on this"
                f" connection (at most {MAX_WATCHES} and {MAX_WATCHES_OF_A_CONNECTION}): end some, or call Check"
            )
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000"})
        event = asyncio.Event()
        if not self._events:
            self._begin()
        self._events[event] = peer
        self._num_of_peer[peer] += 1
        return event

    def close(self, event: asyncio.Event) -> None:
        """A watch has ended."""
        peer = self._events.pop(event)
        self._num_of_peer[peer] -= 1
        if not self._num_of_peer[peer]:
            del self._num_of_peer[peer]
        if not self._events:
            self._end()

    def notify(self) -> None:
        """Wakes all watches."""
        for event in self._events:
            event.set()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()

        def on_change() -> None:  # In any thread.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._changed)

        self._unsubscribe = self._progress.subscribe(on_change)
        self._set_timer()

    def _end(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _changed(self) -> None:
        self.notify()
        if self._events:
            self._set_timer()

    def _timer_ran(self) -> None:
        self.num_timer_runs += 1
        self._changed()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Nothing tells when work begins (that is every request): with none, stall_s is the earliest it could stall at.
        # No later in any case, since the patience with the item under way may be shorter by then.
        left_s = self._progress.stalls_in_s()
        stall_s = self._progress.stall_s
        delay_s = stall_s if left_s is None else max(min(left_s, stall_s), _MIN_TIMER_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_ran)
