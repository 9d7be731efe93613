"""OpenAI's /v1/responses: whole, streamed, gone on from an earlier one, asked for again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.chat.parts import ChatMessage
from radixmesh.daemons.router.http.answers.answer import run_whole
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlan
from radixmesh.daemons.router.http.answers.sse import EventStream, EventWriter
from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.router.http.context import HttpContext, new_id
from radixmesh.daemons.router.http.errors import error_body
from radixmesh.daemons.router.http.request_types.chat_input import MAX_MESSAGES
from radixmesh.daemons.router.http.translated.part_reader import PartReader, arguments_of, whole_output
from radixmesh.daemons.router.http.translated.response_store import StoredResponse
from radixmesh.daemons.router.http.translated.responses_items import JsonObject, OutputItems
from radixmesh.daemons.router.http.translated.responses_request import ResponsesRequest
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.rpc.caller import current_caller
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

_JSON = msgspec.json.Decoder(dict[str, object])


class ResponsesEndpoint:
    """POST: input in, output items out. What is stored can be gone on from with previous_response_id."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body, (message,) = await self._context.body.read(request, ResponsesRequest)
        generate = cast("router_pb2.GenerateRequest", message)
        tenant = _tenant()
        if body.previous_response_id is not None:
            stored = self._context.responses.get(tenant, body.previous_response_id, "previous_response_id")
            _go_on_from(generate.chat, stored, body.has_instructions)
        response_id = generate.request_id = new_id("resp", None).replace("-", "_", 1)
        by = "" if generate.HasField("grammar") or body.packed_use is None else "tools"
        plan = await self._context.chats.plan(generate, body.tool_use)
        body = replace(body, ignored=(*body.ignored, *plan.ignored))
        headers = {**body.ignored_headers(), "x-request-id": response_id}
        kept = tokenizer_pb2.ChatInput(messages=generate.chat.messages[1 if body.has_instructions else 0 :])

        def store(whole: JsonObject, answer: ChatMessage) -> None:
            if body.store is not False:
                _add_answer(kept, answer)
                self._context.responses.put(tenant, response_id, StoredResponse(kept.SerializeToString(), dump(whole)))

        form = ResponseForm(response_id, body, store)
        if body.stream:
            return EventStream(self._context, [generate], ResponseEvents(form, plan), headers, constrained_by=by)
        (answer,) = await run_whole(self._context, request, [generate], constrained_by=by)
        form.begin(answer.resolved)
        whole, ending = whole_output(answer, plan), answer.outputs[0].ending
        form.items.add(whole.parts)
        form.items.close(_status(ending))
        return JSONResponse(form.end(ending, whole.num_reasoning), headers=headers)


class StoredResponseEndpoint:
    """GET: a stored response. DELETE: forgets it."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        response_id, tenant = str(request.path_params["id"]), _tenant()
        stored = self._context.responses.get(tenant, response_id)
        if request.method != "DELETE":
            return Response(stored.body, media_type="application/json")
        self._context.responses.remove(tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


class ResponseForm:
    """One response object as it grows. store: called with it when it is complete, and with its answer as a message."""

    def __init__(
        self, response_id: str, body: ResponsesRequest, store: Callable[[JsonObject, ChatMessage], None]
    ) -> None:
        self.items = OutputItems(response_id)
        self._body = body
        self._told: JsonObject = _JSON.decode(body.told)
        self._store = store
        self._head: JsonObject = {"id": response_id, "object": "response", "created_at": int(time.time())}

    def begin(self, resolved: ResolvedRequest) -> None:
        self._head["model"] = resolved.model

    def whole(self, status: str, usage: JsonObject | None = None) -> JsonObject:
        body = self._body
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "output": self.items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            **self._told,
            "usage": usage,
        }

    def end(self, finished: Finished, num_reasoning: int) -> JsonObject:
        """The complete response, which is stored. num_reasoning: tokens of the thought."""
        whole = self.whole(_status(finished), _usage(finished, num_reasoning))
        self._store(whole, self.items.message())
        return whole


class ResponseEvents(EventWriter):
    """response.created, response.in_progress, the items, and response.completed or response.incomplete."""

    done: ClassVar[bytes] = b""

    def __init__(self, form: ResponseForm, plan: ChatPlan) -> None:
        self._form, self._plan = form, plan
        self._reader: PartReader | None = None

    async def prepare(self, resolved: ResolvedRequest) -> None:
        self._form.begin(resolved)
        self._reader = PartReader(self._plan, resolved)

    def begin(self) -> bytes:
        begun = self._form.whole("in_progress")
        items = self._form.items
        return items.event("response.created", response=begun) + items.event("response.in_progress", response=begun)

    def write(self, prompt_index: int, update: Update) -> bytes:
        assert self._reader is not None
        items = self._form.items
        parts, finished = self._reader.read(update)
        events = items.add(parts)
        if finished is None:
            return events
        status = _status(finished)
        events += items.close(status)
        return events + items.event(f"response.{status}", response=self._form.end(finished, self._reader.num_reasoning))

    def end(self) -> bytes:
        return b""

    def failed(self, error: MeshError, path: str) -> bytes:
        inner = error_body(error, path)["error"]
        assert isinstance(inner, dict)
        return self._form.items.event("error", **{name: inner[name] for name in ("code", "message", "param")})


def _go_on_from(chat: tokenizer_pb2.ChatInput, stored: StoredResponse, has_instructions: bool) -> None:
    """Puts the stored conversation between the instructions and the new input."""
    earlier = tokenizer_pb2.ChatInput.FromString(stored.chat).messages
    own = list(chat.messages)
    if len(earlier) + len(own) > MAX_MESSAGES:
        message = f"previous_response_id: the conversation has more than {MAX_MESSAGES} messages: begin a new one"
        raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"field": "previous_response_id"})
    first = 1 if has_instructions else 0
    whole = [*own[:first], *earlier, *own[first:]]
    del chat.messages[:]
    chat.messages.extend(whole)


def _add_answer(chat: tokenizer_pb2.ChatInput, answer: ChatMessage) -> None:
    extra: JsonObject = {}
    if answer.reasoning:
        extra["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        extra["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in answer.tool_calls
        ]
    text = dump(extra).decode() if extra else ""
    chat.messages.add(role="assistant", content=answer.content, extra_json=text)


def _arguments(text: str) -> object:
    """As an object, as templates expect; text that is none as it is."""
    arguments = arguments_of(text)
    return text if arguments is None else arguments


def _status(finished: Finished) -> str:
    return "incomplete" if finished.reason == FinishReason.LENGTH else "completed"


def _usage(finished: Finished, num_reasoning: int) -> JsonObject:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens},
        "output_tokens": finished.num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": finished.prompt_tokens + finished.num_output,
    }


def _tenant() -> str:
    """Names of responses are each tenant's own, where keys tell tenants apart."""
    return current_caller().tenant or ""
