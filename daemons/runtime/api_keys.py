"""API keys: a file of them, one a line, read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path

from radixmesh.common.v1.common_pb2 import ErrorReason

from .caller import Caller
from .errors import MeshError
from .logs import get_logger

log = get_logger(__name__)

MIN_KEY_CHARS = 16
_SCHEME = "bearer"
# How often the file is looked at, at most: a burst of calls does not become one of stat().
_LOOK_S = 1.0


class ApiKeys:
    """The keys of a file. A line is `key` or `key tenant`; blank lines and those that begin with # count for nothing.

    Raises MeshError INVALID_ARGUMENT for a file that cannot be read, has no key, one twice, or one that is too short.
    Once it was read, a file that is broken later keeps the keys that it had. clock: seconds, for tests.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._stamp = _stamp_of(path)
        self._keys = _read(path)
        self._looked_s = clock()

    def find(self, key: str) -> Caller | None:
        """Who has this key; None = nobody. Takes as long for a wrong key as for a right one."""
        self._look()
        digest = _digest(key)
        found: Caller | None = None
        for known, caller in self._keys:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _read(self._path)
        except MeshError as error:
            log.error("api_keys_not_reloaded", error=str(error))
        else:
            log.info("api_keys_reloaded", num_keys=len(self._keys))


def bearer_key(authorization: str | None) -> str:
    """The key of an authorization header. Raises MeshError UNAUTHENTICATED where there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != _SCHEME or not key.strip():
        raise unauthenticated("this router asks for an API key: send `authorization: Bearer <key>`")
    return key.strip()


def unauthenticated(message: str) -> MeshError:
    """The error for a call without a key that is known."""
    return MeshError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, message)


def _read(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"the API keys in {path} cannot be read ({error})") from error
    keys: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or len(words[0]) < MIN_KEY_CHARS:
            # Never the line itself: it would be in the log.
            raise _invalid(f"line {number} of {path}: write a key of {MIN_KEY_CHARS} characters or more, then a tenant")
        digest = _digest(words[0])
        if digest in keys:
            raise _invalid(f"line {number} of {path} repeats a key: each stands once")
        keys[digest] = Caller(words[1] if len(words) > 1 else "")
    if not keys:
        raise _invalid(f"{path} has no API key: nobody could come in")
    return tuple(keys.items())


def _digest(key: str) -> bytes:
    # Equal lengths, whatever was sent: comparing tells nothing of the keys.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _invalid(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "api_keys_file"})
