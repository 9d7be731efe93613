"""Options of the Python client as the request they become: grammars, tools, the choice among them, reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixmesh.client import InvalidRequestError, NamedTool, Thought, Tool, ToolCall, tool_calls
from radixmesh.client.options import Options, request_from
from radixmesh.daemons.runtime.guided.source import GrammarForm, grammar_source

MESSAGES = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS = [Tool("weather", CITY, "By city."), Tool("time")]


@pytest.mark.parametrize(
    ("options", "form", "text"),
    [
        ({"json_schema": CITY}, GrammarForm.JSON_SCHEMA, json.dumps(CITY)),
        ({"json_schema": "{}"}, GrammarForm.JSON_SCHEMA, "{}"),
        ({"regex": "a+"}, GrammarForm.REGEX, "a+"),
        ({"ebnf": 'root ::= "a"', "json_object": False}, GrammarForm.EBNF, 'root ::= "a"'),
        ({"choices": ["a b"]}, GrammarForm.EBNF, 'root ::= "a\\U00000020b"'),
        ({"json_object": True}, GrammarForm.ANY_JSON, ""),
        ({"structural_tag": {"format": 1}}, GrammarForm.STRUCTURAL_TAG, '{"format": 1}'),
    ],
)
def test_every_form_of_a_grammar_is_one_message(options: Options, form: GrammarForm, text: str) -> None:
    request = request_from("x", None, {**options, "thought": Thought("<a>", "</a>")})
    source = grammar_source(request.grammar)
    assert source.form is form and (not text or source.text == text)
    assert source.thought is not None and tuple(source.thought)[:2] == ("<a>", "</a>")


def test_tools_and_reasoning_are_the_templates() -> None:
    chat = request_from(
        None, MESSAGES, {"tools": TOOLS, "enable_thinking": False, "reasoning_effort": "low", "template_args": {"x": 1}}
    ).chat
    assert [tool["function"]["name"] for tool in json.loads(chat.tools_json)] == ["weather", "time"]
    assert json.loads(chat.template_args_json) == {"x": 1, "enable_thinking": False, "reasoning_effort": "low"}
    none = request_from(None, MESSAGES, {"tools": TOOLS, "tool_choice": "none"})
    assert none.chat.tools_json == "" and not none.HasField("grammar")
    assert not request_from(None, MESSAGES, {"tools": TOOLS}).HasField("grammar")


@pytest.mark.parametrize("choice", ["required", NamedTool("weather")])
def test_a_required_call_is_a_list_that_the_grammar_takes_and_nothing_else(choice: Any) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    tag = request_from(None, MESSAGES, {"tools": TOOLS, "tool_choice": choice}).grammar.structural_tag
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b""], stop_token_ids=[256])
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)

    def takes(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return matcher.accept_string(text) and matcher.accept_token(256)

    one, two = '{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "time", "arguments": {}}'
    assert takes(f"[{one}]") and takes(f"[{two}, {one}]") == takes(f"[{two}]") == (choice == "required")
    assert not takes("[]") and not takes('[{"name": "weather", "arguments": {"city": "Bonn"}}]') and not takes("no")
    assert tool_calls(f"<think>[1]</think>[{one}, {two}]", Thought()) == [
        ToolCall("weather", {"city": "Rome"}),
        ToolCall("time", {}),
    ]
    quoting = f"[{one.replace('Rome', '</think>')}]"
    for text in (quoting, f"<think>1</think>{quoting}", f"1</think>\n{quoting}"):
        assert tool_calls(text, Thought()) == [ToolCall("weather", {"city": "</think>"})]
    for cut in ("", "[", f"[{one}", "5", "[5]", "{}x"):
        with pytest.raises(ValueError, match="no list of calls"):
            tool_calls(cut)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (None, {"tools": TOOLS}),
        (None, {"enable_thinking": True}),
        (MESSAGES, {"tool_choice": "required"}),
        (MESSAGES, {"tools": TOOLS, "tool_choice": NamedTool("other")}),
        (MESSAGES, {"tools": TOOLS, "tool_choice": "any"}),
        (MESSAGES, {"tools": TOOLS, "tool_choice": "required", "regex": "a"}),
        (MESSAGES, {"json_object": True, "regex": "a"}),
        (MESSAGES, {"tools": [{"type": "function", "function": {"name": "x"}}]}),
        (MESSAGES, {"tools": [{"name": "x"}], "tool_choice": "required"}),
        (MESSAGES, {"regex": "a", "thought": {"end": "x"}}),
        (MESSAGES, {"thought": Thought()}),
        (MESSAGES, {"regex": 5}),
    ],
)
def test_options_that_contradict_each_other_are_refused(messages: Any, options: Any) -> None:
    with pytest.raises(InvalidRequestError):
        request_from(None if messages else "x", messages, options)
