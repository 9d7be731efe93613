"""Pointers to run folders that stand elsewhere: `.radixmesh/<project>.folder` holds the path, for `down` and `status`.

A pointer says where to look and nothing more: the folder that it names has to be ours, with a living supervisor.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from radixmesh.daemons.runtime.security.trusted_files import is_own

SUFFIX = ".folder"
_MAX_BYTES = 4096


@contextmanager
def pointer_to(folder: Path, usual: Path) -> Iterator[None]:
    """Writes the pointer beside `usual`, where a cluster of that name is looked for, and removes it at the end.

    Nothing is written where `folder` is that itself, or where nothing can be written.
    """
    pointer = usual.with_name(usual.name + SUFFIX)
    if folder.absolute() == usual.absolute() or not _write(pointer, folder):
        yield
        return
    try:
        yield
    finally:
        # Another cluster of the same name may have put its own there.
        if target_of(pointer) == folder.absolute():
            pointer.unlink(missing_ok=True)


def target_of(pointer: Path) -> Path | None:
    """The folder that a pointer of ours names; None for what is none."""
    try:
        file = os.fdopen(os.open(pointer, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        with file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or not is_own(status):
                return None
            return Path(file.read(_MAX_BYTES).rstrip("\n"))
    except (OSError, ValueError):
        return None


def _write(pointer: Path, folder: Path) -> bool:
    with suppress(OSError):
        pointer.parent.mkdir(0o700, parents=True, exist_ok=True)
        temporary = pointer.with_name(pointer.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
            file.write(f"{folder.absolute()}\n")
        # As run folders have it: nothing of this is anybody's to commit.
        with os.fdopen(os.open(pointer.with_name(".gitignore"), flags, 0o600), "w") as file:
            file.write("*\n")
        temporary.replace(pointer)
        return True
    return False
