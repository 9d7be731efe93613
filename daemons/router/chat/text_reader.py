"""Incremental reading of marked-up text: a parser is written as a generator that waits where it needs more text.

A generator yields when it has to wait; feed() brings text and lets it go on. What was consumed is dropped, so a
feed costs what is new and what is held back: a marker's length, or a name's.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import ClassVar, TypeVar

from radixmesh.daemons.router.chat.parts import (
    ChatParser,
    ChatPart,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from radixmesh.daemons.router.chat.reasoning_tokens import Read, Span

_T = TypeVar("_T")
Reading = Generator[None, None, _T]

# Characters of a call that may be held until it is known to be one. Past it the text comes as content.
MAX_HELD = 256 << 10
# Characters of one name, key or header: they are looked at again whenever text comes, until they end.
MAX_NAME = 1024
_BLANKS = re.compile(r"\s*")


class Malformed(Exception):
    """Text that began like a call and is none."""


class TextReader(ChatParser):
    """Base of parsers. Subclasses write read(): it ends with the text, or raises nothing.

    has_reasoning: it tells thoughts from the rest.
    """

    max_held = MAX_HELD
    has_reasoning: ClassVar[bool] = False

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        # Characters before _text. Those of the thought, since they were last asked for.
        self._num_dropped = 0
        self._spans: list[Span] = []
        self._is_end = False
        self._parts: list[ChatPart] = []
        # Blanks after content: they are part of it if more content follows, and markup before a call.
        self._held_blanks: list[str] = []
        # Text since the begin of what may be a call; None outside.
        self._raw: list[str] | None = None
        self._raw_chars = 0
        self._reading = self.read()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Reads the whole text."""

    def feed(self, text: str) -> list[ChatPart]:
        self._num_dropped += self._at
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._reading, None)
        return self._taken()

    def finish(self) -> list[ChatPart]:
        self._is_end = True
        next(self._reading, None)
        if not self.num_calls:
            self._parts += [ContentDelta(blank) for blank in self._held_blanks]
        self._held_blanks = []
        return self._taken()

    # -- reading

    def waits(self) -> Reading[bool]:
        """More text has come; False at the end."""
        if self._is_end:
            return False
        yield
        return True

    def take(self, end: int) -> str:
        """The text up to `end`, an index of the pending text. Raises Malformed for a call that is held too long."""
        is_too_long = False
        if self._raw is not None:
            # To the character, so that the rest is read from the same offset however the text came.
            is_too_long = self._raw_chars + end - self._at > self.max_held
            end = min(end, self._at + self.max_held - self._raw_chars)
            self._raw.append(self._text[self._at : end])
            self._raw_chars += end - self._at
        text = self._text[self._at : end]
        self._at = end
        if is_too_long:
            raise Malformed
        return text

    def is_next(self, literal: str) -> Reading[bool]:
        """Consumes the literal if it comes next; waits only as long as it may."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                self.take(self._at + len(literal))
                return True
            if not literal.startswith(there) or not (yield from self.waits()):
                return False

    def peek(self) -> Reading[str]:
        """The next character, not consumed; "" at the end."""
        while self._at >= len(self._text):
            if not (yield from self.waits()):
                return ""
        return self._text[self._at]

    def blanks(self) -> Reading[str]:
        """Consumes white space, and returns the character after it ("" at the end)."""
        while True:
            found = _BLANKS.match(self._text, self._at)
            self.take(found.end() if found else self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not (yield from self.waits()):
                return ""

    def until(self, *markers: str, most: int = MAX_NAME) -> Reading[tuple[str, str]]:
        """The text before the first of the markers, consumed, and that marker, which is not. Raises Malformed where
        none comes within some `most` characters."""
        search = _search_of(markers)
        reach = most + max(map(len, markers))
        while True:
            # No further than that: text of many markers would be searched to its end for each.
            found = search.search(self._text, self._at, self._at + reach)
            if found is not None:
                return self.take(found.start()), found.group()
            if len(self._text) - self._at >= reach:
                raise Malformed
            if not (yield from self.waits()):
                raise Malformed

    def through(self, marker: str) -> Reading[str]:
        """The text before the marker; both are consumed. Raises as until()."""
        text, _ = yield from self.until(marker)
        self.take(self._at + len(marker))
        return text

    def pass_until(self, markers: Sequence[str], sink: Callable[[str], None]) -> Reading[str]:
        """Hands the text before the first of the markers to sink as it comes; returns the marker, not consumed, or ""
        at the end."""
        markers = tuple(markers)
        search = _search_of(markers)
        while True:
            found = search.search(self._text, self._at)
            safe = len(self._text) - (0 if self._is_end else held_back(self._text, self._at, markers))
            end = found.start() if found is not None else safe
            if end > self._at:
                sink(self.take(end))
            if found is not None:
                return found.group()
            if not (yield from self.waits()):
                if self._at < len(self._text):  # Held back, and no marker after all.
                    sink(self.take(len(self._text)))
                return ""

    # -- what may be a call

    def begin_raw(self) -> None:
        """From here on text is kept until raw_as_content() or drop_raw()."""
        self._raw, self._raw_chars = [], 0

    def drop_raw(self) -> None:
        """It is a call: its markup is not content."""
        self._raw = None

    def raw_as_content(self) -> None:
        """It is none: all of it is content."""
        raw, self._raw = self._raw, None
        if raw:
            self.content("".join(raw))

    # -- parts

    def content(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._parts += [ContentDelta(blank) for blank in self._held_blanks]
            self._held_blanks = []
            self._parts.append(ContentDelta(body))
        if len(body) < len(text):
            self._held_blanks.append(text[len(body) :])

    def reasoning(self, text: str, num_behind: int = 0) -> None:
        """Text that was taken last, but for `num_behind` characters."""
        if text:
            end = self._num_dropped + self._at - num_behind
            self._spans.append(Span(end - len(text), end))
            self._parts.append(ReasoningDelta(text))

    def reasoning_read(self) -> Read:
        """The part of the thought that was read since the last call."""
        spans, self._spans = self._spans, []
        return Read(spans, self._num_dropped + self._at, self._is_end)

    def start_call(self, call_id: str, name: str) -> None:
        """The parts of this call follow."""
        self.drop_raw()
        self._held_blanks = []
        self._parts.append(ToolCallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(self.num_calls - 1, text))

    def _taken(self) -> list[ChatPart]:
        """Neighbours of one kind joined."""
        parts: list[ChatPart] = []
        texts: list[str] = []
        for part in self._parts:
            last = parts[-1] if parts else None
            if last is not None and type(last) is type(part) and not isinstance(part, ToolCallStart):
                texts.append(part.text)
                continue
            _close(parts, texts)
            parts.append(part)
        _close(parts, texts)
        self._parts = []
        return parts


def _close(parts: list[ChatPart], texts: list[str]) -> None:
    if texts:
        last = parts[-1]
        assert not isinstance(last, ToolCallStart)
        parts[-1] = last._replace(text=last.text + "".join(texts))
        texts.clear()


def held_back(text: str, start: int, markers: Sequence[str]) -> int:
    """Characters at the end of the text, from `start` on, that may begin a marker."""
    longest = min(max(map(len, markers)) - 1, len(text) - start)
    for size in range(longest, 0, -1):
        tail = text[len(text) - size :]
        if any(marker.startswith(tail) for marker in markers if len(marker) > size):
            return size
    return 0


@lru_cache(maxsize=256)
def _search_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    # The longest first: one may begin another.
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))
