"""The paths of the router's HTTP server, and what becomes of errors."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Collection
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from radixmesh.daemons.router.http.bodies.body import ClientGone, UnreadBody
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.endpoints.chat import ChatEndpoint
from radixmesh.daemons.router.http.endpoints.completions import CompletionEndpoint
from radixmesh.daemons.router.http.endpoints.embeddings import EmbeddingEndpoint
from radixmesh.daemons.router.http.endpoints.flush import FlushEndpoint
from radixmesh.daemons.router.http.endpoints.mesh import MeshEndpoint
from radixmesh.daemons.router.http.endpoints.models import ModelsEndpoint
from radixmesh.daemons.router.http.endpoints.native import NativeEndpoint
from radixmesh.daemons.router.http.endpoints.page import PageEndpoint
from radixmesh.daemons.router.http.endpoints.probes import HealthEndpoint, MetricsEndpoint
from radixmesh.daemons.router.http.endpoints.scores import ClassifyEndpoint, RerankEndpoint, ScoreEndpoint
from radixmesh.daemons.router.http.endpoints.server_info import (
    HealthGenerateEndpoint,
    ModelInfoEndpoint,
    ServerInfoEndpoint,
    VersionEndpoint,
)
from radixmesh.daemons.router.http.endpoints.texts import DetokenizeEndpoint, TokenizeEndpoint
from radixmesh.daemons.router.http.errors import CLIENT_CLOSED, ErrorResponse, Linger, RefusedBody, plain_error
from radixmesh.daemons.router.http.openapi import OPERATIONS, OpenApiEndpoint
from radixmesh.daemons.router.http.translated.anthropic_answer import CountTokensEndpoint, MessagesEndpoint
from radixmesh.daemons.router.http.translated.ollama_answer import OllamaEndpoint
from radixmesh.daemons.router.http.translated.ollama_models import (
    OllamaShowEndpoint,
    OllamaTagsEndpoint,
    OllamaVersionEndpoint,
)
from radixmesh.daemons.router.http.translated.ollama_request import OllamaChatRequest, OllamaGenerateRequest
from radixmesh.daemons.router.http.translated.responses_answer import ResponsesEndpoint, StoredResponseEndpoint
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Request, Exception], Awaitable[Response]]

# Bound of a body that is still read after it was refused, before the connection is cut off.
# All of a body that is within its own bound: a reset before that would lose the answer that says to come again.
_LINGER = Linger(seconds=5.0, max_bytes=16 << 20)
# Longer than any path that is meant.
_MAX_ALIKE_CHARS = 64
_CODES = {404: "UNKNOWN_PATH", 405: "WRONG_METHOD"}


def make_app(context: HttpContext, hidden: Collection[str] = ()) -> Starlette:
    """The application: endpoints know nothing of status codes, errors become them here. hidden: paths to leave out."""
    posts: dict[str, Endpoint] = {
        "/v1/chat/completions": ChatEndpoint(context),
        "/v1/completions": CompletionEndpoint(context),
        "/v1/responses": ResponsesEndpoint(context),
        "/v1/messages": MessagesEndpoint(context),
        "/v1/messages/count_tokens": CountTokensEndpoint(context),
        "/api/chat": OllamaEndpoint(context, OllamaChatRequest),
        "/api/generate": OllamaEndpoint(context, OllamaGenerateRequest),
        "/api/show": OllamaShowEndpoint(context),
        "/v1/embeddings": EmbeddingEndpoint(context),
        "/v1/score": ScoreEndpoint(context),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankEndpoint(context)),
        **dict.fromkeys(("/classify", "/v1/classify"), ClassifyEndpoint(context)),
        "/generate": NativeEndpoint(context),
        "/flush_cache": FlushEndpoint(context),
        "/tokenize": TokenizeEndpoint(context),
        "/detokenize": DetokenizeEndpoint(context),
    }
    gets: dict[str, Endpoint] = {
        "/v1/models": ModelsEndpoint(context),
        "/v1/models/{name:path}": ModelsEndpoint(context),
        "/v1/responses/{id}": StoredResponseEndpoint(context),
        **dict.fromkeys(("/api/tags", "/api/ps"), OllamaTagsEndpoint(context)),
        "/api/version": OllamaVersionEndpoint(),
        "/health": HealthEndpoint(context),
        "/ping": HealthEndpoint(context),
        "/health_generate": HealthGenerateEndpoint(context),
        "/version": VersionEndpoint(context),
        "/get_model_info": ModelInfoEndpoint(context),
        "/server_info": ServerInfoEndpoint(context),
        "/get_server_info": ServerInfoEndpoint(context),
        "/metrics": MetricsEndpoint(context),
        "/openapi.json": OpenApiEndpoint(hidden),
        "/mesh": MeshEndpoint(context),
        "/": PageEndpoint("index.html"),
        "/docs": PageEndpoint("docs.html"),
        "/page/{file}": PageEndpoint(),
    }
    methods: dict[str, tuple[str, ...]] = {**dict.fromkeys(posts, ("POST",)), **dict.fromkeys(gets, ("GET",))}
    methods["/v1/responses/{id}"] = ("GET", "DELETE")
    routes = [
        Route(path, _as_function(endpoint), methods=methods[path])
        for path, endpoint in {**posts, **gets}.items()
        if path not in hidden
    ]
    failures = _Failures(context, [path for path in OPERATIONS if path not in hidden])
    return Starlette(
        routes=routes,
        exception_handlers={
            UnreadBody: failures.unread_body,
            MeshError: failures.mesh_error,
            ClientGone: failures.client_gone,
            HTTPException: failures.http_error,
            Exception: failures.bug,
        },
    )


class PostPaths:
    """An ASGI application before the framework's: POSTs to known paths go to their endpoints at once.

    The framework's layers, through each of which a request goes and every part of its answer comes, are a fortieth of
    what a short answer costs.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app
        routes = [route for route in app.routes if isinstance(route, Route)]
        self._endpoints: dict[str, Endpoint] = {
            route.path: route.endpoint for route in routes if "POST" in (route.methods or ())
        }
        self._handlers = cast("dict[type, Handler]", app.exception_handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        is_started = False

        async def send_noted(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, send_noted)
        except Exception as error:
            # The nearest one counts.
            handler = next(self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers)
            if not is_started:
                await (await handler(request, error))(scope, receive, send)
            if is_started or handler is self._handlers[Exception]:
                raise  # Logged where it ends up.


class _Failures:
    """Errors as responses; typed ones are counted. paths: those that are served."""

    def __init__(self, context: HttpContext, paths: Collection[str]) -> None:
        self._context = context
        self._paths = paths

    async def mesh_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, MeshError)
        self._context.metrics.count_error(error)
        return ErrorResponse(error, request.url.path)

    async def unread_body(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, UnreadBody)
        self._context.metrics.count_error(error)
        return RefusedBody(error, _LINGER, request.url.path)

    async def client_gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)  # Nobody reads it.

    async def http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        is_preflight = "access-control-request-method" in request.headers
        if request.method == "OPTIONS" and error.status_code == 405 and not is_preflight:
            return Response(status_code=204, headers=error.headers)
        code = _CODES.get(error.status_code, "INVALID_ARGUMENT")
        message = f"{request.method} {request.url.path:.200}: {_advice(request, error, is_preflight, self._paths)}"
        response = plain_error(error.status_code, code, message, request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def bug(self, request: Request, error: Exception) -> Response:
        """The traceback is logged where the exception ends up."""
        message = "the router failed on this request: its log says how"
        fault = MeshError(ErrorReason.ERROR_REASON_INTERNAL, message)
        self._context.metrics.count_error(fault)
        return ErrorResponse(fault, request.url.path)


def _advice(request: Request, error: HTTPException, is_preflight: bool, paths: Collection[str]) -> str:
    if is_preflight and error.status_code == 405:
        return "pages of other origins are not let in: name theirs in the router's --http-cors-origins"
    if error.status_code == 405:
        return f"this path takes {(error.headers or {}).get('Allow', 'another method')}: send that"
    path = request.url.path.rstrip("/")
    # A base URL of a client has /v1 where it should not, or lacks it.
    candidates = [f"/v1{path}", path.replace("/v1/v1/", "/v1/")]
    if len(path) <= _MAX_ALIKE_CHARS:
        candidates += difflib.get_close_matches(path, paths, 1)
    found = next((path for path in candidates if path in paths), None)
    return f"no such path: {f'did you mean {found}?' if found else 'GET /openapi.json lists all'}"


def _as_function(endpoint: Endpoint) -> Endpoint:
    """Starlette takes objects for ASGI applications of their own."""

    async def call(request: Request) -> Response:
        return await endpoint(request)

    return call
