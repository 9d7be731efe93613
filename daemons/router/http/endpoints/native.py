"""/generate: SGLang's native form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.collected import CollectedOutput, CollectedRequest, LogprobRun
from radixmesh.daemons.router.http.answers.sse import EventStream, EventWriter, event
from radixmesh.daemons.router.http.answers.tokens import TokenTable
from radixmesh.daemons.router.http.answers.usage import FINISH_REASONS, stop_reason
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.request_types.native_request import NativeRequest
from radixmesh.daemons.router.http.request_types.prompts import name_requests
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.router.v1 import router_pb2

JsonObject = dict[str, object]


class NativeEndpoint:
    """POST: a prompt or a batch in; {text, output_ids, meta_info} or a list of those out.

    A list also comes back for n > 1: output i of prompt p is entry p * n + i.
    """

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        started = time.monotonic()
        body, messages = await self._context.body.read(request, NativeRequest)
        requests = cast("list[router_pb2.GenerateRequest]", messages)
        request_id = new_id("gen", body.rid)
        name_requests(requests, request_id)
        headers = {**body.ignored_headers(), "x-request-id": request_id}
        if body.stream:
            writer = NativeEvents(self._context, body, requests)
            return EventStream(self._context, requests, writer, headers, constrained_by=body.constrained_by)
        answers = await run_whole(self._context, request, requests, constrained_by=body.constrained_by)
        table = await _table_of(self._context, body, answers[0].resolved)
        entries = [_entry(body, answer, output, table, started) for answer in answers for output in answer.outputs]
        is_list = body.is_batch or len(entries) > 1
        return JSONResponse(entries if is_list else entries[0], headers=headers)


class NativeEvents(EventWriter):
    """One event per output that has news: all of the output so far, or with `incremental` what is new of it."""

    def __init__(
        self, context: HttpContext, body: NativeRequest, requests: Sequence[router_pb2.GenerateRequest]
    ) -> None:
        self._context = context
        self._body = body
        self._answers = [CollectedRequest() for _ in requests]
        counts = [max(1, request.n) for request in requests]
        self._first = [sum(counts[:index]) for index in range(len(counts))]
        self._has_index = body.is_batch or sum(counts) > 1
        self._started = time.monotonic()
        self._table: TokenTable | None = None

    async def prepare(self, resolved: ResolvedRequest) -> None:
        self._table = await _table_of(self._context, self._body, resolved)

    def begin(self) -> bytes:
        return b""

    def write(self, prompt_index: int, update: Update) -> bytes:
        answer = self._answers[prompt_index]
        answer.add(update)
        changed = {delta.index for delta in update.deltas} | {finished.index for finished in update.finished}
        events: list[bytes] = []
        for i in sorted(changed):
            entry = _entry(self._body, answer, answer.outputs[i], self._table, self._started)
            if self._has_index:
                entry["index"] = self._first[prompt_index] + i
            events.append(event(entry))
            if self._body.incremental:
                _forget(answer.outputs[i])
        return b"".join(events)

    def end(self) -> bytes:
        return b""


async def _table_of(context: HttpContext, body: NativeRequest, resolved: ResolvedRequest) -> TokenTable | None:
    if not (body.return_logprob and body.return_text_in_logprobs):
        return None
    return await context.tables.of(resolved.model_identity)


def _entry(
    body: NativeRequest, answer: CollectedRequest, output: CollectedOutput, table: TokenTable | None, started: float
) -> JsonObject:
    resolved, finished = answer.resolved, output.finished
    meta: JsonObject = {
        "id": resolved.request_id,
        "finish_reason": None,
        "prompt_tokens": len(resolved.prompt_ids) // 4,
        "completion_tokens": output.num_forgotten + len(output.ids),
        "weight_version": output.weights_version,
    }
    if finished is not None:
        meta["finish_reason"] = _finish_reason(finished)
        meta["completion_tokens"] = finished.num_output
        meta["cached_tokens"] = finished.cached_tokens
        meta["e2e_latency"] = time.monotonic() - started
    if body.return_logprob:
        meta["output_token_logprobs"] = _values(output.ids, output.logprobs.values, table)
        if body.top_logprobs_num:
            meta["output_top_logprobs"] = _tops(len(output.ids), output.logprobs, table)
    start = body.prompt_logprobs_from
    if start is not None and answer.prompt_logprobs is not None:
        prompt_ids = unpack_ints(resolved.prompt_ids, "prompt_ids").tolist()
        values: list[float | None] = [None, *answer.prompt_logprobs.values]
        meta["input_token_logprobs"] = _values(prompt_ids, values, table)[start:]
        if body.top_logprobs_num:
            tops = _tops(len(prompt_ids) - 1, answer.prompt_logprobs, table)
            meta["input_top_logprobs"] = [None, *tops][start:]
    return {"text": output.text, "output_ids": list(output.ids), "meta_info": meta}


def _finish_reason(finished: Finished) -> JsonObject:
    kind = FINISH_REASONS[finished.reason]
    return (
        {"type": kind, "length": finished.num_output}
        if kind == "length"
        else {
            "type": kind,
            "matched": stop_reason(finished),
        }
    )


def _values(ids: Sequence[int], values: Sequence[float | None], table: TokenTable | None) -> list[list[object]]:
    return [[value, token, _text(token, table)] for token, value in zip(ids, values, strict=True)]


def _tops(num: int, run: LogprobRun, table: TokenTable | None) -> list[list[list[object]]]:
    return [[[value, token, _text(token, table)] for token, value in run.top(index)] for index in range(num)]


def _text(token: int, table: TokenTable | None) -> str | None:
    return None if table is None else table.spelling(token)


def _forget(output: CollectedOutput) -> None:
    """Drops output that was sent, so that it is not sent again."""
    output.num_forgotten += len(output.ids)
    output.ids, output.texts, output.logprobs = output.ids[:0], [], LogprobRun()
