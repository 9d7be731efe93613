"""The router's HTTP server as its daemon starts and stops it."""

from __future__ import annotations

from functools import partial

from starlette.types import ASGIApp

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlans
from radixmesh.daemons.router.http.answers.tokens import TokenTables
from radixmesh.daemons.router.http.app import PostPaths, make_app
from radixmesh.daemons.router.http.bodies.body import BodyReader
from radixmesh.daemons.router.http.bodies.body_budget import BodyBudget
from radixmesh.daemons.router.http.bodies.body_pace import BodyPace
from radixmesh.daemons.router.http.bodies.parser_pool import ParserPool
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.openapi import PAGE_PATHS
from radixmesh.daemons.router.http.server.connection import ConnectionLimits
from radixmesh.daemons.router.http.server.key_check import KeyCheck
from radixmesh.daemons.router.http.server.server import HttpServer
from radixmesh.daemons.router.http.server.tls import FollowedContext
from radixmesh.daemons.router.http.server.trace_header import TraceHeader
from radixmesh.daemons.router.http.server.web_guard import HostCheck, JsonOnly, allow_origins, is_loopback
from radixmesh.daemons.router.http.translated.response_store import ResponseStore
from radixmesh.daemons.router.peers.grpc_peers import flush_cache
from radixmesh.daemons.router.requests.intake.sessions import SessionHeader
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.addresses import split_host_port
from radixmesh.daemons.runtime.lifecycle import Runtime
from radixmesh.daemons.runtime.security.key_guard import KeyGuard

# The router ends a stalled stream first, so that it is counted as one; this is for answers that are whole.
_CUT_AFTER_S = 1.0


def make_http_server(
    address: str, settings: RouterSettings, router: Router, guard: KeyGuard, runtime: Runtime
) -> HttpServer:
    """The server at "host:port", not started yet.

    Raises MeshError INVALID_ARGUMENT for other text, and for a file of TLS that cannot be used.
    """
    tables = TokenTables(router)
    context = HttpContext(
        router=router,
        tables=tables,
        chats=ChatPlans(router, tables, settings.tool_call_parser, settings.reasoning_parser),
        body=BodyReader(
            max_bytes=settings.http_body_bytes,
            timeout_s=settings.http_body_s,
            budget=BodyBudget(settings.http_bodies_bytes),
            parsers=ParserPool(max_body_bytes=settings.http_body_bytes),
            contexts=lambda: {model.name: model.identity.max_total_len for model in router.schedulers.models()},
        ),
        metrics=runtime.metrics,
        progress=runtime.progress,
        responses=ResponseStore(settings.http_responses_bytes),
        flush_cache=partial(flush_cache, tls=settings.tls),
    )
    app: ASGIApp = PostPaths(make_app(context, hidden=_hidden(settings)))
    app = JsonOnly(BodyPace(app, settings.http_min_body_rate))
    app = SessionHeader(app)
    if runtime.tracer.is_on:
        app = TraceHeader(app)
    if not guard.is_open:
        app = KeyCheck(app, guard, runtime.metrics)
    return HttpServer(
        _guarded(app, address, settings),
        address,
        limits=ConnectionLimits(
            head_s=settings.http_head_s,
            idle_s=settings.http_idle_s,
            stall_s=settings.client_stall_s + _CUT_AFTER_S,
            max_connections=settings.http_connections,
        ),
        tls=FollowedContext(settings.tls) if settings.tls.has_server else None,
    )


def _hidden(settings: RouterSettings) -> frozenset[str]:
    """Paths that this router does not serve."""
    metrics = frozenset() if settings.http_metrics else frozenset({"/metrics"})
    return metrics if settings.http_page else metrics | PAGE_PATHS


def _guarded(app: ASGIApp, address: str, settings: RouterSettings) -> ASGIApp:
    """Browsers' preflight requests come before the key check: they carry no key."""
    if settings.http_cors_origins:
        app = allow_origins(app, settings.http_cors_origins)
    # Under TLS a name that is not in the certificate gets nowhere.
    is_local = is_loopback(split_host_port(address)[0]) and not settings.tls.has_server
    return HostCheck(app, settings.http_allowed_hosts) if is_local or settings.http_allowed_hosts else app
