"""Identity of a store: equal for workers that find each other's pages there."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from radixmesh.daemons.worker.kv_store.backend import KvBackend
from radixmesh.daemons.worker.kv_store.keys import PageFormat

# Two schemes whose pages are the same, and ports that may be left out.
_FAMILIES = {"rediss": "redis", "nixl-obj": "s3"}
_PORTS = {"redis": 6379}


def store_id(url: str, backend: KvBackend, page_format: PageFormat) -> str:
    """32 hex digits for the store of an opened URL and the KV that this worker keeps there; empty: it is this worker's
    alone.

    It only tells routers where a prefix may be found, so it may be wrong: two names of one server count as two stores,
    which costs copies, and two servers that have one name as one, which costs computations. Credentials, budgets and
    other settings of one process do not enter.
    """
    if not backend.is_shared:
        return ""
    medium = backend.medium_id or _place_of(url)
    return hashlib.sha256(medium.encode() + b"\0" + page_format.root()).hexdigest()[:32]


def _place_of(url: str) -> str:
    """Server and name in it."""
    parts = urlsplit(url)
    family = _FAMILIES.get(parts.scheme, parts.scheme)
    server, bucket = parts, ""
    if family == "s3":
        server, bucket = urlsplit(parse_qs(parts.query).get("endpoint", [""])[0]), parts.netloc
    host = (server.hostname or "").lower()
    port = server.port or _PORTS.get(family, 0)
    return f"{family} {host}:{port} {_machine() if _is_loopback(host) else ''} {bucket}/{parts.path.strip('/')}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _machine() -> str:
    """The host that a loopback address is of: its name, and the boot of its kernel."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"
