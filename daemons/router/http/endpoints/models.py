"""/v1/models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.peers.schedulers.served_models import ServedModel
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError


class ModelsEndpoint:
    """GET: every model that a scheduler has announced, or the one that the path names."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        schedulers = self._context.router.schedulers
        # The router serves before it has reached a scheduler: clients that come right then would see no model.
        models = await self._context.router.models()
        name = request.path_params.get("name")
        if name is None:
            named = [(model, id) for model in models for id in (model.name, *schedulers.aliases_of(model.name))]
            return JSONResponse({"object": "list", "data": [self._entry(model, id) for model, id in named]})
        found = schedulers.served(name)
        if found is not None:
            return JSONResponse(self._entry(found, name))
        served = ", ".join(model.name for model in models) or "none"
        message = f"no scheduler serves {name!r}: choose one of {served}"
        raise MeshError(ErrorReason.ERROR_REASON_UNKNOWN_MODEL, message, {"model": str(name)})

    def _entry(self, model: ServedModel, id: str) -> dict[str, object]:
        """One model under its own name or an alias, which `root` leads back to the name."""
        return {
            "id": id,
            "object": "model",
            "created": self._context.created,
            "owned_by": "radixmesh",
            "root": model.name,
            "parent": model.base_model or None,
            "max_model_len": model.identity.max_total_len,
            "vocab_size": model.identity.vocab_size,
            "num_schedulers": model.num_schedulers,
        }
