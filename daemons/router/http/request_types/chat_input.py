"""Messages, tools and template arguments of a chat, counted and checked, as the tokenizer takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from radixmesh.daemons.router.http.bodies.field_decoders import (
    Raw,
    check_values,
    decode,
    invalid,
    is_null,
    list_of,
    plain_json,
    read_fields,
    text_of,
)
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.bodies.known_fields import HARMLESS, unsupported
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.tokenizer.v1 import tokenizer_pb2

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
# Fields that templates are known to read; anything else reaches them too, and is named in the response.
_READ_BY_TEMPLATES = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning", "reasoning_content"),
        *("thinking", "tools", "refusal", "audio", "annotations"),
    )
)
_T = TypeVar("_T")
_PART_FIELDS = frozenset(("type", "text"))
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_ENTRIES = msgspec.json.Decoder(list[Raw])


class Chat(NamedTuple):
    """unread: fields that perhaps no one reads, as "messages.<name>"."""

    proto: tokenizer_pb2.ChatInput
    unread: tuple[str, ...]


def read_chat(messages: Bytes, tools: Bytes | None, template_args: Bytes | None) -> Chat:
    """Raises INVALID_CHAT, TOO_LARGE, MISSING_FIELD, INVALID_ARGUMENT or UNSUPPORTED naming the field."""
    check_values(messages, "messages")
    entries = list_of(messages, "messages", MAX_MESSAGES)
    if not entries:
        message = "messages is empty: send at least one"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_CHAT, message, {"field": "messages"})
    unread: dict[str, None] = {}
    chat = tokenizer_pb2.ChatInput(
        messages=[_message(raw, f"messages.{index}", unread) for index, raw in enumerate(entries)]
    )
    if tools is not None:
        chat.tools_json = _objects(tools, "tools")
    if template_args is not None:
        if not isinstance(plain_json(template_args, "chat_template_kwargs"), dict):
            raise invalid("chat_template_kwargs", "chat_template_kwargs is no object: send {name: value}")
        chat.template_args_json = _as_text(template_args, "chat_template_kwargs")
    return Chat(chat, tuple(unread))


def _message(raw: Bytes, where: str, unread: dict[str, None]) -> tokenizer_pb2.ChatMessage:
    fields = read_fields(raw, where)
    if "role" not in fields:
        raise MeshError(
            ErrorReason.ERROR_REASON_MISSING_FIELD, f"{where}.role is missing: set it", {"field": f"{where}.role"}
        )
    role = text_of(fields.pop("role"), f"{where}.role")
    content = fields.pop("content", None)
    for name in fields:
        if name not in _READ_BY_TEMPLATES:
            unread[f"messages.{name}"] = None
    if fields.get("audio") is not None and not is_null(fields["audio"]):
        raise unsupported(f"{where}.audio", f"{where}.audio is not offered: send text")
    message = tokenizer_pb2.ChatMessage(role=role, content=_content(content, f"{where}.content", unread))
    if fields:
        extra: dict[str, Bytes] = dict(fields)
        if "tool_calls" in fields:
            extra["tool_calls"] = _calls(fields["tool_calls"], f"{where}.tool_calls")
        message.extra_json = _object(extra, where)
    return message


def _content(raw: Bytes | None, where: str, unread: dict[str, None]) -> str:
    if raw is None or is_null(raw):
        return ""
    if bytes(memoryview(raw)[:1]) != b"[":
        return text_of(raw, where)
    texts = []
    for part in decode(_ENTRIES, raw, where):
        fields = read_fields(part, where)
        if "type" not in fields:
            message = f"{where}.type is missing: set it"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": f"{where}.type"})
        kind = text_of(fields["type"], f"{where}.type")
        if kind != "text" or "text" not in fields or is_null(fields["text"]):
            raise unsupported(where, f"{where} has a part of type {kind[:32]!r}: send parts of text alone")
        texts.append(text_of(fields["text"], f"{where}.text"))
        for name in fields.keys() - _PART_FIELDS:
            if name not in HARMLESS and not is_null(fields[name]):
                raise unsupported(
                    f"{where}.{name[:32]}", f"{where} has a part with {name[:32]!r}: send parts of text alone"
                )
            unread[f"messages.content.{name}"] = None
    return "".join(texts)


def _calls(raw: Bytes, where: str) -> Bytes:
    """Tool calls with their arguments as objects: OpenAI's clients send JSON in a text, templates write JSON of it
    again. Raises TOO_LARGE for more values in such a text than a body may have."""
    calls = _maybe(_ENTRIES, raw)
    if calls is None:
        return raw
    return b"[" + b",".join(_call(call, f"{where}.{index}") for index, call in enumerate(calls)) + b"]"


def _call(raw: Bytes, where: str) -> bytes:
    call = _maybe(_OBJECT, raw)
    function = _maybe(_OBJECT, call["function"]) if call and "function" in call else None
    given = function.get("arguments") if function else None
    if call is None or function is None or given is None or bytes(memoryview(given)[:1]) != b'"':
        return bytes(raw)
    text = text_of(given, f"{where}.function.arguments").strip().encode() or b"{}"
    check_values(text, f"{where}.function.arguments")
    # Arguments that a model wrote need not be JSON: the template sees it as it is.
    if _maybe(_OBJECT, text) is None:
        return bytes(raw)
    changed = _object({**function, "arguments": text}, where)
    return _object({**call, "function": changed.encode()}, where).encode()


def _maybe(decoder: msgspec.json.Decoder[_T], raw: Bytes) -> _T | None:
    """The value, None for another kind or no JSON at all."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _objects(raw: Bytes, where: str) -> str:
    list_of(raw, where, MAX_TOOLS)
    entries = plain_json(raw, where)
    assert isinstance(entries, list)
    if not all(isinstance(entry, dict) for entry in entries):
        raise invalid(where, f"{where} holds what is no object: send a list of objects")
    return _as_text(raw, where) if entries else ""


def _object(fields: Mapping[str, Bytes], where: str) -> str:
    parts = [msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items()]
    whole = b"{" + b",".join(parts) + b"}"
    plain_json(whole, where)
    return _as_text(whole, where)


def _as_text(raw: Bytes, where: str) -> str:
    return bytes(raw).decode()
