"""Tools of a chat, the choice among them, and the calls that an output makes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

_MAX_WHITESPACE = 16


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: a JSON schema of an object."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=lambda: {"type": "object"})
    description: str = ""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Thought:
    """Free text that may come before what a constraint is about. is_always: outputs begin inside one, whatever the
    prompt ends with."""

    begin: str = "<think>"
    end: str = "</think>"
    is_always: bool = False


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def tools_json(tools: Sequence[Tool]) -> str:
    """As chat templates read them. Raises TypeError for what is no Tool, such as a tool in the form of OpenAI's API."""
    if not all(isinstance(tool, Tool) for tool in tools):
        raise TypeError("tools takes Tool(name, parameters): make one of each")
    return json.dumps(
        [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in tools
        ]
    )


def calls_tag(tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool) -> str:
    """The structural tag that makes an output a JSON list of calls, at least one.

    Raises ValueError where no tool has the name that is chosen.
    """
    chosen = [tool for tool in tools if not isinstance(choice, NamedTool) or tool.name == choice.name]
    if not chosen:
        wanted = f"named {choice.name!r}" if isinstance(choice, NamedTool) else "at all"
        raise ValueError(f"tool_choice asks for a call, and there is no tool {wanted}")
    tags = [
        {
            "type": "tag",
            "begin": f'{{"name": {json.dumps(tool.name)}, "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": tool.parameters,
                "max_whitespace_cnt": _MAX_WHITESPACE,
            },
            "end": "}",
        }
        for tool in chosen
    ]
    calls = {
        "type": "tags_with_separator",
        "separator": ", ",
        "at_least_one": True,
        "stop_after_first": not is_parallel or isinstance(choice, NamedTool),
        "tags": tags,
    }
    elements = [{"type": "const_string", "value": "["}, calls, {"type": "const_string", "value": "]"}]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def tool_calls(text: str, thought: Thought | None = None) -> list[ToolCall]:
    """The calls of an output whose tool_choice required one. thought: as the request had it.

    Raises ValueError where the text is no list of calls, because its length cut it off or nothing required one.
    """
    try:
        try:
            given = json.loads(text)
        except ValueError:
            if thought is None:
                raise
            # Behind the first end: an argument may contain that text too.
            given = json.loads(text.partition(thought.end)[2])
        return [ToolCall(call["name"], call["arguments"]) for call in given]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the output is no list of calls: {text[:100]!r}") from error
