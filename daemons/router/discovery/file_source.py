"""Addresses in a file, one a line, read again when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from radixmesh.daemons.router.discovery.source import AddressSource, SourceError

MAX_FILE_BYTES = 1 << 20
_LOOK_S = 0.5


class FileSource(AddressSource):
    """Blank lines and those that begin with # count for nothing."""

    def __init__(self, path: Path, look_s: float = _LOOK_S) -> None:
        self._path = path
        self._look_s = look_s

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        seen: tuple[int, ...] = ()
        while True:
            # Before it is read: what changes meanwhile is seen by the next look.
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if stamp != seen:
                seen = stamp
                yield addresses_in(_read(self._path))
            await asyncio.sleep(self._look_s)


def addresses_in(content: bytes) -> frozenset[str]:
    """The addresses of a file's content. Raises SourceError for what is no text."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise SourceError(f"the file is no UTF-8 ({error}): write one address a line") from None
    words = (line.strip() for line in lines)
    return frozenset(word for word in words if word and not word.startswith("#"))


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise SourceError(f"{path} has more than {MAX_FILE_BYTES} bytes: write one address a line")
    return content
