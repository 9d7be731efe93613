"""The front as a process keeps it alive."""

from __future__ import annotations

import asyncio

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.front.backend_pool import BackendPool, Probe
from radixmesh.daemons.front.config import FrontSettings
from radixmesh.daemons.front.listener import Listener
from radixmesh.daemons.front.probes import grpc_probe, http_probe
from radixmesh.daemons.front.room import Room, connections_within_files
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime
from radixmesh.daemons.runtime.rpc.lookup import look_up
from radixmesh.daemons.runtime.rpc.name_watch import NameWatch
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_DRAIN_POLL_S = 0.05
# Counted, never sent: a connection says what is wrong by its end.
_FULL = MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "no room for a connection: raise --connections")


class FrontDaemon(Daemon):
    """A listener for each protocol, each with routers of its own: one router may serve gRPC and not yet HTTP."""

    def __init__(self, runtime: Runtime, settings: FrontSettings) -> None:
        self._settings = settings
        self._runtime = runtime
        self._room = Room(connections_within_files(settings.connections), lambda: runtime.metrics.count_error(_FULL))
        self._listeners: list[Listener] = []
        self._pools: list[BackendPool] = []
        self._watching: list[asyncio.Task[None]] = []

    async def load(self) -> None:
        settings = self._settings
        if settings.grpc_front:
            await self._open(settings.grpc_front, settings.grpc_routers, grpc_probe(settings.tls))
        if settings.http_front:
            await self._open(settings.http_front, settings.http_routers, http_probe(settings.tls))

    async def drain(self) -> None:
        for listener in self._listeners:
            listener.shut()
        while any(listener.num_connections for listener in self._listeners):  # noqa: ASYNC110 - connections end in callbacks.
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        for pool in self._pools:
            pool.close()

    async def _open(self, address: str, routers: tuple[str, ...], probe: Probe) -> None:
        pool = BackendPool(probe, self._settings.probe_s)
        listener = Listener(pool, self._settings.connect_wait_s, self._room)
        watch = NameWatch(routers, pool, look_up)
        watch.start()
        self._pools.append(pool)
        self._listeners.append(listener)
        self._watching.append(self._runtime.spawn(watch.run(), f"routers of {address}"))
        log.info("listening", address=await listener.open(address))
