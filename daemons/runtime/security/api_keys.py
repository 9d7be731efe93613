"""API keys: a file of them, one a line, read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable
from pathlib import Path

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.caller import Caller
from radixmesh.daemons.runtime.security.trusted_files import read_trusted
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

MIN_KEY_CHARS = 16
# As long as a request's own tenant may be.
MAX_TENANT_BYTES = 256
ANY_TENANT = "*"
"""In a tenant's place: who has the key says whose a request is, as a gateway does for its users."""
MAX_PRIORITY = 1_000
_PRIORITY = b"priority="
_PRIORITY_RANGE = re.compile(rb"(?:(?P<low>-?[0-9]{1,4})\.\.)?(?P<high>-?[0-9]{1,4})")
_SCHEME = "bearer"
# Shortest interval between two looks at the file: a burst of calls does not become one of stat().
_LOOK_S = 1.0
# Some ten thousand keys. It is read on the event loop, and every call is compared with each key.
_MAX_FILE_BYTES = 1 << 20
_MAX_FAULTS = 20
_BOM = b"\xef\xbb\xbf"


class ApiKeys:
    """The keys of a file. A line is `key`, `key tenant`, and `priority=LOW..HIGH` behind that where
    the key's requests may have another priority than 0; blank lines and those that begin with # count for nothing.

    What of the file can be read is in force, from the next look on; every other line is reported in the log by its
    number. A file that is gone, unreadable, or that others may write holds no key: nobody comes in until it is mended.
    Raises MeshError INVALID_ARGUMENT for a file that holds no key to begin with. clock: seconds, for tests.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        # Before the file is read: what changes meanwhile is seen by the next look.
        self._stamp = _stamp_of(path)
        self._looked_s = clock()
        self._keys, faults = _read(path)
        if not self._keys:
            raise _invalid("; ".join((f"{path} has no API key that counts: nobody could come in", *faults[:3])))
        self._report(faults)

    def find(self, key: str) -> Caller | None:
        """Owner of this key; None = nobody. Takes as long for a wrong key as for a right one."""
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
        self._keys, faults = _read(self._path)
        log.info("api_keys_reloaded", file=self._path, num_keys=len(self._keys))
        self._report(faults)

    def _report(self, faults: tuple[str, ...]) -> None:
        if not self._keys:
            log.error("api_keys_none", file=self._path, error="no key is in force: every call is refused")
        for fault in faults[:_MAX_FAULTS]:
            log.error("api_key_ignored", error=fault)
        if len(faults) > _MAX_FAULTS:
            log.error("api_key_ignored", error=f"{len(faults) - _MAX_FAULTS} more lines of {self._path}")


def bearer_key(authorization: str | None) -> str:
    """The key of an authorization header. Raises MeshError UNAUTHENTICATED where there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != _SCHEME or not key.strip():
        raise unauthenticated("this router asks for an API key: send `authorization: Bearer <key>`")
    return key.strip()


def unauthenticated(message: str) -> MeshError:
    """The error for a call without a key that is known."""
    return MeshError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, message)


def _read(path: Path) -> tuple[tuple[tuple[bytes, Caller], ...], tuple[str, ...]]:
    """The keys that count, and what is wrong with the rest: never a line itself, which would be in the log then."""
    try:
        content = read_trusted(path, max_bytes=_MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        return (), (f"the API keys in {path} cannot be read ({error})",)
    if b"\0" in content:
        return (), (f"{path} is no text of one byte a character: save it as UTF-8",)
    keys: dict[bytes, Caller] = {}
    faults: list[str] = []
    repeated: set[bytes] = set()
    for number, line in enumerate(content.removeprefix(_BOM).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        try:
            key, caller = _entry(words)
        except ValueError as error:
            faults.append(f"line {number} of {path}: {error}")
            continue
        if key in keys:
            repeated.add(key)
            faults.append(f"line {number} of {path} repeats a key: none of its lines counts")
        keys[key] = caller
    return tuple((key, caller) for key, caller in keys.items() if key not in repeated), tuple(faults)


def _entry(words: list[bytes]) -> tuple[bytes, Caller]:
    """Digest and rights of one line. Raises ValueError."""
    key = words[0]
    if len(key) < MIN_KEY_CHARS:
        raise ValueError(f"write a key of {MIN_KEY_CHARS} characters or more, then a tenant")
    # A header carries nothing else: such a key could never be sent.
    if not all(0x21 <= byte <= 0x7E for byte in key):
        raise ValueError("a key has printable ASCII characters only")
    low, high = 0, 0
    if len(words) > 1 and words[-1].startswith(_PRIORITY):
        low, high = _priorities(words.pop())
    if len(words) > 2:
        raise ValueError("write a key, then one word for its tenant, then priority=LOW..HIGH if it may have any but 0")
    tenant = words[1].decode() if len(words) == 2 else ""
    if not tenant.isprintable() or len(tenant.encode()) > MAX_TENANT_BYTES:
        raise ValueError(f"a tenant has printable characters only, {MAX_TENANT_BYTES} bytes at most")
    is_any = tenant == ANY_TENANT
    caller = Caller(None if is_any else tenant, may_name_tenant=is_any, min_priority=low, max_priority=high)
    return _digest(key.decode()), caller


def _priorities(word: bytes) -> tuple[int, int]:
    """The range that `priority=LOW..HIGH` or `priority=HIGH` (from 0) names. Raises ValueError."""
    found = _PRIORITY_RANGE.fullmatch(word.removeprefix(_PRIORITY))
    if found is not None:
        high = int(found["high"])
        low = int(found["low"]) if found["low"] is not None else min(0, high)
        if -MAX_PRIORITY <= low <= high <= MAX_PRIORITY:
            return low, high
    raise ValueError(f"write priority=LOW..HIGH, both within -{MAX_PRIORITY} and {MAX_PRIORITY}")


def _digest(key: str) -> bytes:
    # Equal lengths, whatever was sent: comparing tells nothing of the keys.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    # ctime: who may write the file changes it, too.
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid)


def _invalid(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "api_keys_file"})
