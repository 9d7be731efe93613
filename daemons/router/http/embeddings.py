"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.http.answer import run_whole
from radixmesh.daemons.router.http.body import Body
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.options import Int32, RequestId, Uint32, unsupported
from radixmesh.daemons.router.http.prompts import Prompts, requests_of, split_prompts
from radixmesh.router.v1 import router_pb2


class EmbeddingRequest(Body):
    """OpenAI's fields, and the extensions that concern no tokens."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Uint32 | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    tenant: str | None = None
    request_id: RequestId | None = None

    def to_template(self) -> router_pb2.GenerateRequest:
        """The request of any of the inputs, without it. Raises UNSUPPORTED."""
        if self.dimensions is not None:
            raise unsupported("dimensions", "dimensions is not offered: cut and normalise the vector yourself")
        return router_pb2.GenerateRequest(
            model=self.model or "",
            task=common_pb2.TASK_EMBED,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            tenant=self.tenant or "",
        )


class EmbeddingEndpoint:
    """POST: texts or ids in, one vector each out."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body = await self._context.body.read(request, EmbeddingRequest)
        request_id = new_id("embd", body.request_id)
        requests = requests_of(body.to_template(), split_prompts(body.input, "input"), request_id)
        answers = await run_whole(self._context, request, requests)
        num_tokens = sum(len(answer.resolved.prompt_ids) // 4 for answer in answers)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _vector(answer.outputs[0].vector, is_base64=body.encoding_format == "base64"),
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


def _vector(values: bytes, *, is_base64: bool) -> str | list[float]:
    """values: an f32 array, which is what OpenAI's base64 form holds too."""
    return base64.b64encode(values).decode() if is_base64 else np.frombuffer(values, "<f4").tolist()
