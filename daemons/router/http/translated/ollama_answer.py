"""Ollama's /api/chat and /api/generate; streams are lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.chat.parts import (
    ChatMessage,
    ChatPart,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlan
from radixmesh.daemons.router.http.answers.sse import EventStream, EventWriter
from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.errors import error_body
from radixmesh.daemons.router.http.translated.ollama_request import (
    OllamaChatRequest,
    OllamaRequest,
    model_name,
)
from radixmesh.daemons.router.http.translated.part_reader import PLAIN_PLAN, PartReader, arguments_of, whole_message
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.router.v1 import router_pb2

JsonObject = Mapping[str, object]
_LINES = "application/x-ndjson"


class OllamaEndpoint:
    """POST of a chat or a prompt. kind: the type of its body."""

    def __init__(self, context: HttpContext, kind: type[OllamaRequest]) -> None:
        self._context = context
        self._kind = kind

    async def __call__(self, request: Request) -> Response:
        began = time.monotonic()
        body, messages = await self._context.body.read(request, self._kind)
        form = OllamaForm(body.model, began, is_chat=self._kind is OllamaChatRequest)
        if not messages:
            return self._loaded(body, form)
        generate = cast("router_pb2.GenerateRequest", messages[0])
        request_id = generate.request_id = new_id("ollama", None)
        by = "" if generate.HasField("grammar") or body.packed_use is None else "tools"
        plan = PLAIN_PLAN if body.is_raw else await self._context.chats.plan(generate, body.tool_use)
        body = replace(body, ignored=(*body.ignored, *plan.ignored))
        headers = {**body.ignored_headers(), "x-request-id": request_id}
        if body.is_streamed:
            return EventStream(self._context, [generate], OllamaLines(form, plan), headers, constrained_by=by)
        (answer,) = await run_whole(self._context, request, [generate], constrained_by=by)
        message, form.first_token = whole_message(answer, plan), answer.first_token
        return JSONResponse(form.last(answer.outputs[0].ending, message), headers=headers)

    def _loaded(self, body: OllamaRequest, form: OllamaForm) -> Response:
        """Ollama's clients warm a model up by an empty request: it is there, or it is not."""
        if self._context.router.schedulers.served(model_name(body.model)) is None:
            raise unknown_model(body.model)
        return JSONResponse({**form.line(ChatMessage()), "done": True, "done_reason": "load"})


class OllamaForm:
    """Lines of one answer. model: as its client calls it. began: when the request came, by the monotonic clock."""

    def __init__(self, model: str, began: float, *, is_chat: bool) -> None:
        self._model = model
        self._began = began
        self._is_chat = is_chat
        self.first_token: float | None = None

    def line(self, message: ChatMessage) -> dict[str, object]:
        head: dict[str, object] = {"model": self._model, "created_at": _now()}
        thought = {"thinking": message.reasoning} if message.reasoning else {}
        if not self._is_chat:
            return {**head, "response": message.content, **thought, "done": False}
        inner: dict[str, object] = {"role": "assistant", "content": message.content, **thought}
        if message.tool_calls:
            inner["tool_calls"] = [_call(call) for call in message.tool_calls]
        return {**head, "message": inner, "done": False}

    def last(self, finished: Finished, message: ChatMessage) -> dict[str, object]:
        """The last line, or the only one. Durations in nanoseconds, as they were here, at the router."""
        now = time.monotonic()
        first = now if self.first_token is None else self.first_token
        return {
            **self.line(message),
            "done": True,
            "done_reason": "length" if finished.reason == FinishReason.LENGTH else "stop",
            "total_duration": _ns(now - self._began),
            "load_duration": 0,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": _ns(first - self._began),
            "eval_count": finished.num_output,
            "eval_duration": _ns(now - first),
        }


class OllamaLines(EventWriter):
    """A line of JSON for each news; calls are told whole."""

    media_type: ClassVar[str] = _LINES
    done: ClassVar[bytes] = b""

    def __init__(self, form: OllamaForm, plan: ChatPlan) -> None:
        self._form, self._plan = form, plan
        self._reader: PartReader | None = None
        self._call: ToolCall | None = None

    async def prepare(self, resolved: ResolvedRequest) -> None:
        self._reader = PartReader(self._plan, resolved)

    def begin(self) -> bytes:
        return b""

    def write(self, prompt_index: int, update: Update) -> bytes:
        assert self._reader is not None
        if update.deltas and self._form.first_token is None:
            self._form.first_token = time.monotonic()
        parts, finished = self._reader.read(update)
        lines = [line for part in parts if (line := self._part(part))]
        if finished is not None:
            lines.append(self._ended_call())
            lines.append(_line(self._form.last(finished, ChatMessage())))
        return b"".join(lines)

    def end(self) -> bytes:
        return b""

    def failed(self, error: MeshError, path: str) -> bytes:
        return _line(error_body(error, path))

    def _part(self, part: ChatPart) -> bytes:
        match part:
            case ContentDelta(text=text):
                return self._ended_call() + _line(self._form.line(ChatMessage(content=text)))
            case ReasoningDelta(text=text):
                return self._ended_call() + _line(self._form.line(ChatMessage(reasoning=text)))
            case ToolCallStart(id=call_id, name=name):
                ended = self._ended_call()
                self._call = ToolCall(call_id, name)
                return ended
            case ToolCallArguments(text=text):
                assert self._call is not None, "arguments come after their call's start"
                self._call.arguments += text
                return b""

    def _ended_call(self) -> bytes:
        call, self._call = self._call, None
        return b"" if call is None else _line(self._form.line(ChatMessage(tool_calls=[call])))


def unknown_model(name: str) -> MeshError:
    reason = ErrorReason.ERROR_REASON_UNKNOWN_MODEL
    return MeshError(reason, f"no scheduler serves {name!r}: /api/tags lists the models", {"model": name})


def _call(call: ToolCall) -> JsonObject:
    """Arguments as an object; a call that max_tokens cut off has what was written as one text."""
    arguments = arguments_of(call.arguments)
    return {"function": {"name": call.name, "arguments": {"_raw": call.arguments} if arguments is None else arguments}}


def _line(value: JsonObject) -> bytes:
    return dump(value) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
