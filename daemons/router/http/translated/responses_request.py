"""The body of OpenAI's /v1/responses, as one chat request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import msgspec

from radixmesh.daemons.router.chat.parts import ToolUse
from radixmesh.daemons.router.http.bodies.body import Body, Contexts, read_object
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw, invalid, text_of
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.client_names import names_of
from radixmesh.daemons.router.http.request_types.options import (
    Int32,
    Milliseconds,
    Name,
    StreamOptions,
    Uint32,
    named_as_sent,
)
from radixmesh.daemons.router.http.request_types.tool_fields import unpack_use
from radixmesh.daemons.router.http.translated.chat_fields import (
    FieldReader,
    JsonObject,
    TextParts,
    function_tool,
    packed,
)
from radixmesh.router.v1 import router_pb2

_NAMES = names_of("/v1/responses")
# Fields that a response repeats, as long as they are short together: it is told up to three times, and kept.
_REPEATED = ("instructions", "metadata", "prompt_cache_key", "reasoning", "text", "tool_choice", "tools")
_MAX_REPEATED_BYTES = 64 << 10
_TEXTS = TextParts(("input_text", "output_text", "text"), ("type", "text", "annotations", "logprobs"), "input.content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(Body):
    """OpenAI's fields, and extensions of the chat. chat: made of them, and never kept.

    has_instructions: the chat's first message is one that no later response inherits. told: JSON of the fields that
    the response repeats.
    """

    OWN_FIELDS: ClassVar[frozenset[str]] = Body.OWN_FIELDS | {"chat", "packed_use", "has_instructions", "told"}
    BULK: ClassVar[frozenset[str]] = frozenset(("chat",))

    input: MaybeRaw
    model: Name | None = None
    instructions: MaybeRaw = None
    previous_response_id: Name | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: MaybeRaw = None
    max_output_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: MaybeRaw = None
    tools: MaybeRaw = None
    tool_choice: MaybeRaw = None
    reasoning: MaybeRaw = None
    include: MaybeRaw = None
    metadata: MaybeRaw = None
    prompt_cache_key: Name | None = None
    background: bool | None = None
    # Extensions, as in chats.
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: MaybeRaw = None
    cache_salt: Name | None = None
    priority: Int32 | None = None
    tenant: Name | None = None
    deadline_ms: Milliseconds | None = None
    chat_template_kwargs: MaybeRaw = None
    parallel_tool_calls: bool | None = None
    chat: ChatRequest | None = None
    packed_use: list[object] | None = None
    has_instructions: bool = False
    told: str = "{}"

    @property
    def tool_use(self) -> ToolUse:
        """The tools and how they may be called."""
        return ToolUse() if self.packed_use is None else unpack_use(self.packed_use)

    def settled(self) -> Self:
        """Raises MeshError naming the field as its client does."""
        if self.background:
            raise unsupported("background", "background is not offered: leave it out, and keep the stream open")
        reader = FieldReader()
        if self.stream_options is not None:
            options = read_object(self.stream_options, StreamOptions, "stream_options")
            for name in options.ignored:
                reader.ignore(name)
        with named_as_sent(_NAMES):
            chat = self._chat(reader).settled()
        return replace(
            self,
            chat=chat,
            packed_use=chat.packed_use,
            told=self._told(),
            has_instructions=self.instructions is not None,
            ignored=(*self.ignored, *reader.ignored),
        )

    @classmethod
    def message_type(cls) -> type[router_pb2.GenerateRequest]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.GenerateRequest]:
        assert self.chat is not None
        with named_as_sent(_NAMES):
            yield self.chat.to_generate()

    def _told(self) -> str:
        """JSON of the fields that a response repeats, as they were sent."""
        sent = {name: getattr(self, name) for name in _REPEATED if getattr(self, name) is not None}
        if sum(map(len, sent.values())) > _MAX_REPEATED_BYTES:
            return "{}"
        told = {name: value if isinstance(value, str) else msgspec.Raw(bytes(value)) for name, value in sent.items()}
        return msgspec.json.encode(told).decode()

    def _chat(self, reader: FieldReader) -> ChatRequest:
        messages: list[JsonObject] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": text_of(self.instructions, "instructions")})
        messages += self._messages(reader)
        response_format = self._format(reader)
        if self.metadata is not None and not isinstance(reader.json(self.metadata, "metadata"), dict):
            raise invalid("metadata", "metadata is no object: send one")
        _check_include(reader, self.include)
        return ChatRequest(
            messages=packed(messages),
            model=self.model,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            tools=reader.made(self.tools, "tools", _tools_of),
            tool_choice=reader.made(self.tool_choice, "tool_choice", _choice_of),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if response_format is None else packed(response_format),
            reasoning_effort=self._effort(reader),
            chat_template_kwargs=self.chat_template_kwargs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            tenant=self.tenant,
            deadline_ms=self.deadline_ms,
            prompt_cache_key=self.prompt_cache_key,
        )

    def _messages(self, reader: FieldReader) -> list[JsonObject]:
        assert self.input is not None
        value = reader.json(self.input, "input")
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        made: list[dict[str, object]] = []
        for index, item in enumerate(reader.entries(value, "input")):
            _add_item(reader, made, item, f"input.{index}")
        return list(made)

    def _format(self, reader: FieldReader) -> JsonObject | None:
        """text.format in the chat's form."""
        if self.text is None:
            return None
        fields = reader.fields(reader.json(self.text, "text"), "text", ("format",))
        if fields.get("format") is None:
            return None
        where = "text.format"
        known = ("type", "name", "description", "schema", "strict")
        inner = reader.fields(fields["format"], where, known)
        kind = reader.required_text(inner, "type", where)
        if kind == "json_schema":
            schema = reader.required(inner, "schema", where)
            return {"type": kind, "json_schema": {"name": inner.get("name") or "answer", "schema": schema}}
        if kind not in ("text", "json_object"):
            raise unsupported(f"{where}.type", f"{where}.type is {kind[:32]!r}: send text, json_object or json_schema")
        return {"type": kind}

    def _effort(self, reader: FieldReader) -> str | None:
        if self.reasoning is None:
            return None
        fields = reader.fields(
            reader.json(self.reasoning, "reasoning"), "reasoning", ("effort", "summary", "generate_summary")
        )
        for name in ("summary", "generate_summary"):
            if fields.get(name) is not None:
                reader.ignore(f"reasoning.{name}")  # The reasoning itself is told.
        effort = fields.get("effort")
        return None if effort is None else reader.name(effort, "reasoning.effort")


