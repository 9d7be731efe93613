"""Output of a cluster's daemons, kept in its run folder: `up` writes it, `radixmesh logs` reads it.

<run folder>/cluster.log      one line each, behind the process's name and a tab, in order of arrival
<run folder>/cluster.log.1    what came before; both together never hold more than twice MAX_BYTES
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 32 << 20
_NAME = "cluster.log"


class LogWriter:
    """Opens at the first line, when the run folder is claimed. A full disk costs lines, never the cluster."""

    def __init__(self, run_folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = run_folder / _NAME
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None

    def write(self, name: str, line: str) -> None:
        """Adds a line of the process `name`; one of several lines is several."""
        try:
            if self._file is None:
                self._file = _open_own(self._path)
            for part in line.split("\n"):
                self._file.write(f"{name}\t{part}\n".encode(errors="replace"))
            self._file.flush()
            if self._file.tell() > self._max_bytes:
                self.close()
                self._path.replace(_former(self._path))
        except OSError:
            self.close()

    def close(self) -> None:
        """Nothing of what was written is lost by it."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class LogReader:
    """Reads what there is, then what comes."""

    def __init__(self, run_folder: Path, is_wanted: Callable[[str], bool]) -> None:
        self._path = run_folder / _NAME
        self._is_wanted = is_wanted
        self._file: BinaryIO | None = None

    def lines(self) -> Iterator[tuple[str, str]]:
        """(name, line) of the processes that are wanted: all there are, and what came since with every further call."""
        if self._file is None:
            with suppress(FileNotFoundError), _former(self._path).open("rb") as former:
                yield from _wanted(former, self._is_wanted)
        else:
            yield from _wanted(self._file, self._is_wanted)
            if _is_same(self._file, self._path):
                return
            # It was put aside, and has been read to its end.
            self._file.close()
        with suppress(FileNotFoundError):
            self._file = self._path.open("rb")
            yield from _wanted(self._file, self._is_wanted)


def _wanted(file: BinaryIO, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    while line := file.readline():
        if not line.endswith(b"\n"):
            # It is being written: the next look has it whole.
            file.seek(-len(line), os.SEEK_CUR)
            return
        name, _, text = line[:-1].decode(errors="replace").partition("\t")
        if is_wanted(name):
            yield name, text


def _is_same(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return True


def _former(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _open_own(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "ab")
