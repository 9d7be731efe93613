"""JSON in the text of a model, read as it comes: its end is found without parsing it."""

from __future__ import annotations

import json
import re

from radixmesh.daemons.router.chat.text_reader import MAX_NAME, Malformed, Reading, TextReader

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR_END = re.compile(r"[\s,\]}]")


class JsonSpan:
    """Finds the end of an object, array or string whose text comes piece by piece."""

    __slots__ = ("_depth", "_is_escaped", "_is_inside")

    def __init__(self) -> None:
        self._depth = 0
        self._is_inside = False
        self._is_escaped = False

    def scan(self, text: str, at: int) -> tuple[int, bool]:
        """Goes on from text[at]: (end of what belongs to the value, whether it is complete)."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._is_inside else _OUTSIDE).search(text, at)
            if found is None:
                return len(text), False
            at = found.end()
            char = found.group()
            if char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_inside = not self._is_inside
            else:
                self._depth += 1 if char in "{[" else -1
            if self._depth <= 0 and not self._is_inside and not self._is_escaped:
                return at, True
        return at, False


class JsonReader(TextReader):
    """Calls whose arguments are JSON."""

    def stream_object(self) -> Reading[bool]:
        """The object that begins here, as arguments of the current call. False where the text ends before it does."""
        span = JsonSpan()
        while True:
            end, is_whole = span.scan(self._text, self._at)
            self.arguments(self.take(end))
            if is_whole:
                return True
            if not (yield from self.waits()):
                return False

    def hold_value(self) -> Reading[str]:
        """A value that begins here, whole. Raises Malformed for one that never ends, or ends too late."""
        if (yield from self.peek()) not in ("{", "[", '"'):
            return (yield from self._scalar())
        span, texts = JsonSpan(), []
        while True:
            end, is_whole = span.scan(self._text, self._at)
            texts.append(self.take(end))
            if is_whole:
                return "".join(texts)
            if not (yield from self.waits()):
                raise Malformed

    def short_string(self) -> Reading[str]:
        """A string literal of at most MAX_NAME characters, decoded."""
        while True:
            found = _STRING.match(self._text, self._at, self._at + MAX_NAME)
            if found is not None:
                return decoded(self.take(found.end()))
            is_none = (yield from self.peek()) != '"'
            if is_none or len(self._text) - self._at >= MAX_NAME or not (yield from self.waits()):
                raise Malformed

    def expect(self, literal: str) -> Reading[None]:
        yield from self.blanks()
        if not (yield from self.is_next(literal)):
            raise Malformed

    def _scalar(self) -> Reading[str]:
        while True:
            found = _SCALAR_END.search(self._text, self._at, self._at + MAX_NAME)
            if found is not None:
                text = self.take(found.start())
                try:
                    json.loads(text)
                except ValueError:
                    raise Malformed from None
                return text
            if len(self._text) - self._at >= MAX_NAME or not (yield from self.waits()):
                raise Malformed


def decoded(text: str) -> str:
    """The text that a JSON string stands for. Raises Malformed."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, str) or not is_text(value):
        raise Malformed
    return value


def is_text(text: str) -> bool:
    """False for half of a surrogate pair, which JSON and Python can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
