"""The routers behind one listener: which of them serve, and how many connections each has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from radixmesh.daemons.runtime.rpc.name_watch import PeerPool
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

# Asks whether the daemon at an address serves. Never raises, whatever the daemon answers.
Probe = Callable[[str], Awaitable[bool]]


@dataclass(slots=True, eq=False)
class Backend:
    """One router. is_serving: what it last said of itself; it is asked before it gets its first connection."""

    address: str
    is_serving: bool = False
    num_connections: int = 0


class BackendPool(PeerPool):
    """Asks every router now and then; a connection goes to the serving one that has the fewest."""

    def __init__(self, probe: Probe, probe_s: float) -> None:
        self._probe = probe
        self._probe_s = probe_s
        self._backends: dict[str, Backend] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}

    @property
    def backends(self) -> tuple[Backend, ...]:
        return tuple(self._backends.values())

    def add(self, address: str) -> None:
        if address not in self._backends:
            backend = self._backends[address] = Backend(address)
            self._probing[address] = asyncio.get_running_loop().create_task(self._keep_asking(backend))

    async def remove(self, address: str) -> None:
        """Its connections live on: they end when the router does."""
        del self._backends[address]
        self._probing.pop(address).cancel()

    def can_remove(self, address: str) -> bool:
        return True

    def pick(self, refused: Collection[str] = ()) -> Backend | None:
        """The router for the next connection, none of those that have refused it; None when nobody is left."""
        serving = [b for b in self._backends.values() if b.is_serving and b.address not in refused]
        return min(serving, key=lambda backend: backend.num_connections) if serving else None

    def close(self) -> None:
        for task in self._probing.values():
            task.cancel()

    async def _keep_asking(self, backend: Backend) -> None:
        while True:
            is_serving = await self._probe(backend.address)
            if is_serving is not backend.is_serving:
                log.info("router_serves" if is_serving else "router_does_not_serve", address=backend.address)
            backend.is_serving = is_serving
            await asyncio.sleep(self._probe_s)
