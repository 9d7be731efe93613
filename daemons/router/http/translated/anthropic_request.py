"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, as one chat request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from google.protobuf.message import Message

from radixmesh.daemons.router.chat.parts import ToolUse
from radixmesh.daemons.router.http.bodies.body import Body, Contexts
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw, invalid
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.client_names import names_of
from radixmesh.daemons.router.http.request_types.options import Int32, Name, Uint32, named_as_sent
from radixmesh.daemons.router.http.request_types.tool_fields import unpack_use
from radixmesh.daemons.router.http.translated.chat_fields import (
    FieldReader,
    JsonObject,
    TextParts,
    function_tool,
    only_text,
    packed,
)
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

_NAMES = names_of("/v1/messages")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Argument by which templates of models that may think are told.
_THINKING = "enable_thinking"
_BLOCKS = TextParts(("text",), ("type", "text", "citations"), "messages.content")
_SYSTEM = _BLOCKS._replace(shape="system.content")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokensRequest(Body):
    """The fields that a prompt is made of. chat: made of them, and never kept."""

    OWN_FIELDS: ClassVar[frozenset[str]] = Body.OWN_FIELDS | {"chat", "packed_use"}
    BULK: ClassVar[frozenset[str]] = frozenset(("chat",))

    messages: MaybeRaw
    model: Name | None = None
    system: MaybeRaw = None
    tools: MaybeRaw = None
    tool_choice: MaybeRaw = None
    thinking: MaybeRaw = None
    output_config: MaybeRaw = None
    chat: ChatRequest | None = None
    packed_use: list[object] | None = None

    @property
    def tool_use(self) -> ToolUse:
        """The tools and how they may be called."""
        return ToolUse() if self.packed_use is None else unpack_use(self.packed_use)

    def settled(self) -> Self:
        """Raises MeshError naming the field as its client does."""
        reader = FieldReader()
        with named_as_sent(_NAMES):
            chat = self._chat(reader).settled()
        # Errors name their own fields, not those of the chat that they became.
        return replace(self, chat=chat, packed_use=chat.packed_use, ignored=(*self.ignored, *reader.ignored))

    @classmethod
    def message_type(cls) -> type[Message]:
        return router_pb2.TokenizeRequest

    def to_messages(self, contexts: Contexts) -> Iterator[Message]:
        assert self.chat is not None and self.chat.chat is not None
        yield router_pb2.TokenizeRequest(model=self.model or "", items=[tokenizer_pb2.EncodeItem(chat=self.chat.chat)])

    def _chat(self, reader: FieldReader) -> ChatRequest:
        assert self.messages is not None
        messages: list[JsonObject] = []
        if self.system is not None:
            text = reader.texts(reader.json(self.system, "system"), "system", _SYSTEM)
            messages.append({"role": "system", "content": text})
        for index, value in enumerate(reader.entries(reader.json(self.messages, "messages"), "messages")):
            messages += _messages_of(reader, value, f"messages.{index}")
        config = (
            {} if self.output_config is None else _config_of(reader, reader.json(self.output_config, "output_config"))
        )
        arguments: dict[str, object] = {}
        if self.thinking is not None:
            arguments[_THINKING] = _thinks(reader, reader.json(self.thinking, "thinking"))
        return ChatRequest(
            messages=packed(messages),
            model=self.model,
            tools=reader.made(self.tools, "tools", _tools_of),
            tool_choice=reader.made(self.tool_choice, "tool_choice", _choice_of),
            parallel_tool_calls=_is_parallel(reader, self.tool_choice),
            reasoning_effort=config.get("effort"),  # type: ignore[arg-type]
            response_format=packed(config["format"]) if "format" in config else None,
            chat_template_kwargs=packed(arguments) if arguments else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(CountTokensRequest):
    """Anthropic's fields."""

    max_tokens: Uint32
    stop_sequences: MaybeRaw = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None

    @classmethod
    def message_type(cls) -> type[Message]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[Message]:
        assert self.chat is not None
        with named_as_sent(_NAMES):
            whole = replace(
                self.chat,
                max_completion_tokens=self.max_tokens,
                stop=self.stop_sequences,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
            )
            yield whole.to_generate()


def _messages_of(reader: FieldReader, value: object, where: str) -> list[JsonObject]:
    """One message; results of tools become messages of their own, before its text."""
    fields = reader.fields(value, where, ("role", "content"), "messages")
    role = reader.required_text(fields, "role", where)
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"{where}.role is {role[:32]!r}: send user or assistant")
    content = reader.required(fields, "content", where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    made = _Message(role)
    for index, block in enumerate(reader.entries(content, f"{where}.content")):
        made.add(reader, block, f"{where}.content.{index}")
    return made.messages()


class _Message:
    """Blocks of one message put together."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[JsonObject] = []
        self._results: list[JsonObject] = []

    def add(self, reader: FieldReader, block: object, where: str) -> None:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            self._texts.append(reader.part_text(block, where, _BLOCKS))
        elif kind == "thinking" and self._role == "assistant":
            fields = reader.fields(block, where, ("type", "thinking", "signature"), "messages.content")
            self._thoughts.append(reader.required_text(fields, "thinking", where))
        elif kind == "redacted_thinking" and self._role == "assistant":
            reader.ignore("messages.content.redacted_thinking")
        elif kind == "tool_use" and self._role == "assistant":
            fields = reader.fields(block, where, ("type", "id", "name", "input"), "messages.content")
            call = {"name": reader.required_text(fields, "name", where), "arguments": fields.get("input") or {}}
            self._calls.append({"id": str(fields.get("id") or ""), "type": "function", "function": call})
        elif kind == "tool_result" and self._role == "user":
            known = ("type", "tool_use_id", "content", "is_error")
            fields = reader.fields(block, where, known, "messages.content")
            text = reader.texts(fields.get("content") or "", f"{where}.content", _BLOCKS)
            call_id = reader.required_text(fields, "tool_use_id", where)
            self._results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise only_text(kind, where)

    def messages(self) -> list[JsonObject]:
        own: dict[str, object] = {"role": self._role, "content": "".join(self._texts)}
        if self._thoughts:
            own["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            own["tool_calls"] = self._calls
        return [*self._results, *([] if self._results and not self._texts else [own])]


def _tools_of(reader: FieldReader, value: object) -> list[JsonObject]:
    tools = []
    for index, entry in enumerate(reader.entries(value, "tools")):
        where = f"tools.{index}"
        if isinstance(entry, dict) and entry.get("type") not in (None, "custom"):
            raise unsupported(
                f"{where}.type", f"{where} is a tool that a server runs: send your own, with input_schema"
            )
        tools.append(function_tool(reader, entry, where, "input_schema"))
    return tools


def _choice_of(reader: FieldReader, value: object) -> object:
    fields = reader.fields(value, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    kind = fields.get("type")
    if kind == "tool":
        name = reader.required_text(fields, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid("tool_choice.type", f"tool_choice.type is {str(kind)[:32]!r}: send auto, any, tool or none")
    return _CHOICES[kind]


def _is_parallel(reader: FieldReader, raw: MaybeRaw) -> bool | None:
    value = None if raw is None else reader.json(raw, "tool_choice")
    single = value.get("disable_parallel_tool_use") if isinstance(value, dict) else None
    if single is not None and not isinstance(single, bool):
        where = "tool_choice.disable_parallel_tool_use"
        raise invalid(where, f"{where} is no boolean: send true or false")
    return False if single else None


def _thinks(reader: FieldReader, value: object) -> bool:
    fields = reader.fields(value, "thinking", ("type", "budget_tokens", "display"))
    kind = fields.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid("thinking.type", f"thinking.type is {str(kind)[:32]!r}: send enabled, adaptive or disabled")
    if "budget_tokens" in fields:
        reader.ignore("thinking.budget_tokens")
    return kind != "disabled"


def _config_of(reader: FieldReader, value: object) -> JsonObject:
    fields = reader.fields(value, "output_config", ("effort", "format"))
    made: dict[str, object] = {}
    if fields.get("effort") is not None:
        made["effort"] = reader.name(fields["effort"], "output_config.effort")
    if fields.get("format") is not None:
        where = "output_config.format"
        inner = reader.fields(fields["format"], where, ("type", "schema"))
        if inner.get("type") != "json_schema":
            raise unsupported(f"{where}.type", f"{where}.type is {str(inner.get('type'))[:32]!r}: send json_schema")
        schema = reader.required(inner, "schema", where)
        made["format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return made
