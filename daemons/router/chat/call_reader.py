"""Base of the readers of tool calls: free text, in which markers begin calls."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from radixmesh.daemons.router.chat.json_reader import JsonReader, decoded
from radixmesh.daemons.router.chat.parts import ToolUse
from radixmesh.daemons.router.chat.text_reader import Malformed, Reading

CallIds = Callable[[int], str]
"""The id of the output's nth call."""

# Keys of a call that say nothing. Any other is a word of an answer, and not to be lost.
_IGNORED = frozenset(("id", "type", "index"))
_ARGUMENTS = frozenset(("arguments", "parameters"))


def call_ids(request_id: str, index: int) -> CallIds:
    """Ids that are the same whenever the same request is read: 9 letters and digits, which Mistral's templates ask for.

    index: of the output.
    """
    return lambda call: hashlib.sha256(f"{request_id}/{index}/{call}".encode()).hexdigest()[:9]


class CallReader(JsonReader):
    """triggers: what begins calls in free text."""

    triggers: ClassVar[tuple[str, ...]]

    def __init__(self, use: ToolUse, ids: CallIds) -> None:
        self.use = use
        self._ids = ids
        self._names = frozenset(tool.name for tool in use.tools)
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self.read_start()
        while marker := (yield from self.pass_until(self.triggers, self.content)):
            yield from self.attempt(marker)

    def read_start(self) -> Reading[None]:
        """Formats that need no marker at the begin of the text read their calls here."""
        yield from ()

    @abstractmethod
    def calls(self, marker: str) -> Reading[None]:
        """The calls after a marker. Raises Malformed: what was not yet taken for a call is content then."""

    def attempt(self, marker: str) -> Reading[None]:
        """Reads calls that begin with the marker, which comes next."""
        self.begin_raw()
        try:
            self.take(self._at + len(marker))
            yield from self.calls(marker)
        except Malformed:
            pass
        self.raw_as_content()

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Raises Malformed for the name of no tool, and for a second call where one at most is asked for."""
        self.check_name(name)
        self.start_call(call_id or f"call_{self._ids(self.num_calls)}", name)

    def check_name(self, name: str) -> None:
        if name not in self._names or (self.num_calls and not self.use.parallel):
            raise Malformed

    def call_object(self) -> Reading[None]:
        """`{"name": ..., "arguments": {...}}`, in any order; "parameters" is another word for arguments."""
        yield from self.expect("{")
        name, held, has_begun = "", "", False
        is_first = True
        while True:
            char = yield from self.blanks()
            if char == "}":
                break
            if not is_first:
                yield from self.expect(",")
                yield from self.blanks()
            is_first = False
            key = yield from self.short_string()
            yield from self.expect(":")
            char = yield from self.blanks()
            if key == "name" and not name:
                name = yield from self.short_string()
                self.check_name(name)
            elif key in _ARGUMENTS and not has_begun and not held:
                if name and char == "{":
                    self.begin_call(name)
                    has_begun = True
                    if not (yield from self.stream_object()):
                        return
                else:
                    held = _as_object((yield from self.hold_value()))
            elif key in _IGNORED:
                yield from self.hold_value()
            else:
                raise Malformed
        if not has_begun:
            self.begin_call(name)
            self.arguments(held or "{}")
        self.take(self._at + 1)

    def call_list(self) -> Reading[None]:
        """`[{...}, {...}]` of call objects; its bracket comes next."""
        yield from self.expect("[")
        while True:
            if (yield from self.blanks()) == "]":
                self.take(self._at + 1)
                return
            yield from self.call_object()
            self.begin_raw()
            if (yield from self.blanks()) == ",":
                self.take(self._at + 1)
            elif (yield from self.peek()) != "]":
                raise Malformed

    def end_marker(self, marker: str) -> Reading[bool]:
        """Consumes blanks and the marker, if it comes; it may be missing."""
        yield from self.blanks()
        return (yield from self.is_next(marker))


def _as_object(value: str) -> str:
    """Arguments as an object's JSON text: some models write it into a string. Raises Malformed for no object."""
    text = decoded(value).strip() if value.startswith('"') else value
    if text in ("null", ""):
        return "{}"
    if not text.startswith("{"):
        raise Malformed
    return text
