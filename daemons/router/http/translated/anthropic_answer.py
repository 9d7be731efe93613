"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.chat.parts import (
    ChatPart,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlan
from radixmesh.daemons.router.http.answers.collected import CollectedRequest
from radixmesh.daemons.router.http.answers.sse import EventStream, EventWriter
from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.errors import error_body
from radixmesh.daemons.router.http.translated.anthropic_request import CountTokensRequest, MessagesRequest
from radixmesh.daemons.router.http.translated.part_reader import PartReader, arguments_of, whole_message
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.router.v1 import router_pb2

JsonObject = Mapping[str, object]


class MessagesEndpoint:
    """POST: a chat in, one message of content blocks out."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, (message,) = await self._context.body.read(request, MessagesRequest)
        generate = cast("router_pb2.GenerateRequest", message)
        request_id = generate.request_id = new_id("msg", None)
        by = "" if generate.HasField("grammar") or body.packed_use is None else "tools"
        plan = await self._context.chats.plan(generate, body.tool_use)
        body = replace(body, ignored=(*body.ignored, *plan.ignored))
        headers = {**body.ignored_headers(), "request-id": request_id, "x-request-id": request_id}
        if body.stream:
            return EventStream(self._context, [generate], MessageEvents(request_id, plan), headers, constrained_by=by)
        (answer,) = await run_whole(self._context, request, [generate], constrained_by=by)
        return JSONResponse(_whole(request_id, answer, plan), headers=headers)


class CountTokensEndpoint:
    """POST: {input_tokens}."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, (message,) = await self._context.body.read(request, CountTokensRequest)
        (item,) = (await self._context.router.tokenize(cast("router_pb2.TokenizeRequest", message))).items
        if item.HasField("error"):
            raise MeshError.from_proto(item.error)
        return JSONResponse({"input_tokens": len(item.ids) // 4}, headers=body.ignored_headers())


class MessageEvents(EventWriter):
    """message_start, a start, deltas and a stop for each content block, message_delta, message_stop."""

    done: ClassVar[bytes] = b""

    def __init__(self, request_id: str, plan: ChatPlan) -> None:
        self._request_id, self._plan = request_id, plan
        self._model, self._num_prompt = "", 0
        self._reader: PartReader | None = None
        # Index of the block, and the kind of the open one: "" = none is open.
        self._block = -1
        self._kind = ""

    async def prepare(self, resolved: ResolvedRequest) -> None:
        self._model, self._num_prompt = resolved.model, len(resolved.prompt_ids) // 4
        self._reader = PartReader(self._plan, resolved)

    def begin(self) -> bytes:
        usage = _usage(self._num_prompt, 0, 0)
        message = {**_head(self._request_id, self._model), "content": [], **_ending("", None), "usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def write(self, prompt_index: int, update: Update) -> bytes:
        assert self._reader is not None
        parts, finished = self._reader.read(update)
        events = b"".join(map(self._part, parts))
        if finished is None:
            return events
        ending = _ending(_stop_reason(finished, self._reader.num_calls), finished.stop or None)
        usage = _usage(finished.prompt_tokens, finished.cached_tokens, finished.num_output)
        events += self._close() + _event("message_delta", delta=ending, usage=usage)
        return events + _event("message_stop")

    def end(self) -> bytes:
        return b""

    def failed(self, error: MeshError, path: str) -> bytes:
        return b"event: error\ndata: " + dump(error_body(error, path)) + b"\n\n"

    def _part(self, part: ChatPart) -> bytes:
        match part:
            case ContentDelta(text=text):
                return self._open("text", {"type": "text", "text": ""}) + self._delta("text_delta", text=text)
            case ReasoningDelta(text=text):
                thought: JsonObject = {"type": "thinking", "thinking": "", "signature": ""}
                return self._open("thinking", thought) + self._delta("thinking_delta", thinking=text)
            case ToolCallStart(id=call_id, name=name):
                block: JsonObject = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._close() + self._open("tool_use", block)
            case ToolCallArguments(text=text):
                return self._delta("input_json_delta", partial_json=text)

    def _open(self, kind: str, block: JsonObject) -> bytes:
        if self._kind == kind:
            return b""
        closed = self._close()
        self._kind, self._block = kind, self._block + 1
        return closed + _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._block)

    def _delta(self, kind: str, **values: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta={"type": kind, **values})


def _event(kind: str, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dump({"type": kind, **fields}) + b"\n\n"


def _head(request_id: str, model: str) -> JsonObject:
    return {"id": request_id, "type": "message", "role": "assistant", "model": model}


def _whole(request_id: str, answer: CollectedRequest, plan: ChatPlan) -> JsonObject:
    ending, message = answer.outputs[0].ending, whole_message(answer, plan)
    content: list[JsonObject] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        content.append({"type": "text", "text": message.content})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in message.tool_calls
    ]
    return {
        **_head(request_id, answer.resolved.model),
        "content": content,
        **_ending(_stop_reason(ending, len(message.tool_calls)), ending.stop or None),
        "usage": _usage(ending.prompt_tokens, ending.cached_tokens, ending.num_output),
    }


def _input(call: ToolCall) -> object:
    """Arguments as an object; a call that max_tokens cut off has what was written as one text."""
    arguments = arguments_of(call.arguments)
    return {"_raw": call.arguments} if arguments is None else arguments


def _ending(reason: str, sequence: str | None) -> JsonObject:
    return {"stop_reason": reason or None, "stop_sequence": sequence}


def _stop_reason(finished: Finished, num_calls: int) -> str:
    if finished.reason == FinishReason.LENGTH:
        return "max_tokens"
    if finished.stop:
        return "stop_sequence"
    return "tool_use" if num_calls else "end_turn"


def _usage(num_prompt: int, num_cached: int, num_output: int) -> JsonObject:
    """Anthropic counts cached tokens apart from the rest of the prompt."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }
