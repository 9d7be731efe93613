"""Keeps a pool in step with what names stand for: replicas that are added, replaced or moved while requests run.

Where a name cannot be resolved, or stands for nobody (its only replica restarts), its members stay as they are: they
remember which model they serve, and requests wait for them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from radixmesh.daemons.runtime.rpc.lookup import is_name
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_REFRESH_S = 1.0

# All replicas behind an address; none when that cannot be told now.
Lookup = Callable[[str], Awaitable[Sequence[str]]]


class PeerPool(ABC):
    """Daemons of one kind, by address."""

    @abstractmethod
    def add(self, address: str) -> None:
        """Connects to one more. Idempotent."""

    @abstractmethod
    async def remove(self, address: str) -> None:
        """Lets one go; what it did goes on elsewhere. It was added."""

    @abstractmethod
    def can_remove(self, address: str) -> bool:
        """True if nothing is lost with it. A replica that drains has left its name and still serves."""


class NameWatch:
    """The members of one pool that were configured. Without a lookup every address is one daemon, for good."""

    def __init__(self, addresses: Sequence[str], pool: PeerPool, lookup: Lookup | None) -> None:
        self._pool = pool
        self._lookup = lookup
        self._fixed = [address for address in addresses if lookup is None or not is_name(address)]
        self._members: dict[str, set[str]] = {name: set() for name in addresses if name not in self._fixed}

    def start(self) -> None:
        """Connects to the daemons that no lookup is needed for."""
        for address in self._fixed:
            self._pool.add(address)

    async def run(self) -> None:
        """Follows the names for ever. Each has a task of its own: one that hangs holds up no other."""
        await asyncio.gather(*(self._follow(name) for name in self._members))

    async def refresh(self, name: str) -> None:
        """Asks once who is behind the name, and changes the pool."""
        assert self._lookup is not None, "without a lookup there are no names"
        found = set(await self._lookup(name))
        members = self._members[name]
        for address in sorted(found - members):
            log.info("replica_found", name=name, address=address)
            self._pool.add(address)
            members.add(address)
        if not found:
            return
        for address in sorted(members - found):
            if self._pool.can_remove(address):
                log.info("replica_gone", name=name, address=address)
                members.discard(address)
                await self._pool.remove(address)

    async def _follow(self, name: str) -> None:
        while True:
            await self.refresh(name)
            await asyncio.sleep(_REFRESH_S)
