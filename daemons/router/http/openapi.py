"""/openapi.json: a description of every path, its body's fields taken from the types that parse them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import NamedTuple, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import radixmesh
from radixmesh.daemons.router.http.bodies.body import Body
from radixmesh.daemons.router.http.bodies.field_decoders import decoders_of
from radixmesh.daemons.router.http.raw_fields import schema_of_raw
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.embedding_request import ClassifyRequest, EmbeddingRequest
from radixmesh.daemons.router.http.request_types.native_request import NativeRequest
from radixmesh.daemons.router.http.request_types.score_requests import RerankRequest, ScoreRequest
from radixmesh.daemons.router.http.request_types.text_requests import DetokenizeRequest, TokenizeRequest
from radixmesh.daemons.router.http.translated.anthropic_request import CountTokensRequest, MessagesRequest
from radixmesh.daemons.router.http.translated.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from radixmesh.daemons.router.http.translated.responses_request import ResponsesRequest

JsonObject = dict[str, object]

# Paths that no key is asked for: load balancers have none, and learn a state and a version.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/", "/docs", "/page/{file}"})
# Paths that change the mesh, for keys of --admin-keys-file.
ADMIN_PATHS = frozenset({"/flush_cache"})
# Left out by --no-http-page.
PAGE_PATHS = frozenset({"/", "/docs", "/page/{file}", "/mesh"})
# Paths that show state and version without a key, and more with one.
LIMITED_PATHS = frozenset({"/mesh"})
_PAGE = "/page/"


def is_open(path: str) -> bool:
    """True if no key is asked for; the files of the page are the same everywhere."""
    return path in OPEN_PATHS or path.startswith(_PAGE)


class NoBody(Body):
    """POST without a body."""


class Operation(NamedTuple):
    """One path. body: the type of its body, None for GET. media_type: of the answer. also_delete: DELETE beside GET."""

    summary: str
    body: type[Body] | None = None
    media_type: str = "application/json"
    also_delete: bool = False


OPERATIONS: Mapping[str, Operation] = {
    "/v1/chat/completions": Operation("A chat through the model's template", ChatRequest),
    "/v1/completions": Operation("A text, a list of texts, ids, or a list of id lists", CompletionRequest),
    "/v1/responses": Operation("OpenAI's responses: input in, output items out", ResponsesRequest),
    "/v1/responses/{id}": Operation("A stored response; DELETE forgets it", also_delete=True),
    "/v1/messages": Operation("Anthropic's messages: a chat in, content blocks out", MessagesRequest),
    "/v1/messages/count_tokens": Operation("Tokens of a prompt of /v1/messages", CountTokensRequest),
    "/api/chat": Operation("Ollama's chat", OllamaChatRequest),
    "/api/generate": Operation("Ollama's answer to a prompt", OllamaGenerateRequest),
    "/api/show": Operation("One model, in Ollama's form", OllamaShowRequest),
    "/api/tags": Operation("Every model, in Ollama's form"),
    "/api/ps": Operation("The same as /api/tags: all are loaded"),
    "/api/version": Operation("The version, for Ollama's clients"),
    "/v1/embeddings": Operation("One vector for each text or list of ids", EmbeddingRequest),
    "/v1/score": Operation("How well texts go together, or how likely labels follow", ScoreRequest),
    "/rerank": Operation("Documents by how well they answer a query", RerankRequest),
    "/v1/rerank": Operation("The same as /rerank", RerankRequest),
    "/v2/rerank": Operation("The same as /rerank", RerankRequest),
    "/classify": Operation("The probability of a score head's label", ClassifyRequest),
    "/v1/classify": Operation("The same as /classify", ClassifyRequest),
    "/flush_cache": Operation("Empties the prefix caches once nothing runs; needs an admin key", NoBody),
    "/generate": Operation("The native form of SGLang", NativeRequest),
    "/tokenize": Operation("The ids of texts, or of a chat", TokenizeRequest),
    "/detokenize": Operation("The texts of ids", DetokenizeRequest),
    "/v1/models": Operation("Every model that is served"),
    "/v1/models/{name}": Operation("One model"),
    "/health": Operation("200 while the router serves, else 503"),
    "/ping": Operation("The same as /health"),
    "/health_generate": Operation("200 while a scheduler's workers make progress, else 503; no forward pass"),
    "/version": Operation("The version of radixmesh"),
    "/get_model_info": Operation("The first served model, in SGLang's form"),
    "/server_info": Operation("Version, limits and load, in SGLang's form"),
    "/get_server_info": Operation("The same as /server_info"),
    "/metrics": Operation("The router's metrics for Prometheus", media_type="text/plain"),
    "/openapi.json": Operation("This description"),
    "/mesh": Operation("The mesh as the page at / shows it; without a key, where one is asked for, status and version"),
    "/": Operation("A page to chat and to look at the mesh", media_type="text/html"),
    "/docs": Operation("This description as a page", media_type="text/html"),
    "/page/{file}": Operation("The page's files", media_type="text/plain"),
}


class OpenApiEndpoint:
    """GET: the description, made at the first request and kept as bytes. hidden: paths that are not served."""

    def __init__(self, hidden: Collection[str] = ()) -> None:
        self._hidden = hidden
        self._whole = b""

    async def __call__(self, request: Request) -> Response:
        self._whole = self._whole or json.dumps(description(self._hidden)).encode()
        return Response(self._whole, media_type="application/json")


def description(hidden: Collection[str] = ()) -> JsonObject:
    """The paths of OPERATIONS, but for the hidden ones, as an OpenAPI 3.1 document."""
    served = {path: operation for path, operation in OPERATIONS.items() if path not in hidden}
    bodies = {op.body for op in served.values() if op.body not in (None, NoBody)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixmesh", "version": radixmesh.__version__},
        "paths": {path: _path_item(path, operation) for path, operation in served.items()},
        "components": {
            "schemas": {body.__name__: _schema_of(body) for body in sorted(bodies, key=lambda body: body.__name__)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _path_item(path: str, operation: Operation) -> JsonObject:
    content: JsonObject = {operation.media_type: {}}
    described: JsonObject = {
        "summary": operation.summary,
        # {}: without a key too, where the router was given none.
        "security": [] if is_open(path) else [{"key": []}, {}],
        "responses": {"200": {"description": "the answer", "content": content}, "default": {"description": "an error"}},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is None:
        return {"get": described, **({"delete": described} if operation.also_delete else {})}
    if operation.body is NoBody:
        return {"post": described}
    schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
    described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": described}


def _schema_of(body: type[Body]) -> JsonObject:
    """The fields that clients set; docs/http.md says what each means."""
    hints, decoders = get_type_hints(body, include_extras=True), decoders_of(body)
    properties: JsonObject = {}
    required = []
    for field in fields(body):
        if field.name in body.OWN_FIELDS:
            continue
        is_required = field.default is MISSING and field.default_factory is MISSING
        if decoders[field.name] is None:
            properties[field.name] = schema_of_raw(body.__name__, field.name, may_be_null=not is_required)
        else:
            properties[field.name] = msgspec.json.schema(hints[field.name])
        if is_required:
            required.append(field.name)
    return {"type": "object", "properties": properties, "required": required}
