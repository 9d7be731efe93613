"""The memory that this process may use: its container's limit, else the machine's."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_KIB = 1024


def share(part: int, most: int) -> int:
    """A part (an eighth: 8) of the memory that this process may have, in bytes; never more than `most`."""
    return min(most, memory_bytes() // part)


@cache
def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes: the least limit of the process's cgroup and those above it (version 2 or 1), at most the machine's memory.

    root: where /proc and /sys are looked for.
    """
    limits = [_machine_bytes(root)]
    for controllers, path in _groups(root / "proc/self/cgroup"):
        if "memory" in controllers:
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        else:
            continue
        # In a container the path may be the one outside of it; the mount itself is then the container's group.
        group = mount / path.lstrip("/")
        limits += [limit for folder in (group, *group.parents) if (limit := _limit(mount, folder / name))]
    return min(limits)


def _machine_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * _KIB
    raise OSError("no MemTotal in /proc/meminfo")


def _groups(file: Path) -> list[tuple[list[str], str]]:
    """(controllers, path) of each line; of version 2 without controllers."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(":", 2) for line in lines]
    return [(one[1].split(",") if one[1] else [], one[2]) for one in fields if len(one) == 3]


def _limit(mount: Path, file: Path) -> int | None:
    """None: there is none ("max"), or the file is not below the mount."""
    if not file.is_relative_to(mount):
        return None
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) else None
