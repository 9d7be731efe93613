"""Backends by URL.

disk:///FOLDER?budget=BYTES[&segment=BYTES][&fsync=never|seal|batch]    BYTES with KiB, MiB, GiB or TiB, or without
redis://[USER:PASSWORD@]HOST:PORT/DB[?expire=SECONDS]                   also rediss:// (TLS)
s3://BUCKET[/PREFIX][?endpoint=URL]
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit, urlunsplit

from radixmesh.daemons.worker.kv_store.backend import KvBackend, KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend, FsyncPolicy

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def open_backend(url: str, *, rank: int = 0) -> KvBackend:
    """The backend that a URL names. rank: of this worker in its group; each has a folder of its own on a disk.

    Raises KvStoreError SETTINGS, IN_USE or UNAVAILABLE; no message holds a password.
    """
    parts = _split(url)
    if parts.scheme == "disk":
        options = _options(parts, {"budget", "segment", "fsync"})
        if parts.netloc or not parts.path.startswith("/") or "budget" not in options:
            raise _bad("disk:// takes an absolute folder and a budget: disk:///var/cache/kv?budget=100GiB")
        fsync = options.get("fsync", FsyncPolicy.SEAL.value)
        if fsync not in {policy.value for policy in FsyncPolicy}:
            raise _bad(f"fsync={fsync}: choose never, seal or batch")
        return DiskBackend(
            Path(unquote(parts.path)) / f"rank-{rank}",
            budget_bytes=_bytes(options["budget"]),
            segment_bytes=_bytes(options["segment"]) if "segment" in options else None,
            fsync=FsyncPolicy(fsync),
        )
    if parts.scheme in ("redis", "rediss"):
        from radixmesh.daemons.worker.kv_store.redis_backend import RedisBackend

        expire = _options(parts, {"expire"}).get("expire")
        if expire is not None and not (expire.isdecimal() and int(expire)):
            raise _bad(f"expire={expire}: give seconds")
        server = urlunsplit(parts._replace(query=""))
        return RedisBackend(server, expire_s=None if expire is None else int(expire))
    if parts.scheme == "s3":
        from radixmesh.daemons.worker.kv_store.s3_backend import S3Backend

        options = _options(parts, {"endpoint"})
        if not parts.netloc:
            raise _bad("s3:// takes a bucket: s3://BUCKET/PREFIX")
        return S3Backend(parts.netloc, prefix=parts.path.lstrip("/"), endpoint_url=options.get("endpoint"))
    raise _bad(f"{parts.scheme or 'no'}:// names no store: choose disk, redis, rediss or s3")


def _split(url: str) -> SplitResult:
    """Raises SETTINGS, without what cannot be read: it may be of a password that is not encoded."""
    parts: SplitResult | None
    try:
        parts = urlsplit(url)
        _ = parts.port  # Raises for one that is no number.
    except ValueError:
        parts = None
    if parts is None or parts.fragment or "@" in parts.query:
        raise _bad("the store's URL cannot be read: write / # ? and @ of names and passwords as %2F %23 %3F and %40")
    return parts


def _options(parts: SplitResult, known: set[str]) -> dict[str, str]:
    try:
        options = parse_qs(parts.query, keep_blank_values=True, max_num_fields=16)
    except ValueError as error:
        raise _bad(f"the options of {parts.scheme}:// cannot be read ({error})") from error
    for name, values in options.items():
        if name not in known or len(values) > 1:
            raise _bad(f"{name} is no option of {parts.scheme}://, or is there twice: {', '.join(sorted(known))} are")
    return {name: values[0] for name, values in options.items()}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]iB|)", text)
    if match is None:
        raise _bad(f"{text} is no number of bytes: write 100GiB or 107374182400")
    return int(match[1]) * _UNITS[match[2]]


def _bad(message: str) -> KvStoreError:
    return KvStoreError(StoreFailure.SETTINGS, message)
