"""Tool calls that are JSON objects, or JSON arguments behind a name."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from radixmesh.daemons.router.chat.call_reader import CallReader
from radixmesh.daemons.router.chat.text_reader import Malformed, Reading

_CALL_ID = re.compile(r"[\w-]{1,64}")


class HermesCalls(CallReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3."""

    triggers = ("<tool_call>",)

    def calls(self, marker: str) -> Reading[None]:
        yield from self.call_object()
        yield from self.end_marker("</tool_call>")


class LlamaCalls(CallReader):
    """`{"name": ..., "parameters": {...}}` as the whole answer, several with ";" between, or behind <|python_tag|>."""

    triggers = ("<|python_tag|>",)

    def read_start(self) -> Reading[None]:
        if (yield from self.peek()) in ("{", " ", "\n", "\t", "\r"):
            yield from self.attempt("")

    def calls(self, marker: str) -> Reading[None]:
        yield from self.call_object()
        while True:
            self.begin_raw()
            if (yield from self.blanks()) not in (";", ","):
                self.drop_raw()
                return
            self.take(self._at + 1)
            yield from self.call_object()


class ListCalls(CallReader):
    """A JSON list of calls as the whole answer: the form of guided calls where the model's own is not known."""

    triggers = ()

    def read(self) -> Reading[None]:
        yield from self.attempt("")
        while True:
            self.content(self.take(len(self._text)))
            if not (yield from self.waits()):
                return

    def calls(self, marker: str) -> Reading[None]:
        yield from self.call_list()
        self.drop_raw()


class MistralCalls(CallReader):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` from version 11 on."""

    triggers = ("[TOOL_CALLS]",)

    def calls(self, marker: str) -> Reading[None]:
        if (yield from self.blanks()) == "[":
            yield from self.call_list()
            self.drop_raw()
            return
        if (yield from self.peek()) == "{":
            yield from self.call_object()
            return
        name, marker = yield from self.until("[CALL_ID]", "[ARGS]", "{")
        call_id = ""
        if marker == "[CALL_ID]":
            self.take(self._at + len(marker))
            call_id, marker = yield from self.until("[ARGS]", "{")
            if not _CALL_ID.fullmatch(call_id):
                raise Malformed
        if marker == "[ARGS]":
            self.take(self._at + len(marker))
        if (yield from self.blanks()) != "{":
            raise Malformed
        self.begin_call(name.strip(), call_id)
        yield from self.stream_object()


class SectionCalls(CallReader):
    """Calls between markers of their own, within a section: a head with the name, then JSON."""

    section_end: ClassVar[str]
    call: ClassVar[str]
    separator: ClassVar[str]
    call_end: ClassVar[str]

    @abstractmethod
    def head(self, text: str) -> Reading[tuple[str, str]]:
        """Name and id ("" = none) of a call, from the text before its separator; its object comes next."""

    def calls(self, marker: str) -> Reading[None]:
        is_open = marker == self.call
        while True:
            if not is_open:
                yield from self.blanks()
                is_open = yield from self.is_next(self.call)
            if not is_open:
                yield from self.is_next(self.section_end)
                if self.num_calls:
                    self.drop_raw()
                return
            name, call_id = yield from self.head((yield from self.through(self.separator)).strip())
            if (yield from self.blanks()) != "{":
                raise Malformed
            self.begin_call(name, call_id)
            if not (yield from self.stream_object()):
                return
            yield from self.tail()
            self.begin_raw()
            is_open = False

    def tail(self) -> Reading[None]:
        yield from self.end_marker(self.call_end)


class DeepSeekCalls(SectionCalls):
    """Version 3 and R1: "function", the name and a JSON code block; version 3.1: name and JSON."""

    triggers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    section_end = "<｜tool▁calls▁end｜>"
    call = "<｜tool▁call▁begin｜>"
    separator = "<｜tool▁sep｜>"
    call_end = "<｜tool▁call▁end｜>"

    def head(self, text: str) -> Reading[tuple[str, str]]:
        if (yield from self.blanks()) == "{":
            return text, ""
        if text != "function":
            raise Malformed
        name, _ = yield from self.until("\n", "```", "{")
        yield from self.end_marker("```json")
        return name.strip(), ""

    def tail(self) -> Reading[None]:
        yield from self.end_marker("```")
        yield from self.end_marker(self.call_end)


class KimiCalls(SectionCalls):
    """Kimi K2: `functions.name:0` is the call's id too, and templates want it back."""

    triggers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    section_end = "<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>"
    separator = "<|tool_call_argument_begin|>"
    call_end = "<|tool_call_end|>"

    def head(self, text: str) -> Reading[tuple[str, str]]:
        yield from ()
        return text.removeprefix("functions.").rpartition(":")[0] or text, text
