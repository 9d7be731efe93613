"""The fields of a body that are about tools: definitions, choice, and whether calls may be several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from radixmesh.daemons.router.chat.parts import Tool, ToolMode, ToolUse
from radixmesh.daemons.router.chat.tool_grammar import check_size
from radixmesh.daemons.router.http.bodies.field_decoders import (
    check_values,
    decode,
    invalid,
    is_null,
    list_of,
    read_fields,
    text_of,
    too_large,
)
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.json_schemas import followable

MAX_TOOLS = 1024
# Of one tool's parameters: a grammar of all of them has at most 1 MiB, and is read on every router that resumes it.
MAX_SCHEMA_BYTES = 256 << 10
# It stands in the markup of calls, which it must not break.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
_BOOL = msgspec.json.Decoder(bool)


def read_tools(tools: Bytes | None, choice: Bytes | None, parallel: bool | None) -> ToolUse:
    """Raises INVALID_ARGUMENT or TOO_LARGE naming the field; a call that must be made needs its tool among them."""
    mode, named, allowed = _choice(choice)
    read: list[Tool] = []
    if tools is not None and mode is not ToolMode.NONE:
        # Guided, or strict: the schemas are needed as a grammar follows them.
        entries = list_of(tools, "tools", MAX_TOOLS)
        is_guided = mode is not ToolMode.AUTO
        num_bytes = 0
        for index, raw in enumerate(entries):
            read.append(_tool(raw, f"tools.{index}", is_guided=is_guided))
            # One grammar has all of them; a schema spelt out for it may be larger than it was sent.
            num_bytes += len(read[-1].guided)
            check_size(num_bytes)
        if len({tool.name for tool in read}) < len(read):
            raise invalid("tools", "tools has two functions of one name: name each once")
    if allowed is not None and mode is not ToolMode.NONE:
        unknown = allowed.difference(tool.name for tool in read)
        if unknown or not allowed:
            told = f"allows {min(unknown)[:64]!r}, which is none of tools" if unknown else "allows no tool"
            raise invalid("tool_choice", f"tool_choice {told}: name some of them")
        # The model is shown all of them, and what it writes of the others is content.
        read = [tool for tool in read if tool.name in allowed]
    if mode is ToolMode.AUTO and any(tool.strict for tool in read):
        read = [tool if tool.guided else tool._replace(guided=_ANY_OBJECT) for tool in read]
    if mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        if not read:
            raise invalid("tool_choice", "tool_choice requires a call, and there are no tools: send tools")
        if mode is ToolMode.NAMED and named not in {tool.name for tool in read}:
            raise invalid("tool_choice", f"tool_choice names {named[:64]!r}, which is none of tools: name one of them")
    return ToolUse(tuple(read), mode if read else ToolMode.NONE, named, parallel is not False)


def pack_use(use: ToolUse) -> list[object]:
    """As plain lists, for its way from the process that parses large bodies."""
    return [[list(tool) for tool in use.tools], use.mode.value, use.named, use.parallel]


def unpack_use(packed: Sequence[object]) -> ToolUse:
    tools, mode, named, parallel = msgspec.convert(packed, type=tuple[list[tuple[str, str, bool, str]], str, str, bool])
    return ToolUse(tuple(Tool(*tool) for tool in tools), ToolMode(mode), named, parallel)


class _Choice(NamedTuple):
    """named: of mode NAMED. allowed: names of the tools that may be called; None: all of them."""

    mode: ToolMode
    named: str = ""
    allowed: frozenset[str] | None = None


def _choice(raw: Bytes | None) -> _Choice:
    if raw is None:
        return _Choice(ToolMode.AUTO)
    if bytes(memoryview(raw)[:1]) == b'"':
        word = text_of(raw, "tool_choice")
        if word in ("none", "auto", "required"):
            return _Choice(ToolMode(word))
        if word == "any":  # Mistral's word.
            return _Choice(ToolMode.REQUIRED)
        raise invalid("tool_choice", f"tool_choice is {word[:32]!r}: send none, auto, required, or a function's name")
    fields = read_fields(raw, "tool_choice")
    kind = text_of(fields["type"], "tool_choice.type") if "type" in fields else ""
    if kind == "allowed_tools" and "allowed_tools" in fields:
        return _allowed(fields["allowed_tools"], "tool_choice.allowed_tools")
    inner = read_fields(fields["function"], "tool_choice.function") if "function" in fields else {}
    if kind != "function" or "name" not in inner:
        message = 'tool_choice is no choice: send {"type": "function", "function": {"name": ...}}'
        raise invalid("tool_choice", message)
    return _Choice(ToolMode.NAMED, text_of(inner["name"], "tool_choice.function.name"))


def _allowed(raw: Bytes, where: str) -> _Choice:
    """OpenAI's choice among some of the tools."""
    fields = read_fields(raw, where)
    word = text_of(fields["mode"], f"{where}.mode") if "mode" in fields else ""
    if word not in ("auto", "required"):
        raise invalid(f"{where}.mode", f"{where}.mode is {word[:32]!r}: send auto or required")
    names: set[str] = set()
    for index, entry in enumerate(list_of(fields.get("tools", msgspec.Raw(b"[]")), f"{where}.tools", MAX_TOOLS)):
        path = f"{where}.tools.{index}"
        tool = read_fields(entry, path)
        inner = read_fields(tool["function"], f"{path}.function") if "function" in tool else {}
        if "name" not in inner:
            message = f'{path} names no function: send {{"type": "function", "function": {{"name": ...}}}}'
            raise invalid(f"{path}.function.name", message)
        names.add(text_of(inner["name"], f"{path}.function.name"))
    return _Choice(ToolMode(word), allowed=frozenset(names))


def _tool(raw: Bytes, where: str, *, is_guided: bool) -> Tool:
    fields = read_fields(raw, where)
    kind = text_of(fields["type"], f"{where}.type") if "type" in fields else "function"
    if kind != "function" or "function" not in fields:
        message = f'{where} is no function: send {{"type": "function", "function": {{"name": ...}}}}'
        raise invalid(f"{where}.type", message)
    function = read_fields(fields["function"], f"{where}.function")
    name = text_of(function["name"], f"{where}.function.name") if "name" in function else ""
    if not _NAME.fullmatch(name):
        message = f"{where}.function.name is no name: use 1 to 128 letters, digits and _ . : / -"
        raise invalid(f"{where}.function.name", message)
    strict = function.get("strict")
    is_strict = strict is not None and not is_null(strict) and decode(_BOOL, strict, f"{where}.function.strict")
    given = function.get("parameters")
    if given is None or is_null(given):
        given = msgspec.Raw(b'{"type": "object", "properties": {}}')
    field = f"{where}.function.parameters"
    if len(given) > MAX_SCHEMA_BYTES:
        raise too_large(field, "bytes", len(given), MAX_SCHEMA_BYTES)
    check_values(given, field)
    if bytes(memoryview(given)[:1]) != b"{":
        raise invalid(field, f"{field} is no object: send a JSON schema")
    schema = bytes(given).decode()
    return Tool(name, schema, is_strict, _guided(schema, field, is_strict) if is_strict or is_guided else "")


def _guided(schema: str, field: str, is_strict: bool) -> str:
    """The schema as a grammar follows it. One that none can follow is any object, unless it is strict: then
    INVALID_GRAMMAR."""
    try:
        text = followable(schema)
    except MeshError as error:
        if is_strict:
            raise MeshError(error.reason, f"{field}: {error.message}", {**error.metadata, "field": field}) from None
        return _ANY_OBJECT
    return _ANY_OBJECT if text in ("{}", '{"type": "object"}') else text
