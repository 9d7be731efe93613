"""The bound on connections that the front has open at once."""

from __future__ import annotations

import resource
from collections.abc import Callable

# Listeners, probes, logs, metrics.
_OTHER_FILES = 128


class Room:
    """At most `max_connections` at once, shared by all listeners. on_refused: told of each one beyond."""

    def __init__(self, max_connections: int, on_refused: Callable[[], object] = lambda: None) -> None:
        self._on_refused = on_refused
        self.max_connections = max_connections
        self.num_refused = 0
        self._num_taken = 0

    def take(self) -> bool:
        """False, and one more refused: all are taken."""
        if self._num_taken >= self.max_connections:
            self.num_refused += 1
            self._on_refused()
            return False
        self._num_taken += 1
        return True

    def give_back(self) -> None:
        self._num_taken -= 1


def connections_within_files(wanted: int) -> int:
    """At most `wanted` connections: each takes two files, its own and that to a router. Raises the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, (soft - _OTHER_FILES) // 2))
