"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import cast

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.bodies.field_decoders import invalid
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.request_types.embedding_request import EmbeddingRequest
from radixmesh.daemons.router.http.request_types.prompts import name_requests
from radixmesh.router.v1 import router_pb2


class EmbeddingEndpoint:
    """POST: texts or ids in, one vector each out."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, messages = await self._context.body.read(request, EmbeddingRequest)
        requests = cast("list[router_pb2.GenerateRequest]", messages)
        request_id = new_id("embd", body.request_id)
        name_requests(requests, request_id)
        answers = await run_whole(self._context, request, requests)
        num_tokens = sum(len(answer.resolved.prompt_ids) // 4 for answer in answers)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _written(
                    _vector(answer.outputs[0].vector, body), is_base64=body.encoding_format == "base64"
                ),
            }
            for index, answer in enumerate(answers)
        ]
        whole = {
            "object": "list",
            "data": data,
            "model": answers[0].resolved.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return JSONResponse(whole, headers={**body.ignored_headers(), "x-request-id": request_id})


def _vector(values: bytes, body: EmbeddingRequest) -> npt.NDArray[np.float32]:
    """values: an f32 array. Raises INVALID_ARGUMENT for more dimensions than the model has."""
    vector = np.frombuffer(values, "<f4")
    if body.dimensions is not None and not 1 <= body.dimensions <= len(vector):
        raise invalid("dimensions", f"dimensions is {body.dimensions}: choose 1 to {len(vector)}, the model's own")
    vector = vector[: body.dimensions]
    # As OpenAI does: the first dimensions of a vector have to be scaled to be comparable.
    is_scaled = body.dimensions is not None if body.normalize is None else body.normalize
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype("<f4") if is_scaled and length else vector


def _written(vector: npt.NDArray[np.float32], *, is_base64: bool) -> str | list[float]:
    """OpenAI's base64 form holds an f32 array."""
    return base64.b64encode(vector.tobytes()).decode() if is_base64 else cast("list[float]", vector.tolist())
