"""/v1/score, /rerank and /classify: numbers for texts, by a score head or by what a model would say next."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.collected import CollectedRequest
from radixmesh.daemons.router.http.bodies.field_decoders import too_large
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.request_types.embedding_request import ClassifyRequest
from radixmesh.daemons.router.http.request_types.prompts import MAX_PROMPTS, MAX_SHARED_BYTES, name_requests
from radixmesh.daemons.router.http.request_types.score_requests import PairRequest, RerankRequest, ScoreRequest
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2


class _Scored(NamedTuple):
    """values: a number a request. texts: what the tokenizer got."""

    answers: list[CollectedRequest]
    texts: Sequence[str]

    @property
    def scores(self) -> list[float]:
        """Of score tasks."""
        return [float(np.frombuffer(answer.outputs[0].vector, "<f4")[0]) for answer in self.answers]

    def head(self, kind: str, request_id: str) -> dict[str, object]:
        num_tokens = sum(len(answer.resolved.prompt_ids) // 4 for answer in self.answers)
        return {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.answers[0].resolved.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


class ScoreEndpoint:
    """POST: one score a pair of texts; with label_token_ids, one probability a label for each item."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, messages = await self._context.body.read(request, ScoreRequest)
        request_id = new_id("score", body.request_id)
        labels = body.label_token_ids or []
        scored = await _score_pairs(self._context, request, body, messages[0], request_id, labels)
        headers = {**body.ignored_headers(), "x-request-id": request_id}
        if labels:
            rows = _label_scores(scored.answers, len(labels), is_softmax=bool(body.apply_softmax))
            return JSONResponse({**scored.head("scoring", request_id), "scores": rows}, headers=headers)
        values = scored.scores if body.activation is False else [_sigmoid(score) for score in scored.scores]
        if body.is_joined:
            # SGLang's form: a list of one for each item.
            rows = [[value] for value in values]
            return JSONResponse({**scored.head("scoring", request_id), "scores": rows}, headers=headers)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
        return JSONResponse({**scored.head("list", request_id), "data": data}, headers=headers)


class RerankEndpoint:
    """POST: documents by how well they answer the query, the best first."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, messages = await self._context.body.read(request, RerankRequest)
        request_id = new_id("rerank", body.request_id)
        scored = await _score_pairs(self._context, request, body, messages[0], request_id)
        documents = scored.texts[body.num_firsts :]
        results: list[dict[str, object]] = []
        # sorted() keeps documents of equal scores in their order.
        for index, score in sorted(enumerate(scored.scores), key=lambda item: -item[1])[: body.top_n or None]:
            results.append({"index": index, "relevance_score": _sigmoid(score)})
            if body.return_documents is not False:
                results[-1]["document"] = {"text": documents[index]}
        whole = {**scored.head("list", request_id), "results": results}
        return JSONResponse(whole, headers={**body.ignored_headers(), "x-request-id": request_id})


class ClassifyEndpoint:
    """POST: the probability of a score head's one label, for each input; with activation false, its score."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, messages = await self._context.body.read(request, ClassifyRequest)
        requests = cast("list[router_pb2.GenerateRequest]", messages)
        request_id = new_id("classify", body.request_id)
        name_requests(requests, request_id)
        scored = _Scored(await run_whole(self._context, request, requests), ())
        data = [
            {
                "index": index,
                "label": "LABEL_0",
                "probs": [score if body.activation is False else _sigmoid(score)],
                "num_classes": 1,
            }
            for index, score in enumerate(scored.scores)
        ]
        whole = {**scored.head("list", request_id), "data": data}
        return JSONResponse(whole, headers={**body.ignored_headers(), "x-request-id": request_id})


async def _score_pairs(
    context: HttpContext,
    request: Request,
    body: PairRequest,
    message: object,
    request_id: str,
    labels: Sequence[int] = (),
) -> _Scored:
    """One request a pair, or with labels one for each of a pair's labels."""
    asked = cast("router_pb2.TokenizeRequest", message)
    encoded = (await context.router.tokenize(asked)).items
    for item in encoded:
        if item.HasField("error"):
            raise MeshError.from_proto(item.error)
    prompts = _prompts(body, [bytes(item.ids) for item in encoded])
    template = router_pb2.GenerateRequest(
        model=body.model or "",
        task=common_pb2.TASK_SCORE,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        tenant=body.tenant or "",
    )
    if labels:
        prompts = [prompt + array("i", [label]).tobytes() for prompt in prompts for label in labels]
        template.task = common_pb2.TASK_GENERATE
        template.ids_only = True
        template.sampling.prompt_logprobs = True
        template.stop.max_tokens = 1
    if len(prompts) > MAX_PROMPTS:
        raise too_large("items", "pairs of an item and a label", len(prompts), MAX_PROMPTS)
    if (size := sum(map(len, prompts))) > MAX_SHARED_BYTES:
        raise too_large("items", "bytes of token ids in all pairs", size, MAX_SHARED_BYTES)
    requests = []
    for prompt in prompts:
        requests.append(router_pb2.GenerateRequest(prompt_ids=prompt))
        requests[-1].MergeFrom(template)
    name_requests(requests, request_id)
    return _Scored(await run_whole(context, request, requests), [item.text for item in asked.items])


def _prompts(body: PairRequest, ids: Sequence[bytes]) -> list[bytes]:
    """The ids of each pair. Counted before they are made: one text may go with a thousand."""
    if body.is_joined:
        return list(ids)
    firsts, seconds = ids[: body.num_firsts], ids[body.num_firsts :]
    size = sum(map(len, firsts)) * (len(seconds) if len(firsts) == 1 else 1) + sum(map(len, seconds))
    if size > MAX_SHARED_BYTES:
        raise too_large("documents", "bytes of token ids, with the query's before each", size, MAX_SHARED_BYTES)
    lone = firsts[0] if len(firsts) == 1 else None
    return [(firsts[i] if lone is None else lone) + second for i, second in enumerate(seconds)]


def _label_scores(answers: Sequence[CollectedRequest], num_labels: int, *, is_softmax: bool) -> list[list[float]]:
    """A row an item: the probability of each label as its next token."""
    logprobs = [_last_logprob(answer) for answer in answers]
    rows = [logprobs[start : start + num_labels] for start in range(0, len(logprobs), num_labels)]
    return [_softmax(row) if is_softmax else [math.exp(value) for value in row] for row in rows]


def _last_logprob(answer: CollectedRequest) -> float:
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs.values), "prompt logprobs were asked for"
    return answer.prompt_logprobs.values[-1]


def _softmax(row: Iterable[float]) -> list[float]:
    values = list(row)
    most = max(values)
    parts = [math.exp(value - most) for value in values]
    return [part / sum(parts) for part in parts]


def _sigmoid(score: float) -> float:
    """In [0, 1], without overflow."""
    if score >= 0:
        return 1 / (1 + math.exp(-score))
    return math.exp(score) / (1 + math.exp(score))
