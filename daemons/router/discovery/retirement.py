"""Schedulers that are to go: they get nothing new, and are disconnected when nothing of this router runs there."""

from __future__ import annotations

import asyncio

from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_LOOK_S = 0.1


class Retirement:
    """Adds and removes members of a pool without loss."""

    def __init__(self, pool: SchedulerPool) -> None:
        self._pool = pool
        self._leaving: dict[str, SchedulerLink] = {}

    def add(self, address: str) -> bool:
        """Connects to a scheduler; one that was to go stays. True unless it was there already.

        Raises INVALID_ARGUMENT for text that is no address.
        """
        leaving = self._leaving.pop(address, None)
        if leaving is not None and self._pool.has(leaving):
            leaving.is_draining = leaving.is_left = False
            self._pool.place_waiting()
            return True
        is_new = all(link.address != address for link in self._pool.links)
        self._pool.add(address)
        return is_new

    def retire(self, address: str, *, moves_outputs: bool) -> None:
        """Nothing new goes there; what runs there ends there or moves, and then it is removed."""
        try:
            link = self._pool.link(address)
        except MeshError:
            return  # An operator has removed it.
        self._pool.drain(address, moves_outputs=moves_outputs)
        self._leaving[address] = link

    async def run(self) -> None:
        """Removes those that are empty, or away, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.tick()

    async def tick(self) -> None:
        """One look."""
        for address, link in tuple(self._leaving.items()):
            # Not draining any more: another process is there by now, with nothing to wait for.
            if link.num_running and link.is_connected and link.is_draining and self._pool.has(link):
                continue
            # Before the removal, which takes turns: the address may be added again meanwhile.
            self._leaving.pop(address, None)
            if self._pool.has(link):
                log.info("replica_removed", address=address)
                await self._pool.remove(address)
