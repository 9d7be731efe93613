"""Time that a process waited for a CPU: a loaded machine, not a daemon that hangs."""

from __future__ import annotations

from pathlib import Path


class CpuStarvation:
    """Run-queue delay of a process, from /proc/PID/task/*/schedstat (Linux; elsewhere it is always 0).

    The kernel counts, per thread, the time in which it was runnable and did not run. A thread that is stopped, blocked
    or that computes collects none.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._delays_ns: dict[str, int] = {}
        self.take_s()

    def take_s(self) -> float:
        """Seconds since the last call for which the thread that waited longest waited for a CPU."""
        before, self._delays_ns = self._delays_ns, self._read()
        waits_ns = (delay - before.get(thread, 0) for thread, delay in self._delays_ns.items())
        return max(waits_ns, default=0) / 1e9

    def _read(self) -> dict[str, int]:
        delays_ns: dict[str, int] = {}
        try:
            threads = list(self._tasks.iterdir())
        except OSError:
            return delays_ns
        for thread in threads:
            try:
                # "time on a CPU, time waiting for one, number of slices", in ns.
                delays_ns[thread.name] = int((thread / "schedstat").read_text().split()[1])
            except (OSError, ValueError, IndexError):
                continue  # The thread has ended, or this kernel keeps no such figures.
        return delays_ns
