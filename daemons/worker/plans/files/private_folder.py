"""A folder for files with users' prompts in them: ours alone, and bounded in files and bytes."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_STATE_FOLDER = Path(".local", "state")
_OTHERS = 0o077
_OTHERS_WRITE = 0o022


class _File(NamedTuple):
    changed_ns: int
    name: str
    num_bytes: int


class PrivateFolder:
    """A folder that only the effective user can list or write, made with mode 0700 when it is first opened.

    path None: radixmesh/dumps in $XDG_STATE_HOME or ~/.local/state, unless others can write to that home (in containers
    it is /tmp); then a folder of ours below the temporary one under a name that nobody can have guessed and taken.

    Every method raises OSError, which says what to do, for a folder that is a link, another user's, or open to others:
    whoever can list it reads prompts, and whoever can write it can plant links.
    """

    def __init__(self, path: Path | None) -> None:
        self._wanted = path

    def open(self) -> Path:
        """Makes and checks the folder, and returns where it is."""
        path = self._wanted if self._wanted is not None else _default_folder()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(_checked(path))
        return path

    def write(self, name: str, data: bytes) -> Path:
        """Writes a new file of mode 0600. An existing one, a link too, is refused, never followed."""
        path = self.open()
        folder = _checked(path)
        try:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                with os.fdopen(file, "wb") as opened:
                    opened.write(data)
            except OSError:
                os.unlink(name, dir_fd=folder)  # Half a file would pass for a whole one.
                raise
        finally:
            os.close(folder)
        return path / name

    def make_room(self, prefix: str, *, max_files: int, max_bytes: int) -> None:
        """Removes the oldest files with that prefix until at most so many, of so many bytes, are left."""
        folder = _checked(self.open())
        try:
            files = sorted(_files_in(folder, prefix))
            num_bytes = sum(file.num_bytes for file in files)
            num_files = len(files)
            for file in files:
                if num_files <= max_files and num_bytes <= max_bytes:
                    return
                with suppress(FileNotFoundError):
                    os.unlink(file.name, dir_fd=folder)
                num_files -= 1
                num_bytes -= file.num_bytes
        finally:
            os.close(folder)


def _checked(path: Path) -> int:
    """An open descriptor of the folder: what is done by it cannot be led elsewhere by a swap of the path."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        problem = f"{error.strerror}: name a folder, and no link to one"
        raise OSError(error.errno, problem, str(path)) from error
    status = os.fstat(folder)
    if status.st_uid == os.geteuid() and not status.st_mode & _OTHERS:
        return folder
    os.close(folder)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}: choose another folder")
    mode = stat.S_IMODE(status.st_mode)
    raise PermissionError(f"{path} is open to others (mode {mode:o}): chmod 700 it, or choose another folder")


def _files_in(folder: int, prefix: str) -> list[_File]:
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                files.append(_File(status.st_mtime_ns, entry.name, status.st_size))
    return files


def _default_folder() -> Path:
    state_home = os.environ.get("XDG_STATE_HOME", "")
    for base, folder in ((Path(state_home), Path()), (Path.home(), _STATE_FOLDER)):
        if base.is_absolute() and _is_ours_alone_to_write(base):
            return base / folder / "radixmesh" / "dumps"
    return _unguessable_folder(Path(tempfile.gettempdir()))


def _is_ours_alone_to_write(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
    return is_ours and os.access(path, os.W_OK)


def _unguessable_folder(parent: Path) -> Path:
    """The one that an earlier process of ours made, or a new one: a crash loop must not make a folder each time."""
    prefix = f"radixmesh-dumps-{os.geteuid()}-"
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with suppress(OSError):
                    os.close(_checked(Path(entry.path)))
                    return Path(entry.path)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
