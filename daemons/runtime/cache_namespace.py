"""Names of cache namespaces, which schedulers give to prefixes and routers look for."""

from __future__ import annotations


def cache_name(adapter: str, salt: str) -> str:
    """Name of the cache namespace of (adapter, salt); different pairs have different names."""
    return f"{len(adapter)}:{adapter}{salt}" if adapter or salt else ""


def split_cache_name(name: str) -> tuple[str, str]:
    """(adapter, salt) of a name that cache_name() made; ("", name) of any other."""
    length, colon, rest = name.partition(":")
    if not colon or not length.isdecimal() or int(length) > len(rest):
        return "", name
    return rest[: int(length)], rest[int(length) :]
