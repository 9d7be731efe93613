"""Grammars that make a model call tools, as xgrammar's structural tags: in its own format, or as a JSON list."""

from __future__ import annotations

import json
from typing import NamedTuple

from radixmesh.daemons.router.chat.parts import Tool, ToolMode, ToolUse
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.guided.source import MAX_SOURCE_BYTES

# As JSON schemas that stand alone: blanks without end would be a text without end.
_MAX_WHITESPACE = 16


class CallTags(NamedTuple):
    """A call is begin.format(name), the arguments in a style of xgrammar's, end. head, tail: around all calls.

    trigger: what free text may not hold but as the begin of a call; "" where free text cannot be told from calls.
    """

    begin: str
    end: str
    separator: str = "\n"
    head: str = ""
    tail: str = ""
    style: str = "json"
    trigger: str = ""


_LIST = CallTags('{{"name": "{}", "parameters": ', "}", ", ", "[", "]")


class ToolGrammar(NamedTuple):
    """structural_tag: JSON text. is_list: the answer is a JSON list of calls, whatever the model's own format is."""

    structural_tag: str
    is_list: bool = False


def tool_grammar(use: ToolUse, tags: CallTags | None, *, has_special_markup: bool) -> ToolGrammar | None:
    """The constraint that the choice of tools is; None where the answer may be any text.

    tags: of the model's format; None: it has none. has_special_markup: its markers are special tokens, which no grammar
    of text can write. In both cases a call that must be made comes as a JSON list.
    """
    own = None if has_special_markup else tags
    if use.mode is ToolMode.AUTO:
        wants = any(tool.strict for tool in use.tools)
        if not wants or own is None or not own.trigger:
            return None
        return ToolGrammar(_tag(_free_text(own, use)))
    if use.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        tools = [tool for tool in use.tools if use.mode is ToolMode.REQUIRED or tool.name == use.named]
        is_one = use.mode is ToolMode.NAMED or not use.parallel
        return ToolGrammar(_tag(_calls(own or _LIST, tools, is_one=is_one)), is_list=own is None)
    return None


def check_size(num_bytes: int) -> None:
    """Raises INVALID_GRAMMAR naming the tools, of whose schemas the grammar is made, where it is too long."""
    if num_bytes > MAX_SOURCE_BYTES:
        message = f"tools have {num_bytes} bytes as a grammar: send fewer or shorter ones, {MAX_SOURCE_BYTES} at most"
        metadata = {"field": "tools", "limit": "source_bytes"}
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_GRAMMAR, message, metadata)


def is_unguided(use: ToolUse, tags: CallTags | None, *, has_special_markup: bool) -> bool:
    """True where strict tools are asked for, and nothing holds the model to their schemas."""
    is_strict = use.mode is ToolMode.AUTO and any(tool.strict for tool in use.tools)
    return is_strict and tool_grammar(use, tags, has_special_markup=has_special_markup) is None


def _tag(form: str) -> str:
    return f'{{"type": "structural_tag", "format": {form}}}'


def _calls(tags: CallTags, tools: list[Tool], *, is_one: bool) -> str:
    calls = ", ".join(_call(tags, tool) for tool in tools)
    form = (
        f'{{"type": "tags_with_separator", "separator": {_text(tags.separator)}, "at_least_one": true, '
        f'"stop_after_first": {_flag(is_one)}, "tags": [{calls}]}}'
    )
    parts = [_const(tags.head), form, _const(tags.tail)]
    return f'{{"type": "sequence", "elements": [{", ".join(part for part in parts if part)}]}}'


def _free_text(tags: CallTags, use: ToolUse) -> str:
    """Any text, in which the trigger begins a call, or a section of calls."""
    if tags.head:
        inner = _calls(tags._replace(head="", tail=""), list(use.tools), is_one=not use.parallel)
        entry = f'{{"type": "tag", "begin": {_text(tags.head)}, "content": {inner}, "end": {_text(tags.tail)}}}'
    else:
        entry = ", ".join(_call(tags, tool) for tool in use.tools)
    return (
        f'{{"type": "triggered_tags", "triggers": [{_text(tags.trigger)}], "tags": [{entry}], '
        f'"at_least_one": false, "stop_after_first": {_flag(not use.parallel)}}}'
    )


def _call(tags: CallTags, tool: Tool) -> str:
    return (
        f'{{"type": "tag", "begin": {_text(tags.begin.format(tool.name))}, "content": {{"type": "json_schema", '
        f'"json_schema": {tool.guided}, "style": "{tags.style}", "max_whitespace_cnt": {_MAX_WHITESPACE}}}, '
        f'"end": {_text(tags.end)}}}'
    )


def _const(text: str) -> str:
    return f'{{"type": "const_string", "value": {_text(text)}}}' if text else ""


def _text(text: str) -> str:
    return json.dumps(text)


def _flag(value: bool) -> str:
    return "true" if value else "false"
