"""The parts of a chat's answer: the form that every API (OpenAI's chat and responses, Anthropic, Ollama) is made from.

A `ChatParser` reads one output. What it says depends on the text alone, not on how the text was cut: the parts of
equal kind, joined, are the same for every split (`join` does that). So an output that went on after a daemon died, or
that another router resumed, has the same parts, ids of calls included.

    parser = chat_format.parser(use, prompt, request_id=request_id, index=index)     # chat/formats.py
    for delta in deltas:
        for part in parser.feed(delta.text):
            match part:
                case ContentDelta(text=text): ...
                case ReasoningDelta(text=text): ...
                case ToolCallStart(call=call, id=id, name=name): ...
                case ToolCallArguments(call=call, text=text): ...
    for part in parser.finish(): ...
    parser.num_calls > 0 and the output ended by itself: finish_reason "tool_calls"

Order: the arguments of a call come after its start and before the next call's start. Content may stand between calls.
Text that looked like a call and is none comes as content: nothing but markup is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias


class ContentDelta(NamedTuple):
    """More of the answer's text; never empty."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of the thought before the answer; never empty."""

    text: str


class ToolCallStart(NamedTuple):
    """A call begins. call: 0, 1, ... within the output. id: unique within a conversation; the same whenever the same
    request gives the same text."""

    call: int
    id: str
    name: str


class ToolCallArguments(NamedTuple):
    """More of the arguments' JSON text of call number `call`, as the model wrote it; never empty.

    An output that max_tokens cut off ends in the middle of them."""

    call: int
    text: str


ChatPart: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class ChatParser(ABC):
    """Reads one output from its beginning. feed() costs what its text is long, not what came before."""

    num_calls: int = 0
    """Calls that have begun."""

    @abstractmethod
    def feed(self, text: str) -> list[ChatPart]:
        """The parts that more text makes certain. Text that may still become markup is held back."""

    @abstractmethod
    def finish(self) -> list[ChatPart]:
        """The rest, after the last text. Called once."""


class PlainParser(ChatParser):
    """No markup: everything is content."""

    def feed(self, text: str) -> list[ChatPart]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ChatPart]:
        return []


@dataclass(slots=True)
class ToolCall:
    """A whole call. arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessage:
    """A whole answer. content, reasoning: "" where there is none."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def join(parts: Iterable[ChatPart]) -> ChatMessage:
    """The parts of one output put together."""
    contents: list[str] = []
    thoughts: list[str] = []
    arguments: list[list[str]] = []
    message = ChatMessage()
    for part in parts:
        match part:
            case ContentDelta(text=text):
                contents.append(text)
            case ReasoningDelta(text=text):
                thoughts.append(text)
            case ToolCallStart(id=call_id, name=name):
                message.tool_calls.append(ToolCall(call_id, name))
                arguments.append([])
            case ToolCallArguments(call=call, text=text):
                arguments[call].append(text)
    message.content, message.reasoning = "".join(contents), "".join(thoughts)
    for made, texts in zip(message.tool_calls, arguments, strict=True):
        made.arguments = "".join(texts)
    return message


def read_whole(parser: ChatParser, text: str) -> ChatMessage:
    """A finished output."""
    return join([*parser.feed(text), *parser.finish()])


class ToolMode(Enum):
    """The modes of `tool_choice`; the values are OpenAI's words, but for NAMED, which stands for one function."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


class Tool(NamedTuple):
    """A function that the model may call. parameters: its JSON schema as JSON text. strict: arguments must match it.

    guided: the schema as a grammar follows it; "" where none is needed."""

    name: str
    parameters: str = '{"type": "object"}'
    strict: bool = False
    guided: str = ""


class ToolUse(NamedTuple):
    """The tools of one request. named: the function that must be called, in mode NAMED. parallel: several calls may
    come in one answer."""

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    named: str = ""
    parallel: bool = True
