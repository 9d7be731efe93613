"""Identity of a process on a host, by which others of that host can tell that it is gone."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Data of a dead process that its kernel has already handed on is in its peer's memory by then.
_SETTLE_S = 1.0


class HostProcess(NamedTuple):
    """host: equal for processes that can name each other's process ids. started: clock ticks since the boot."""

    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> HostProcess:
        """This process."""
        return cls(host_name(), os.getpid(), started_at(os.getpid()) or 0)

    def is_gone(self) -> bool:
        """True if it has ended; False also if it is of another host, of which nothing is known here."""
        return self.host == host_name() and started_at(self.pid) != self.started


class GoneWatch:
    """Tells that a process is gone some time after it was first seen so: what it sent last has arrived by then."""

    def __init__(self, process: HostProcess) -> None:
        self._process = process
        self._since: float | None = None

    def is_gone(self) -> bool:
        """Ask now and then: the time runs from the first answer on."""
        if self._since is None:
            if not self._process.is_gone():
                return False
            self._since = time.monotonic()
        return time.monotonic() - self._since >= _SETTLE_S


@cache
def host_name() -> str:
    """Equal for processes that can name each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def started_at(pid: int) -> int | None:
    """Start of a process that has memory, in clock ticks since the boot; None: there is none, or it has ended."""
    try:
        # The name in front may hold anything, parentheses too.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
