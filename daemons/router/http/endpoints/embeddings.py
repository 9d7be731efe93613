"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import cast

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.endpoints.embedding_request import EmbeddingRequest
from radixmesh.daemons.router.http.endpoints.prompts import name_requests
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
