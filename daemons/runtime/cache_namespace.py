"""Names of cache namespaces, which schedulers give to prefixes and routers look for."""

from __future__ import annotations


def cache_name(adapter: str, salt: str) -> str:
    """Name of the cache namespace of (adapter, salt); different pairs have different names."""
    return f"{len(adapter)}:{adapter}{salt}" if adapter or salt else ""
