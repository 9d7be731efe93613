"""/v1/models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.scheduler_pool import ServedModel
from radixmesh.daemons.runtime.errors import MeshError


class ModelsEndpoint:
    """GET: every model that a scheduler has announced, or the one that the path names."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        models = self._context.router.schedulers.models()
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [self._entry(model) for model in models]})
        for model in models:
            if model.name == name:
                return JSONResponse(self._entry(model))
        served = ", ".join(model.name for model in models) or "none"
        message = f"no scheduler serves {name!r}: choose one of {served}"
        raise MeshError(ErrorReason.ERROR_REASON_UNKNOWN_MODEL, message, {"model": str(name)})

    def _entry(self, model: ServedModel) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._context.created,
            "owned_by": "radixmesh",
            "parent": model.base_model or None,
            "max_model_len": model.identity.max_total_len,
            "vocab_size": model.identity.vocab_size,
            "num_schedulers": model.num_schedulers,
        }
