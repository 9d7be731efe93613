"""Backends by URL.

disk:///FOLDER?budget=BYTES[&segment=BYTES][&fsync=never|seal|batch]    BYTES with KiB, MiB, GiB or TiB, or without
redis://[USER:PASSWORD@]HOST:PORT/DB[?expire=SECONDS]                   also rediss:// (TLS)
s3://BUCKET[/PREFIX][?endpoint=URL]
nixl-file:///FOLDER?budget=BYTES[&plugin=POSIX|GDS|GDS_MT][&pool=BYTES][&timeout=SECONDS]
nixl-obj://BUCKET[/PREFIX][?endpoint=URL][&pool=BYTES][&timeout=SECONDS]
mooncake://HOST:PORT[?segment=BYTES][&metadata=URL][&protocol=tcp|rdma][&devices=NAMES][&host=ADDRESS][&pool=BYTES]
    [&timeout=SECONDS]
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit, urlunsplit

from radixmesh.daemons.worker.kv_store.backend import KvBackend, KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend, FsyncPolicy

# Of memory that is registered with a library: four records have to fit.
_POOL_BYTES = (1 << 20, 64 << 30)
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
    if parts.scheme == "nixl-file":
        return _nixl_file(parts)
    if parts.scheme == "nixl-obj":
        from radixmesh.daemons.worker.kv_store.nixl_obj_backend import NixlObjBackend

        options = _options(parts, {"endpoint", "pool", "timeout"})
        if not parts.netloc:
            raise _bad("nixl-obj:// takes a bucket: nixl-obj://BUCKET/PREFIX")
        pool, timeout_s = _pool(options), _timeout(options)
        endpoint, prefix = options.get("endpoint"), parts.path.lstrip("/")
        return NixlObjBackend(parts.netloc, prefix=prefix, endpoint_url=endpoint, pool_bytes=pool, timeout_s=timeout_s)
    if parts.scheme == "mooncake":
        return _mooncake(parts)
    schemes = "disk, redis, rediss, s3, nixl-file, nixl-obj or mooncake"
    raise _bad(f"{parts.scheme or 'no'}:// names no store: choose {schemes}")


def _nixl_file(parts: SplitResult) -> KvBackend:
    from radixmesh.daemons.worker.kv_store.nixl_file_backend import PLUGINS, NixlFileBackend

    options = _options(parts, {"budget", "plugin", "pool", "timeout"})
    if parts.netloc or not parts.path.startswith("/") or "budget" not in options:
        raise _bad("nixl-file:// takes an absolute folder and a budget: nixl-file:///mnt/kv?budget=10TiB")
    plugin = options.get("plugin", PLUGINS[0])
    if plugin not in PLUGINS:
        raise _bad(f"plugin={plugin}: choose {', '.join(PLUGINS)}")
    return NixlFileBackend(
        Path(unquote(parts.path)),
        budget_bytes=_bytes(options["budget"]),
        plugin=plugin,
        pool_bytes=_pool(options),
        timeout_s=_timeout(options),
    )


def _mooncake(parts: SplitResult) -> KvBackend:
    from radixmesh.daemons.worker.kv_store.mooncake_backend import PROTOCOLS, MooncakeBackend

    options = _options(parts, {"segment", "metadata", "protocol", "devices", "host", "pool", "timeout"})
    if not parts.hostname or parts.port is None or parts.path.strip("/") or parts.username is not None:
        raise _bad("mooncake:// takes the master's address: mooncake://HOST:PORT")
    protocol = options.get("protocol", PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        raise _bad(f"protocol={protocol}: choose {' or '.join(PROTOCOLS)}")
    return MooncakeBackend(
        parts.netloc,
        metadata=options.get("metadata", "P2PHANDSHAKE"),
        protocol=protocol,
        devices=options.get("devices", ""),
        host=options.get("host"),
        segment_bytes=_bytes(options.get("segment", "0")),
        pool_bytes=_pool(options),
        timeout_s=_timeout(options),
    )


def _pool(options: dict[str, str]) -> int:
    """Bytes of registered memory. Raises SETTINGS."""
    pool = _bytes(options.get("pool", "256MiB"))
    if not _POOL_BYTES[0] <= pool <= _POOL_BYTES[1]:
        raise _bad(f"pool={options['pool']}: give 1MiB to 64GiB")
    return pool


def _timeout(options: dict[str, str]) -> float:
    text = options.get("timeout", "5")
    if not re.fullmatch(r"[0-9]{1,4}", text) or not int(text):
        raise _bad(f"timeout={text}: give seconds, 1 to 9999")
    return float(text)


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
