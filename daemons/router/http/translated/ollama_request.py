"""The bodies of Ollama's /api/chat, /api/generate and /api/show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import msgspec

from radixmesh.daemons.router.chat.parts import ToolUse
from radixmesh.daemons.router.http.bodies.body import Body, Contexts, read_object
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw, invalid, text_of
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.client_names import names_of
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.options import Int32, Name, named_as_sent
from radixmesh.daemons.router.http.request_types.tool_fields import unpack_use
from radixmesh.daemons.router.http.translated.chat_fields import FieldReader, JsonObject, packed
from radixmesh.router.v1 import router_pb2

# Behind a name it means the newest one.
_LATEST = ":latest"
_CALL_FIELDS = ("function", "id", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions(Body):
    """Sampling under Ollama's names."""

    num_predict: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: MaybeRaw = None
    stop: MaybeRaw = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest(Body):
    """The fields of both. stream: true unless set. chat, text: made of them, and never kept."""

    OWN_FIELDS: ClassVar[frozenset[str]] = Body.OWN_FIELDS | {"chat", "text", "packed_use"}
    BULK: ClassVar[frozenset[str]] = frozenset(("chat", "text"))

    model: Name
    stream: bool | None = None
    format: MaybeRaw = None
    options: MaybeRaw = None
    think: MaybeRaw = None
    chat: ChatRequest | None = None
    text: CompletionRequest | None = None
    packed_use: list[object] | None = None

    @property
    def tool_use(self) -> ToolUse:
        """The tools and how they may be called."""
        return ToolUse() if self.packed_use is None else unpack_use(self.packed_use)

    @property
    def is_raw(self) -> bool:
        """The prompt is taken as it is, and its answer is text."""
        return False

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @classmethod
    def message_type(cls) -> type[router_pb2.GenerateRequest]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.GenerateRequest]:
        with named_as_sent(names_of("/api/chat")):
            if self.text is not None:
                yield from self.text.to_messages(contexts)
            elif self.chat is not None:
                yield self.chat.to_generate()

    def shared(self) -> tuple[dict[str, object], tuple[str, ...]]:
        """Fields of the request that it becomes, and names of options that are ignored."""
        options = OllamaOptions() if self.options is None else read_object(self.options, OllamaOptions, "options")
        fields: dict[str, object] = {
            "model": model_name(self.model),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": -1 if options.top_k == 0 else options.top_k,
            "min_p": options.min_p,
            "seed": options.seed,
            "stop": options.stop,
            "repetition_penalty": options.repeat_penalty,
            "frequency_penalty": options.frequency_penalty,
            "presence_penalty": options.presence_penalty,
            "response_format": _format_of(self.format),
        }
        # -1 and -2 are "until it ends" and "until the context is full".
        if options.num_predict is not None and options.num_predict not in (-1, -2):
            if options.num_predict < 1:
                message = f"options.num_predict is {options.num_predict}: send 1 or more, or -1 for no bound"
                raise invalid("options.num_predict", message)
            fields["max_tokens"] = options.num_predict
        return fields, tuple(options.ignored)

    def thinking(self) -> dict[str, object]:
        """Fields of the chat that `think` becomes: an argument of its template, or an effort."""
        if self.think is None:
            return {}
        value = bytes(self.think)
        if value in (b"true", b"false"):
            return {"chat_template_kwargs": packed({"enable_thinking": value == b"true"})}
        return {"reasoning_effort": FieldReader().name(text_of(self.think, "think"), "think")}


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatRequest(OllamaRequest):
    """A chat. Without messages it asks for the model to be loaded, which it is."""

    messages: MaybeRaw = None
    tools: MaybeRaw = None

    def settled(self) -> Self:
        with named_as_sent(names_of("/api/chat")):
            fields, ignored = self.shared()
            if self.messages is None or bytes(memoryview(self.messages)[:2]) == b"[]":
                return replace(self, ignored=(*self.ignored, *ignored))
            reader = FieldReader()
            entries = reader.entries(reader.json(self.messages, "messages"), "messages")
            messages = [_message_of(reader, entry, f"messages.{index}") for index, entry in enumerate(entries)]
            whole = {**fields, **self.thinking(), "messages": packed(messages), "tools": self.tools}
            chat = ChatRequest(**whole).settled()  # type: ignore[arg-type]
        ignored = (*self.ignored, *ignored, *reader.ignored)
        return replace(self, chat=chat, packed_use=chat.packed_use, ignored=ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerateRequest(OllamaRequest):
    """A prompt, which is the user's message of a chat unless raw is set. Without one the model is to be loaded."""

    prompt: MaybeRaw = None
    system: MaybeRaw = None
    raw: bool | None = None

    @property
    def is_raw(self) -> bool:
        return bool(self.raw)

    def settled(self) -> Self:
        with named_as_sent(names_of("/api/generate")):
            fields, ignored = self.shared()
            prompt = "" if self.prompt is None else text_of(self.prompt, "prompt")
            ignored = (*self.ignored, *ignored)
            if not prompt:
                return replace(self, ignored=ignored)
            system = "" if self.system is None else text_of(self.system, "system")
            if self.raw:
                if system or self.think is not None:
                    raise unsupported("raw", "raw takes the prompt as it is: leave system and think out")
                # As long as the context holds, as Ollama: a completion of OpenAI's has 16 tokens.
                most = fields.pop("max_tokens", None) or (1 << 31) - 1
                text = CompletionRequest(**fields, max_tokens=most, prompt=self.prompt)  # type: ignore[arg-type]
                return replace(self, text=text.settled(), ignored=ignored)
            messages = [{"role": "user", "content": prompt}]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            whole = {**fields, **self.thinking(), "messages": packed(messages)}
            chat = ChatRequest(**whole).settled()  # type: ignore[arg-type]
        return replace(self, chat=chat, ignored=ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaShowRequest(Body):
    """The name of a model, under Ollama's newer or older field."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None

    @classmethod
    def message_type(cls) -> type[router_pb2.GenerateRequest]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.GenerateRequest]:
        yield from ()


def model_name(name: str) -> str:
    return name.removesuffix(_LATEST)


def _format_of(raw: Bytes | None) -> msgspec.Raw | None:
    """`json`, or a schema. Raises INVALID_ARGUMENT."""
    if raw is None or bytes(raw) == b'""':
        return None
    if bytes(raw) == b'"json"':
        return packed({"type": "json_object"})
    if bytes(memoryview(raw)[:1]) != b"{":
        raise invalid("format", 'format is neither: send "json" or a JSON schema')
    return msgspec.Raw(b'{"type": "json_schema", "json_schema": {"name": "answer", "schema": ' + bytes(raw) + b"}}")


def _message_of(reader: FieldReader, value: object, where: str) -> JsonObject:
    known = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id")
    fields = reader.fields(value, where, known, "messages")
    made: dict[str, object] = {"role": reader.required_text(fields, "role", where)}
    made["content"] = reader.text(fields.get("content") or "", f"{where}.content")
    if fields.get("thinking"):
        made["reasoning_content"] = reader.text(fields["thinking"], f"{where}.thinking")
    if fields.get("tool_name"):
        made["name"] = reader.text(fields["tool_name"], f"{where}.tool_name")
    if fields.get("tool_call_id"):
        made["tool_call_id"] = reader.text(fields["tool_call_id"], f"{where}.tool_call_id")
    if fields.get("tool_calls"):
        made["tool_calls"] = [
            {"type": "function", **reader.fields(call, f"{where}.tool_calls.{index}", _CALL_FIELDS)}
            for index, call in enumerate(reader.entries(fields["tool_calls"], f"{where}.tool_calls"))
        ]
    return made
