"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.collected import CollectedOutput, CollectedRequest, LogprobRun, raise_failure
from radixmesh.daemons.router.http.answers.logprobs import CompletionLogprobs, check_prompt_entries, prompt_logprobs
from radixmesh.daemons.router.http.answers.sse import EventStream, EventWriter, event, event_around
from radixmesh.daemons.router.http.answers.tokens import TokenTable, prompt_ids_of
from radixmesh.daemons.router.http.answers.usage import FINISH_REASONS, UsageSum, stop_reason, usage_of
from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.prompts import name_requests
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update
from radixmesh.daemons.runtime.arrays import unpack_list
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2


class CompletionEndpoint:
    """POST: prompts in, what follows them out. Choice i of prompt p has the index p * n + i."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, messages = await self._context.body.read(request, CompletionRequest)
        requests = cast("list[router_pb2.GenerateRequest]", messages)
        request_id = new_id("cmpl", body.request_id)
        name_requests(requests, request_id)
        headers = {**body.ignored_headers(), "x-request-id": request_id}
        echoes = await self._echoes(requests) if body.echo else [""] * len(requests)
        if body.stream:
            writer = CompletionEvents(self._context, request_id, body, echoes)
            return EventStream(self._context, requests, writer, headers, constrained_by=body.constrained_by)
        answers = await run_whole(self._context, request, requests, constrained_by=body.constrained_by)
        if body.is_prompt_only:
            answers = [_without_output(answer) for answer in answers]
        wants_table = body.logprobs is not None or body.prompt_logprobs is not None
        table = await self._context.tables.of(answers[0].resolved.model_identity) if wants_table else None
        told_tokens = sum(answer.resolved.num_prompt * len(answer.outputs) for answer in answers)
        if body.prompt_logprobs is not None:
            check_prompt_entries(told_tokens, body.prompt_logprobs)
        if body.echo and body.logprobs is not None:
            check_prompt_entries(told_tokens, body.logprobs, "logprobs")
        choices: list[dict[str, object]] = []
        for answer, echo in zip(answers, echoes, strict=True):
            first = len(choices)
            made = [_choice(first + i, answer, i, echo, table, body) for i in range(len(answer.outputs))]
            if table is not None and body.prompt_logprobs is not None and answer.prompt_logprobs is not None:
                prompt_ids = unpack_list(answer.resolved.prompt_ids, "prompt_ids")
                told = prompt_logprobs(prompt_ids, answer.prompt_logprobs.cut(body.prompt_logprobs), table)
                made = [{**choice, "prompt_logprobs": told} for choice in made]
            if body.return_token_ids:
                _add_ids(made, answer)
            choices += made
        endings = (
            (prompt_index, output.ending) for prompt_index, answer in enumerate(answers) for output in answer.outputs
        )
        whole = {
            **_head(request_id, answers[0].resolved.model),
            "choices": choices,
            "usage": usage_of(endings).to_json(),
        }
        return Response(dump(whole), headers=headers, media_type="application/json")

    async def _echoes(self, requests: Sequence[router_pb2.GenerateRequest]) -> list[str]:
        """The prompts as texts."""
        lists = [request.prompt_ids for request in requests if request.HasField("prompt_ids")]
        decoded = iter(await self._context.router.decode(tokenizer_pb2.DecodeRequest(ids=lists)) if lists else ())
        return [next(decoded) if request.HasField("prompt_ids") else request.text for request in requests]


class CompletionEvents(EventWriter):
    """text_completion events: the prompt first if it is to be echoed, then text, then why each choice ended."""

    def __init__(self, context: HttpContext, request_id: str, body: CompletionRequest, echoes: Sequence[str]) -> None:
        self._context = context
        self._request_id = request_id
        self._has_logprobs = body.logprobs is not None
        self._has_ids = bool(body.return_token_ids)
        # With return_token_ids: the ids of each prompt, until its choices' first events.
        self._prompt_ids: dict[int, msgspec.Raw] = {}
        self._includes_usage = body.includes_usage
        self._num_outputs = body.num_outputs
        self._echoes = echoes if body.echo else []
        self._num_choices = len(echoes) * body.num_outputs
        self._usage = UsageSum()
        self._logprobs: list[CompletionLogprobs] = []
        self._head: dict[str, object] = {}
        self._around: list[tuple[bytes, bytes]] = []

    async def prepare(self, resolved: ResolvedRequest) -> None:
        if self._has_logprobs:
            table = await self._context.tables.of(resolved.model_identity)
            skips = resolved.stop.skip_special_tokens
            self._logprobs = [CompletionLogprobs(table, skips_special=skips) for _ in range(self._num_choices)]
        self._head = _head(self._request_id, resolved.model)
        mark = f"{self._request_id} text"
        self._around = [event_around(self._chunk(i, mark), mark) for i in range(self._num_choices)]

    def begin(self) -> bytes:
        texts = [
            (prompt_index * self._num_outputs + i, echo)
            for prompt_index, echo in enumerate(self._echoes)
            for i in range(self._num_outputs)
        ]
        return b"".join(event(self._chunk(index, text)) for index, text in texts)

    def write(self, prompt_index: int, update: Update) -> bytes:
        events: list[bytes] = []
        first = prompt_index * self._num_outputs
        if self._has_ids and update.resolved is not None:
            prompt_ids = prompt_ids_of(update.resolved)
            self._prompt_ids |= {first + index: prompt_ids for index in range(self._num_outputs)}
        for delta in update.deltas:
            index = first + delta.index
            if self._has_logprobs and delta.ids:
                ids = unpack_list(delta.ids, "ids")
                logprobs = self._logprobs[index].of(ids, LogprobRun.of(delta.logprobs))
                events.append(event(self._chunk(index, delta.text, logprobs=logprobs, ids=ids)))
            elif self._has_ids:
                events.append(event(self._chunk(index, delta.text, ids=unpack_list(delta.ids, "ids"))))
            elif delta.text:
                before, after = self._around[index]
                events += (before, dump(delta.text), after)
        for finished in update.finished:
            raise_failure(finished)
            self._usage.add(prompt_index, finished)
            events.append(event(self._chunk(first + finished.index, "", finished=finished)))
        return b"".join(events)

    def end(self) -> bytes:
        if not self._includes_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._usage.to_json()})

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: dict[str, object] | None = None,
        finished: Finished | None = None,
        ids: Sequence[int] = (),
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if finished is not None:
            choice["finish_reason"] = FINISH_REASONS[finished.reason]
            choice["stop_reason"] = stop_reason(finished)
        if self._has_ids:
            choice["prompt_token_ids"], choice["token_ids"] = self._prompt_ids.pop(index, None), list(ids)
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = None
        return chunk


def _head(request_id: str, model: str) -> dict[str, object]:
    return {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(
    index: int,
    answer: CollectedRequest,
    output_index: int,
    echo: str,
    table: TokenTable | None,
    body: CompletionRequest,
) -> dict[str, object]:
    output = answer.outputs[output_index]
    return {
        "index": index,
        "text": echo + output.text,
        "logprobs": None if table is None or body.logprobs is None else _logprobs(answer, output, table, body),
        "finish_reason": FINISH_REASONS[output.ending.reason],
        "stop_reason": stop_reason(output.ending),
    }


def _add_ids(choices: Sequence[dict[str, object]], answer: CollectedRequest) -> None:
    """vLLM's fields: the prompt's ids and the output's beside each choice."""
    prompt_ids = prompt_ids_of(answer.resolved)
    for choice, output in zip(choices, answer.outputs, strict=True):
        choice["prompt_token_ids"], choice["token_ids"] = prompt_ids, output.ids.tolist()


def _logprobs(
    answer: CollectedRequest, output: CollectedOutput, table: TokenTable, body: CompletionRequest
) -> dict[str, object]:
    """Of the output, after those of the prompt where it is echoed."""
    form = CompletionLogprobs(table, skips_special=answer.resolved.stop.skip_special_tokens)
    num_top = body.logprobs or 0
    if answer.prompt_logprobs is None or not body.echo:
        return form.of(output.ids, output.logprobs.cut(num_top))
    prompt_ids = unpack_list(answer.resolved.prompt_ids, "prompt_ids")
    prompt = form.of(prompt_ids, answer.prompt_logprobs.cut(num_top), is_start=True)
    rest = form.of(output.ids, output.logprobs.cut(num_top))
    return {name: _joined(values, rest[name]) for name, values in prompt.items()}


def _joined(first: object, second: object) -> object:
    return [*first, *second] if isinstance(first, list) and isinstance(second, list) else first


def _without_output(answer: CollectedRequest) -> CollectedRequest:
    """The prompt's part alone: the one token that had to be made is not told."""
    for output in answer.outputs:
        output.ids, output.texts, output.logprobs = output.ids[:0], [], LogprobRun()
        output.finished = replace(output.ending, num_output=0)
    return answer
