"""A port whose connections are handed on whole, byte by byte: no request is looked into."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from radixmesh.daemons.front.backend_pool import Backend, BackendPool
from radixmesh.daemons.front.connection_end import ConnectionEnd
from radixmesh.daemons.front.room import Room
from radixmesh.daemons.runtime.addresses import parse_address, split_host_port
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_CONNECT_S = 1.0
_PAUSE_S = 0.05
_LOG_EVERY_S = 60.0


class Listener:
    """open(), then close(). wait_s: how long a connection waits for a router that serves. room: None = no bound."""

    def __init__(self, pool: BackendPool, wait_s: float, room: Room | None = None) -> None:
        self._room = room
        self._last_refusal_s = -_LOG_EVERY_S
        self._pool = pool
        self._wait_s = wait_s
        self._server: asyncio.Server | None = None
        self._ends: set[ConnectionEnd] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        return len(self._ends)

    async def open(self, address: str) -> str:
        """Listens on "host:port"; returns it with the port filled in. Raises OSError, and MeshError for other text."""
        host, port = split_host_port(address)
        self._server = await asyncio.get_running_loop().create_server(self._new_client, host, port, backlog=4096)
        bound = self._server.sockets[0].getsockname()
        return f"{bound[0]}:{bound[1]}"

    def shut(self) -> None:
        """Takes no more connections. Idempotent."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Ends all connections."""
        self.shut()
        for task in self._connecting:
            task.cancel()
        for end in tuple(self._ends):
            end.close()

    def _new_client(self) -> ConnectionEnd:
        client = ConnectionEnd(on_lost=lambda: self._on_lost(client), on_made=lambda: self._on_client(client))
        return client

    def _on_lost(self, client: ConnectionEnd) -> None:
        if client in self._ends:
            self._ends.discard(client)
            if self._room is not None:
                self._room.give_back()

    def _on_client(self, client: ConnectionEnd) -> None:
        if self._room is not None and not self._room.take():
            self._say_refused(self._room)
            client.close()
            return
        self._ends.add(client)
        task = asyncio.get_running_loop().create_task(self._connect(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _say_refused(self, room: Room) -> None:
        now = time.monotonic()
        if now - self._last_refusal_s >= _LOG_EVERY_S:
            self._last_refusal_s = now
            log.warning("connections_refused", max=room.max_connections, refused_so_far=room.num_refused)

    async def _connect(self, client: ConnectionEnd) -> None:
        until = time.monotonic() + self._wait_s
        refused: set[str] = set()
        while not client.is_closed:
            backend = self._pool.pick(refused)
            if backend is not None:
                if await self._join(client, backend):
                    return
                refused.add(backend.address)
                continue
            if time.monotonic() > until:
                log.warning("no_router_serves", waited_s=self._wait_s)
                break
            refused.clear()
            await asyncio.sleep(_PAUSE_S)
        client.close()

    async def _join(self, client: ConnectionEnd, backend: Backend) -> bool:
        """Ties a client to a router; False if that cannot be reached."""
        host, port = split_host_port(parse_address(backend.address))
        leave = _counted(backend)  # Before the wait: a burst must not go to one router whole.
        router = ConnectionEnd(on_lost=leave)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: router, host, port)
        except (OSError, TimeoutError):
            leave()
            return False
        router.join(client)
        return True


def _counted(backend: Backend) -> Callable[[], None]:
    """Counts a connection to a router. The result ends that, once: one that is given up as it comes is lost as well."""
    is_counted = True
    backend.num_connections += 1

    def leave() -> None:
        nonlocal is_counted
        backend.num_connections -= is_counted
        is_counted = False

    return leave
