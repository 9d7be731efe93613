"""The router as a process keeps it alive."""

from __future__ import annotations

import asyncio
from functools import partial

from radixmesh.daemons.router.admin_service import RouterAdminService
from radixmesh.daemons.router.composition import Peers, make_router
from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.http.http_server import make_http_server
from radixmesh.daemons.router.http.server.server import HttpServer
from radixmesh.daemons.router.peers.grpc_peers import GrpcTokenizer, dial_detokenizer, dial_scheduler, watch_cache
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.router.service import RouterService
from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime
from radixmesh.daemons.runtime.rpc.lookup import look_up
from radixmesh.daemons.runtime.security.api_keys import ApiKeys
from radixmesh.daemons.runtime.security.key_guard import KeyGuard
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.router.v1 import router_pb2_grpc

log = get_logger(__name__)

_DRAIN_POLL_S = 0.05
_HTTP_STOP_S = 3.0
# Proxies ask for /health once a second, as a rule, and send new connections until they have heard the answer.
_HTTP_LINGER_S = 2.5


def guard_of(settings: RouterSettings) -> KeyGuard:
    """Raises MeshError for a file of keys that cannot be used."""
    keys, admin_keys = settings.api_keys_file, settings.admin_keys_file
    return KeyGuard(ApiKeys(keys) if keys else None, ApiKeys(admin_keys) if admin_keys else None)


class RouterDaemon(Daemon):
    """Serves clients from the start: what needs a peer waits for it."""

    def __init__(self, runtime: Runtime, settings: RouterSettings) -> None:
        tls, guard = settings.tls, guard_of(settings)
        peers = Peers(
            dial_scheduler=partial(dial_scheduler, tls=tls),
            dial_detokenizer=partial(dial_detokenizer, tls=tls),
            open_tokenizer=partial(GrpcTokenizer, tls=tls),
            watch_cache=partial(watch_cache, tls=tls),
            look_up=look_up,
        )
        self._router = make_router(
            settings, peers, runtime.instance_id, runtime.progress, runtime.metrics, runtime.tracer
        )
        self.http: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        if settings.http_listen:
            self.http = make_http_server(settings.http_listen, settings, self._router, guard, runtime)
        self._clock: asyncio.Task[None] | None = None
        self._names: asyncio.Task[None] | None = None
        self._text: asyncio.Task[None] | None = None
        self._runtime = runtime
        runtime.server.guard(guard)
        runtime.server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, RouterService(self._router))
        runtime.server.add(router_pb2_grpc.add_RouterAdminServiceServicer_to_server, RouterAdminService(self._router))

    @property
    def router(self) -> Router:
        return self._router

    async def load(self) -> None:
        self._router.connect()
        if self.http is not None:
            log.info("listening_http", address=self.http.bind())
            self._serving = self._runtime.spawn(self.http.serve(), "http")
        self._clock = self._runtime.spawn(self._router.keep_time(), "clock")
        self._names = self._runtime.spawn(self._router.follow_names(), "names")
        self._text = self._runtime.spawn(self._router.load_text(), "text")

    async def drain(self) -> None:
        """Clients are told to go elsewhere while what they have here ends: by GOAWAY, and by connections that close.

        HTTP clients know nothing of either before they ask: for a moment they are still answered, each a last time.
        """
        self._runtime.server.retire()
        if self.http is not None:
            self.http.begin_retiring()
            if self.http.may_be_asked:
                await asyncio.sleep(_HTTP_LINGER_S)
            self.http.retire()
        # Streams and connections end in code that knows no waiting.
        while self._router.num_streams or (self.http is not None and self.http.num_connections):  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        for task in (self._clock, self._names, self._text):
            if task is not None:
                task.cancel()
        if self.http is not None:
            self.http.stop()
        if self._serving is not None:
            await asyncio.wait((self._serving,), timeout=_HTTP_STOP_S)
        await self._router.close()
