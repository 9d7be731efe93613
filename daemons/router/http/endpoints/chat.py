"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.collected import CollectedOutput, LogprobRun, raise_failure
from radixmesh.daemons.router.http.answers.logprobs import chat_logprobs
from radixmesh.daemons.router.http.answers.sse import EventStream, EventWriter, event, event_around
from radixmesh.daemons.router.http.answers.tokens import TokenTable
from radixmesh.daemons.router.http.answers.usage import FINISH_REASONS, UsageSum, stop_reason, usage_of
from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.endpoints.chat_request import ChatRequest
from radixmesh.daemons.router.requests.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.router.v1 import router_pb2


class ChatEndpoint:
    """POST: a chat in, one more message out."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, (message,) = await self._context.body.read(request, ChatRequest)
        generate = cast("router_pb2.GenerateRequest", message)
        request_id = generate.request_id = new_id("chatcmpl", body.request_id)
        headers = {**body.ignored_headers(), "x-request-id": request_id}
        if body.stream:
            writer = ChatEvents(self._context, request_id, body)
            return EventStream(self._context, [generate], writer, headers)
        (answer,) = await run_whole(self._context, request, [generate])
        table = await self._context.tables.of(answer.resolved.model_identity) if body.logprobs else None
        whole = {
            **_head(request_id, "chat.completion", answer.resolved.model),
            "choices": [_choice(index, output, table) for index, output in enumerate(answer.outputs)],
            "usage": usage_of((0, output.ending) for output in answer.outputs).to_json(),
        }
        return JSONResponse(whole, headers=headers)


class ChatEvents(EventWriter):
    """chat.completion.chunk events: the role first, then content, then why each choice ended, then usage if wanted."""

    def __init__(self, context: HttpContext, request_id: str, body: ChatRequest) -> None:
        self._context = context
        self._request_id = request_id
        self._has_logprobs = bool(body.logprobs)
        self._includes_usage = body.includes_usage
        self._num_outputs = body.num_outputs
        self._usage = UsageSum()
        self._table: TokenTable | None = None
        self._head: dict[str, object] = {}
        # Per index, what stands around the content of a plain chunk: the hot path writes no JSON but the text's.
        self._around: list[tuple[bytes, bytes]] = []

    async def prepare(self, resolved: ResolvedRequest) -> None:
        if self._has_logprobs:
            self._table = await self._context.tables.of(resolved.model_identity)
        self._head = _head(self._request_id, "chat.completion.chunk", resolved.model)
        mark = f"{self._request_id} content"
        self._around = [event_around(self._chunk(i, {"content": mark}), mark) for i in range(self._num_outputs)]

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(event(self._chunk(index, role)) for index in range(self._num_outputs))

    def write(self, place: int, update: Update) -> bytes:
        events: list[bytes] = []
        for delta in update.deltas:
            if self._table is not None and delta.ids:
                run = LogprobRun.of(delta.logprobs)
                logprobs = chat_logprobs(unpack_ints(delta.ids, "ids").tolist(), run, self._table)
                events.append(event(self._chunk(delta.index, {"content": delta.text}, logprobs=logprobs)))
            elif delta.text:
                before, after = self._around[delta.index]
                events += (before, dump(delta.text), after)
        for finished in update.finished:
            raise_failure(finished)
            self._usage.add(place, finished)
            events.append(event(self._chunk(finished.index, {}, finished=finished)))
        return b"".join(events)

    def end(self) -> bytes:
        if not self._includes_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._usage.to_json()})

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        *,
        logprobs: dict[str, object] | None = None,
        finished: Finished | None = None,
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if finished is not None:
            choice["finish_reason"] = FINISH_REASONS[finished.reason]
            choice["stop_reason"] = stop_reason(finished)
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = None
        return chunk


def _head(request_id: str, kind: str, model: str) -> dict[str, object]:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def _choice(index: int, output: CollectedOutput, table: TokenTable | None) -> dict[str, object]:
    ids: Sequence[int] = output.ids
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text},
        "logprobs": chat_logprobs(ids, output.logprobs, table) if table is not None else None,
        "finish_reason": FINISH_REASONS[output.ending.reason],
        "stop_reason": stop_reason(output.ending),
    }
