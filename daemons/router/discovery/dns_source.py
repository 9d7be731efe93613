"""Addresses behind a DNS name (A records, AAAA where there are none, or SRV), resolved again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from radixmesh.daemons.router.discovery.source import AddressSource, SourceError
from radixmesh.daemons.runtime.rpc.lookup import look_up
from radixmesh.daemons.runtime.rpc.name_watch import Lookup

_LOOK_S = 1.0


class DnsSource(AddressSource):
    """name: "host:port", every address that it has is a scheduler at that port; or what another lookup takes."""

    def __init__(self, name: str, lookup: Lookup = look_up, look_s: float = _LOOK_S) -> None:
        self._name = name
        self._lookup = lookup
        self._look_s = look_s

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        while True:
            found = frozenset(await self._lookup(self._name))
            if not found:
                raise SourceError(f"{self._name} cannot be resolved")
            yield found
            await asyncio.sleep(self._look_s)
