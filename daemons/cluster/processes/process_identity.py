"""Owners of processes, locks and listening ports: by the kernel's word, not by what a file says.

Linux tells all of it under /proc. Elsewhere the calls answer "unknown" (None), and their callers rely on the ownership
of files alone.
"""

import ipaddress
import os
import signal
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"
# After the name in parentheses, which may hold anything, the 20th word of /proc/<pid>/stat: field 22.
_START_WORD = 19


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None = it does not run, or unknown.

    With the pid it names one process for good: pids are used again.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        return int(text.rpartition(")")[2].split()[_START_WORD])
    except (OSError, ValueError, IndexError):
        return None


def is_own_process(pid: int, started: int | None) -> bool:
    """True if this process lives, belongs to the effective user, and is the one that started then (None = unknown)."""
    if start_ticks(pid) != started:
        return False
    try:
        if _PROC.is_dir() and (_PROC / str(pid)).stat().st_uid != os.geteuid():
            return False
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def signal_process(pid: int, started: int | None, number: signal.Signals) -> bool:
    """Sends a signal to that very process; False if it is gone, or is not that one."""
    if not hasattr(os, "pidfd_open"):
        if not is_own_process(pid, started):
            return False
        os.kill(pid, number)
        return True
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The handle holds on to one process: if it is the right one now, it is the right one in the next line too.
        if not is_own_process(pid, started):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def lock_holders(inode: int) -> set[int] | None:
    """Processes that hold an exclusive flock() on a file of this inode, whatever its device; None = unknown."""
    holders: set[int] = set()
    try:
        for line in (_PROC / "locks").read_text().splitlines():
            words = line.split()
            # number: FLOCK ADVISORY WRITE pid major:minor:inode 0 EOF; one that waits has an arrow in second place.
            if words[1] == "FLOCK" and words[3] == "WRITE" and words[5].rpartition(":")[2] == str(inode):
                holders.add(int(words[4]))
    except (OSError, ValueError, IndexError):
        return None
    # A file system or a container's kernel may hide them, or show holders of another pid namespace as 0.
    return holders if holders and min(holders) > 0 else None


def is_own_listener(address: str) -> bool:
    """True if "host:port" is on this machine's loopback, and nobody but the effective user listens there."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
            return False
        owners = _listener_uids(int(port))
    except ValueError:
        return False
    return owners <= {os.geteuid()}


def _listener_uids(port: int) -> set[int]:
    """Users that listen on this port, at any address: with one that is not ours, who answers is a matter of chance."""
    uids: set[int] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                uids.add(int(words[7]))
    return uids
