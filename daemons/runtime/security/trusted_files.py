"""Files and folders that only this user, or root, can have written: what a key, a lock or a pid is believed from."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_ROOT = 0


def read_trusted(path: Path, *, max_bytes: int) -> bytes:
    """The content of a regular file that belongs to this process's effective user, or to root, and that not everybody
    may write. Links are followed (a Kubernetes secret is one): the file that they lead to is what counts, and the
    folder that holds it.

    Raises OSError, or ValueError that says what to mend. What is checked is what is read: one open file.
    """
    # O_NONBLOCK: a pipe in the file's place must not hold the caller.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if fault := _fault(status, is_shared_folder=False):
            raise ValueError(fault)
        # Anyone who may rename within the folder decides which file has this name.
        for folder in {path.parent, path.resolve().parent}:
            if fault := _fault(os.stat(folder), is_shared_folder=True):
                raise ValueError(f"the folder {folder} is not safe: {fault}")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def is_own(status: os.stat_result) -> bool:
    """True if a file or folder belongs to the effective user, and nobody else can write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _fault(status: os.stat_result, *, is_shared_folder: bool) -> str:
    """The problem in words; empty = none."""
    # In a folder with the sticky bit (/tmp) only the owner of a file can rename it.
    if status.st_mode & stat.S_IWOTH and not (is_shared_folder and status.st_mode & stat.S_ISVTX):
        return "everybody may write it: chmod o-w"
    if status.st_uid not in (_ROOT, os.geteuid()) and not (is_shared_folder and status.st_mode & stat.S_ISVTX):
        return f"it belongs to user {status.st_uid}: it must be root's, or user {os.geteuid()}'s, who runs this"
    return ""
