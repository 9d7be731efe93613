"""Tool calls whose arguments are marked up one by one: they become JSON by the types of the tool's schema."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import ClassVar

from radixmesh.daemons.router.chat.call_reader import CallIds, CallReader
from radixmesh.daemons.router.chat.parts import ToolUse
from radixmesh.daemons.router.chat.text_reader import MAX_HELD, Malformed, Reading

# One of several strings: blanks around it are none of it.
_CHOICE = frozenset(("choice",))
_LITERALS = {"True": "true", "False": "false", "None": "null"}


class XmlCalls(CallReader):
    """Arguments as `<key>...<value>...`; value_ends: what ends a value."""

    value_ends: ClassVar[tuple[str, ...]]

    def __init__(self, use: ToolUse, ids: CallIds) -> None:
        schemas = {tool.name: tool.parameters for tool in use.tools}
        # Once a tool: a schema may be long, and one answer may call its tool thousands of times.
        self._kinds = cache(lambda name: _kinds(schemas[name]))
        super().__init__(use, ids)

    @abstractmethod
    def key(self) -> Reading[str | None]:
        """The next argument's name; None at the end of the call. Its value comes next."""

    def xml_arguments(self, name: str) -> Reading[bool]:
        """All arguments of a call that has begun. False where the text ends before they do."""
        kinds = self._kinds(name)
        self.arguments("{")
        num = 0
        try:
            while (key := (yield from self.key())) is not None:
                self.arguments(f"{', ' if num else ''}{_text(key)}: ")
                num += 1
                if not (yield from self._value(kinds.get(key))):
                    return False
        except Malformed:
            if self._is_end and self._at >= len(self._text):
                return False
            self.arguments("}")
            raise
        self.arguments("}")
        return True

    def _value(self, kinds: frozenset[str] | None) -> Reading[bool]:
        if kinds is not None and kinds == frozenset(("string",)):
            self.arguments('"')
            marker = yield from self.pass_until(self.value_ends, lambda text: self.arguments(_text(text)[1:-1]))
            if marker:
                self.arguments('"')
        else:
            held = _HeldValue(self.arguments)
            marker = yield from self.pass_until(self.value_ends, held.add)
            held.end(kinds, is_whole=bool(marker))
        if marker:
            self.take(self._at + len(marker))
        return bool(marker)


class QwenCoderCalls(XmlCalls):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5."""

    triggers = ("<tool_call>", "<function=")
    value_ends = ("\n</parameter>", "</parameter>")

    def calls(self, marker: str) -> Reading[None]:
        if marker == "<tool_call>":
            yield from self.expect("<function=")
        name = (yield from self.through(">")).strip()
        self.begin_call(name)
        if not (yield from self.xml_arguments(name)):
            return
        if marker == "<tool_call>":
            yield from self.end_marker("</tool_call>")

    def key(self) -> Reading[str | None]:
        if (yield from self.end_marker("</function>")):
            return None
        if not (yield from self.is_next("<parameter=")):
            raise Malformed
        key = yield from self.through(">")
        yield from self.is_next("\n")
        return key.strip()


class GlmCalls(XmlCalls):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

    triggers = ("<tool_call>",)
    value_ends = ("</arg_value>",)

    def calls(self, marker: str) -> Reading[None]:
        yield from self.blanks()
        name, _ = yield from self.until("\n", "<arg_key>", "</tool_call>")
        self.begin_call(name.strip())
        yield from self.xml_arguments(name.strip())

    def key(self) -> Reading[str | None]:
        if (yield from self.end_marker("</tool_call>")):
            return None
        if not (yield from self.is_next("<arg_key>")):
            raise Malformed
        key = yield from self.through("</arg_key>")
        yield from self.expect("<arg_value>")
        return key.strip()


class _HeldValue:
    """A value whose type its whole text tells. One that is longer than MAX_HELD is a string, and held no more."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._texts: list[str] = []
        self._num = 0

    def add(self, text: str) -> None:
        was_long = self._num > MAX_HELD
        self._num += len(text)
        self._texts.append(text)
        if self._num > MAX_HELD:
            self._sink(("" if was_long else '"') + _text("".join(self._texts))[1:-1])
            self._texts.clear()

    def end(self, kinds: frozenset[str] | None, *, is_whole: bool) -> None:
        if self._num > MAX_HELD:
            self._sink('"' if is_whole else "")
        else:
            text = "".join(self._texts)
            self._sink(_value(text, kinds) if is_whole else text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _value(text: str, kinds: frozenset[str] | None) -> str:
    """A value that is no plain string: JSON as it stands, and a string where it is none."""
    stripped = text.strip()
    if kinds is _CHOICE:
        return _text(stripped)
    literal = _LITERALS.get(stripped, stripped)
    try:
        value = json.loads(literal, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _text(text)
    if kinds is not None and "string" in kinds and not isinstance(value, str) and _kind(value) not in kinds:
        return _text(text)
    return literal


def _no_constant(name: str) -> object:
    """NaN and infinities, which Python reads, are no JSON."""
    raise ValueError(name)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string"


def _kinds(schema: str) -> Mapping[str, frozenset[str] | None]:
    """The JSON types of each argument, None where the schema does not tell."""
    try:
        properties = json.loads(schema)["properties"]
        return {str(key): _kinds_of(inner) for key, inner in properties.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _kinds_of(schema: object) -> frozenset[str] | None:
    if not isinstance(schema, dict):
        return None
    if isinstance(schema.get("enum"), list) and all(isinstance(value, str) for value in schema["enum"]):
        return _CHOICE
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    if isinstance(schema.get("enum"), list):
        return frozenset(_kind(value) for value in schema["enum"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            inner = [_kinds_of(one) for one in schema[name]]
            known = [kinds for kinds in inner if kinds is not None]
            return frozenset().union(*known) if len(known) == len(inner) else None
    return None
