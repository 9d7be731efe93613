"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from radixmesh.daemons.router.chat.parts import ChatPart, join
from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.chat_choices import delta_of, finish_reason, message_of
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlan
from radixmesh.daemons.router.http.answers.collected import CollectedOutput, LogprobRun, raise_failure
from radixmesh.daemons.router.http.answers.logprobs import chat_logprobs, check_prompt_entries, prompt_logprobs
from radixmesh.daemons.router.http.answers.output_reader import OutputReader
from radixmesh.daemons.router.http.answers.sse import EventStream, EventWriter, event, event_around
from radixmesh.daemons.router.http.answers.tokens import TokenTable, prompt_ids_of
from radixmesh.daemons.router.http.answers.usage import UsageSum, stop_reason
from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update
from radixmesh.daemons.runtime.arrays import unpack_list
from radixmesh.router.v1 import router_pb2


class ChatEndpoint:
    """POST: a chat in, one more message out."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, (message,) = await self._context.body.read(request, ChatRequest)
        generate = cast("router_pb2.GenerateRequest", message)
        request_id = generate.request_id = new_id("chatcmpl", body.request_id)
        # Calls that must follow their schemas constrain an answer too.
        by = body.constrained_by if generate.HasField("grammar") or body.packed_use is None else "tools"
        plan = await self._context.chats.plan(
            generate,
            body.tool_use,
            separates=body.separate_reasoning is not False,
            keeps_reasoning=body.include_reasoning is not False,
        )
        body = replace(body, ignored=(*body.ignored, *plan.ignored))
        headers = {**body.ignored_headers(), "x-request-id": request_id}
        if body.stream:
            writer = ChatEvents(self._context, request_id, body, plan)
            return EventStream(self._context, [generate], writer, headers, constrained_by=by)
        (answer,) = await run_whole(self._context, request, [generate], constrained_by=by)
        wants_table = body.logprobs or body.prompt_logprobs is not None
        table = await self._context.tables.of(answer.resolved.model_identity) if wants_table else None
        told_ids = {"prompt_token_ids": prompt_ids_of(answer.resolved)} if body.return_token_ids else {}
        told: dict[str, object] = {}
        if table is not None and body.prompt_logprobs is not None and answer.prompt_logprobs is not None:
            prompt_ids = unpack_list(answer.resolved.prompt_ids, "prompt_ids")
            check_prompt_entries(len(prompt_ids), body.prompt_logprobs)
            run = answer.prompt_logprobs.cut(body.prompt_logprobs)
            told["prompt_logprobs"] = prompt_logprobs(prompt_ids, run, table)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        usage = UsageSum()
        choices: list[dict[str, object]] = []
        for index, output in enumerate(answer.outputs):
            reader = OutputReader(plan, answer.resolved, index)
            choices.append(_choice(output, reader, index, table, num_top))
            if told_ids:
                choices[-1]["token_ids"] = output.ids.tolist()
            usage.add(0, output.ending, reader.num_reasoning)
        whole = {
            **_head(request_id, "chat.completion", answer.resolved.model),
            **told_ids,
            **told,
            "choices": choices,
            "usage": usage.to_json(),
        }
        return Response(dump(whole), headers=headers, media_type="application/json")


class ChatEvents(EventWriter):
    """chat.completion.chunk events: the role first, then content, then why each choice ended, then usage if wanted."""

    def __init__(self, context: HttpContext, request_id: str, body: ChatRequest, plan: ChatPlan) -> None:
        self._context = context
        self._plan = plan
        # Per index; none where all text is content.
        self._readers: list[OutputReader] = []
        self._request_id = request_id
        self._has_logprobs = bool(body.logprobs)
        self._has_ids = bool(body.return_token_ids)
        self._prompt_ids: dict[str, object] = {}
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
        if self._has_ids:
            self._prompt_ids = {"prompt_token_ids": prompt_ids_of(resolved)}
        if not self._plan.is_plain:
            self._readers = [OutputReader(self._plan, resolved, index) for index in range(self._num_outputs)]
        mark = f"{self._request_id} content"
        self._around = [event_around(self._chunk(i, {"content": mark}), mark) for i in range(self._num_outputs)]

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(event({**self._chunk(index, role), **self._prompt_ids}) for index in range(self._num_outputs))

    def write(self, prompt_index: int, update: Update) -> bytes:
        events: list[bytes] = []
        for delta in update.deltas:
            logprobs = None
            ids = unpack_list(delta.ids, "ids") if self._has_ids or self._has_logprobs else []
            if self._table is not None and ids:
                logprobs = chat_logprobs(ids, LogprobRun.of(delta.logprobs), self._table)
            if self._readers:
                events += self._parsed(delta.index, self._readers[delta.index].feed(delta), logprobs, ids)
            elif ids:
                events.append(event(self._chunk(delta.index, {"content": delta.text}, logprobs=logprobs, ids=ids)))
            elif delta.text:
                before, after = self._around[delta.index]
                events += (before, dump(delta.text), after)
        for finished in update.finished:
            raise_failure(finished)
            num_reasoning: int | None = None
            if self._readers:
                reader = self._readers[finished.index]
                events += self._parsed(finished.index, reader.finish())
                num_reasoning = reader.num_reasoning
            self._usage.add(prompt_index, finished, num_reasoning)
            events.append(event(self._chunk(finished.index, {}, finished=finished)))
        return b"".join(events)

    def _parsed(
        self,
        index: int,
        parts: list[ChatPart],
        logprobs: dict[str, object] | None = None,
        ids: Sequence[int] = (),
    ) -> list[bytes]:
        """One chunk a part; logprobs and ids are with the first, as some tokens are markup and show in none."""
        deltas = [delta_of(part) for part in parts]
        if ids and not deltas:
            deltas = [{"content": ""}]
        first = [event(self._chunk(index, delta, logprobs=logprobs, ids=ids)) for delta in deltas[:1]]
        return first + [event(self._chunk(index, delta)) for delta in deltas[1:]]

    def end(self) -> bytes:
        if not self._includes_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._usage.to_json()})

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, object],
        *,
        logprobs: dict[str, object] | None = None,
        finished: Finished | None = None,
        ids: Sequence[int] = (),
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if finished is not None:
            num_calls = self._readers[index].num_calls if self._readers else 0
            choice["finish_reason"] = finish_reason(finished, num_calls)
            choice["stop_reason"] = stop_reason(finished)
        if self._has_ids:
            choice["token_ids"] = list(ids)
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = None
        return chunk


def _head(request_id: str, kind: str, model: str) -> dict[str, object]:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def _choice(
    output: CollectedOutput,
    reader: OutputReader,
    index: int,
    table: TokenTable | None,
    num_top: int | None,
) -> dict[str, object]:
    ids: Sequence[int] = output.ids
    message = join(reader.whole(output.text, output.ids.tobytes()))
    return {
        "index": index,
        "message": message_of(message),
        "logprobs": chat_logprobs(ids, output.logprobs.cut(num_top), table)
        if table is not None and num_top is not None
        else None,
        "finish_reason": finish_reason(output.ending, reader.num_calls),
        "stop_reason": stop_reason(output.ending),
    }
