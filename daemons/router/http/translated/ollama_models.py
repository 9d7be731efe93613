"""Ollama's /api/tags, /api/ps, /api/show and /api/version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import radixmesh
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.translated.ollama_answer import unknown_model
from radixmesh.daemons.router.http.translated.ollama_request import OllamaShowRequest, model_name
from radixmesh.daemons.router.peers.schedulers.served_models import ServedModel
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

JsonObject = Mapping[str, object]
# Nobody here knows them: Ollama's clients want the fields, and show what they hold.
_DETAILS: JsonObject = {
    "parent_model": "",
    "format": "safetensors",
    "family": "",
    "families": None,
    "parameter_size": "",
    "quantization_level": "",
}


class OllamaTagsEndpoint:
    """GET: every served model, and each of its aliases."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        schedulers, models = self._context.router.schedulers, await self._context.router.models()
        named = [(model, name) for model in models for name in _names(model, schedulers.aliases_of)]
        return JSONResponse({"models": [self._entry(model, name) for model, name in named]})

    def _entry(self, model: ServedModel, name: str) -> JsonObject:
        changed = datetime.fromtimestamp(self._context.created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "name": name,
            "model": name,
            "modified_at": changed,
            "size": 0,
            "digest": model.identity.model_fingerprint,
            "details": _DETAILS,
        }


class OllamaShowEndpoint:
    """POST of a model's name: what is known of it."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, _ = await self._context.body.read(request, OllamaShowRequest)
        name = body.model or body.name
        if not name:
            message = "model is missing: set it"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "model"})
        served = self._context.router.schedulers.served(model_name(name))
        if served is None:
            raise unknown_model(name)
        info = {
            "general.architecture": "radixmesh",
            "general.basename": served.name,
            "radixmesh.context_length": served.identity.max_total_len,
            "radixmesh.vocab_size": served.identity.vocab_size,
        }
        whole = {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": _DETAILS,
            "model_info": info,
            "capabilities": await self._capabilities(served.name),
        }
        return JSONResponse(whole, headers=body.ignored_headers())

    async def _capabilities(self, name: str) -> Sequence[str]:
        """In Ollama's words: its clients send tools, or ask for thoughts, where they are among them."""
        form = await self._context.chats.format_of(name)
        found = {"completion": True, "tools": bool(form.calls), "thinking": form.has_markup}
        return [word for word, is_there in found.items() if is_there]


class OllamaVersionEndpoint:
    """GET: {version} of radixmesh."""

    async def __call__(self, request: Request) -> Response:
        return JSONResponse({"version": radixmesh.__version__})


def _names(model: ServedModel, aliases_of: Callable[[str], list[str]]) -> Sequence[str]:
    return (model.name, *aliases_of(model.name))
