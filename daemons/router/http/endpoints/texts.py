"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from radixmesh.daemons.router.http.bodies.sliced_json import ids_answer, texts_answer
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.request_types.text_requests import DetokenizeRequest, TokenizeRequest
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2


class TokenizeEndpoint:
    """POST: {count, max_model_len, tokens}; tokens is a list of lists where prompt was a list. return_token_strs: their
    texts beside them, as token_strs."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, (message,) = await self._context.body.read(request, TokenizeRequest)
        encoded = (await self._context.router.tokenize(cast("router_pb2.TokenizeRequest", message))).items
        for item in encoded:
            if item.HasField("error"):
                raise MeshError.from_proto(item.error)
        ids = [unpack_ints(item.ids, "ids") for item in encoded]
        served = self._context.router.schedulers.served(body.model or "")
        fields = {
            "count": sum(map(len, ids)),
            "max_model_len": served.identity.max_total_len if served is not None else None,
        }
        spelling = None
        if body.return_token_strs:
            model = served.identity if served is not None else ServedIdentity()
            spelling = (await self._context.tables.of(model)).spelling
        return ids_answer(fields, ids, body.ignored_headers(), is_list=body.is_batch, spelling=spelling)


class DetokenizeEndpoint:
    """POST: {text, prompt}, the same text under SGLang's name and vLLM's; lists of texts where tokens was a list of
    lists. Parts of characters show as U+FFFD."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, (message,) = await self._context.body.read(request, DetokenizeRequest)
        texts = list(await self._context.router.decode(cast("tokenizer_pb2.DecodeRequest", message)))
        return texts_answer(("text", "prompt"), texts, body.ignored_headers(), is_list=body.is_batch)
