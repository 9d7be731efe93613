"""The router's HTTP edge as its daemon starts and stops it."""

from __future__ import annotations

from starlette.types import ASGIApp

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.http.app import make_app
from radixmesh.daemons.router.http.body import BodyReader
from radixmesh.daemons.router.http.body_budget import BodyBudget
from radixmesh.daemons.router.http.connection import ConnectionLimits
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.key_check import KeyCheck
from radixmesh.daemons.router.http.parser_pool import ParserPool
from radixmesh.daemons.router.http.server import HttpServer
from radixmesh.daemons.router.http.tls import FollowedContext
from radixmesh.daemons.router.http.tokens import TokenTables
from radixmesh.daemons.router.http.trace_header import TraceHeader
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.key_guard import KeyGuard
from radixmesh.daemons.runtime.lifecycle import Runtime

# The router ends a stalled stream first, so that it is counted as one; this is for answers that are whole.
_CUT_AFTER_S = 1.0


def make_http_server(
    address: str, settings: RouterSettings, router: Router, guard: KeyGuard, runtime: Runtime
) -> HttpServer:
    """The server at "host:port", not started yet.

    Raises MeshError INVALID_ARGUMENT for other text, and for a file of TLS that cannot be used.
    """
    context = HttpContext(
        router=router,
        tables=TokenTables(router),
        body=BodyReader(
            max_bytes=settings.http_body_bytes,
            timeout_s=settings.http_body_s,
            budget=BodyBudget(settings.http_bodies_bytes),
            parsers=ParserPool(max_body_bytes=settings.http_body_bytes),
            contexts=lambda: {model.name: model.identity.max_total_len for model in router.schedulers.models()},
        ),
        metrics=runtime.metrics,
        progress=runtime.progress,
    )
    app: ASGIApp = make_app(context)
    if runtime.tracer.is_on:
        app = TraceHeader(app)
    return HttpServer(
        app if guard.is_open else KeyCheck(app, guard, runtime.metrics),
        address,
        limits=ConnectionLimits(
            head_s=settings.http_head_s,
            idle_s=settings.http_idle_s,
            stall_s=settings.client_stall_s + _CUT_AFTER_S,
            max_connections=settings.http_connections,
        ),
        tls=FollowedContext(settings.tls) if settings.tls.has_server else None,
    )