def _add_item(reader: FieldReader, made: list[dict[str, object]], item: object, where: str) -> None:
    """One item of the input; calls and thoughts join the assistant's message that they belong to."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call":
        fields = reader.fields(item, where, ("type", "id", "call_id", "name", "arguments", "status"), "input")
        arguments = reader.text(fields.get("arguments") or "", f"{where}.arguments")
        call = {"name": reader.required_text(fields, "name", where), "arguments": arguments}
        call_id = reader.required_text(fields, "call_id", where)
        calls = _assistant(made).setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call_id, "type": "function", "function": call})
    elif kind == "function_call_output":
        fields = reader.fields(item, where, ("type", "id", "call_id", "output", "status"), "input")
        call_id = reader.required_text(fields, "call_id", where)
        text = reader.texts(fields.get("output") or "", f"{where}.output", _TEXTS)
        made.append({"role": "tool", "tool_call_id": call_id, "content": text})
    elif kind == "reasoning":
        known = ("type", "id", "summary", "content", "encrypted_content", "status")
        fields = reader.fields(item, where, known, "input")
        thoughts = [
            reader.text(reader.required(reader.fields(part, where, ("type", "text")), "text", where), where)
            for part in reader.entries(fields.get("content") or [], f"{where}.content")
        ]
        made.append({"role": "assistant", "content": "", "reasoning_content": "".join(thoughts)})
    elif kind in (None, "message"):
        fields = reader.fields(item, where, ("type", "id", "role", "content", "status", "phase"), "input")
        role = reader.required_text(fields, "role", where)
        if role not in ("user", "assistant", "system", "developer"):
            raise invalid(f"{where}.role", f"{where}.role is {role[:32]!r}: send user, assistant, system or developer")
        text = reader.texts(reader.required(fields, "content", where), f"{where}.content", _TEXTS)
        if role == "assistant" and made and _is_open(made[-1]):
            made[-1]["content"] = text
        else:
            made.append({"role": "system" if role == "developer" else role, "content": text})
    else:
        raise unsupported(f"{where}.type", f"{where} is of type {str(kind)[:32]!r}: send messages and function calls")


def _assistant(made: list[dict[str, object]]) -> dict[str, object]:
    """The assistant's message at the end, or a new one."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _is_open(message: JsonObject) -> bool:
    """True for a thought whose message has not come yet."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _tools_of(reader: FieldReader, value: object) -> list[JsonObject]:
    tools = []
    for index, entry in enumerate(reader.entries(value, "tools")):
        where = f"tools.{index}"
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind != "function":
            raise unsupported(f"{where}.type", f"{where} is of type {str(kind)[:32]!r}: send functions of your own")
        tools.append(function_tool(reader, entry, where, "parameters"))
    return tools


def _choice_of(reader: FieldReader, value: object) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        fields = reader.fields(value, "tool_choice", ("type", "mode", "tools"))
        tools = [
            {"type": "function", "function": {"name": _tool_name(reader, entry, f"tool_choice.tools.{index}")}}
            for index, entry in enumerate(reader.entries(fields.get("tools") or [], "tool_choice.tools"))
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": fields.get("mode"), "tools": tools}}
    fields = reader.fields(value, "tool_choice", ("type", "name"))
    if fields.get("type") != "function":
        raise unsupported(
            "tool_choice",
            "tool_choice is none of its values: send auto, none, required, {'type': 'function', 'name': ...}, or "
            "{'type': 'allowed_tools', 'mode': ..., 'tools': [...]}",
        )
    name = reader.required_text(fields, "name", "tool_choice")
    return {"type": "function", "function": {"name": name}}


def _tool_name(reader: FieldReader, entry: object, where: str) -> str:
    fields = reader.fields(entry, where, ("type", "name"))
    if fields.get("type") != "function":
        raise unsupported(f"{where}.type", f"{where} is no function of your own: send {{'type': 'function', 'name'}}")
    return reader.required_text(fields, "name", where)


def _check_include(reader: FieldReader, raw: MaybeRaw) -> None:
    if raw is None:
        return
    for entry in reader.entries(reader.json(raw, "include"), "include"):
        if entry != "reasoning.encrypted_content":
            raise unsupported("include", f"include of {str(entry)[:40]!r} is not offered: leave it out")
        reader.ignore("include.reasoning.encrypted_content")  # The reasoning is told as it is.
