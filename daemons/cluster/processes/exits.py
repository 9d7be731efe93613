"""Causes of a process's end, by its exit code or signal."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

from radixmesh.daemons.runtime.common_settings import PredecessorEnd
from radixmesh.daemons.runtime.lifecycle import ExitCode

_OUR_CLI = "radixmesh.cli"
_VMSTAT = Path("/proc/vmstat")
# Sent by people, supervisors and machines that shut down; what a process does to itself has other signals.
_SIGNALS_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# Daemons leave with these after they were asked to.
_CODES_FROM_OUTSIDE = frozenset({ExitCode.CLEAN, ExitCode.DRAINED_LATE, ExitCode.SECOND_SIGNAL})


def starts_in_vain(argv: Sequence[str], exit_codes: tuple[int, ...]) -> bool:
    """True if a daemon that never served never will, by the exit codes of its runs, the last one last.

    Wrong settings stay wrong. What kept it from starting otherwise (a model, a device, a file, a port) gets a second
    try: a file may have been half replaced.
    """
    if _OUR_CLI not in argv:
        return False  # Others mean what they like by these codes.
    return exit_codes[-1] == ExitCode.USAGE or tuple(exit_codes[-2:]) == (ExitCode.NOT_STARTED, ExitCode.NOT_STARTED)


def last_words(lines: Sequence[str]) -> str:
    """Why a daemon did not start, by the lines that it printed: the error that it logged, or else its last line."""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "not_started":
            return str(entry.get("error", line))
    spoken = [line.strip() for line in lines if line.strip()]
    return spoken[-1] if spoken else "it printed nothing"


class MemoryKills:
    """True if the kernel has killed any process for lack of memory since this was made (Linux, /proc/vmstat)."""

    def __init__(self) -> None:
        self._num_before = _num_memory_kills()

    def has_happened(self) -> bool:
        """True as well where that cannot be told."""
        return self._num_before is None or _num_memory_kills() != self._num_before


def end_of(exit_code: int, *, memory_was_short: bool) -> PredecessorEnd:
    """The cause of an end by its exit code (negative: the signal). A hang is not seen here.

    memory_was_short: the kernel killed something for want of memory; it does so by SIGKILL, and the cause may well be
    what the process had to do.
    """
    if exit_code == -signal.SIGKILL and memory_was_short:
        return PredecessorEnd.UNKNOWN
    is_from_outside = -exit_code in _SIGNALS_FROM_OUTSIDE if exit_code < 0 else exit_code in _CODES_FROM_OUTSIDE
    return PredecessorEnd.FROM_OUTSIDE if is_from_outside else PredecessorEnd.BY_ITSELF


def _num_memory_kills() -> int | None:
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return next(found, None)
