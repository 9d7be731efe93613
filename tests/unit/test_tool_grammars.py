"""Guided tool calls: whatever a model samples, its calls are valid, and read back by the parser of the format."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.chat.formats import CALL_FORMATS, ChatFormat
from radixmesh.daemons.router.chat.parts import ChatMessage, Tool, ToolMode, ToolUse, read_whole
from radixmesh.daemons.router.chat.tool_grammar import is_unguided, tool_grammar
from radixmesh.daemons.router.http.request_types.constraints import grammar_of
from radixmesh.daemons.router.http.request_types.tool_fields import pack_use, read_tools, unpack_use
from radixmesh.daemons.router.requests.intake.grammars import settle_thought
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary
from radixmesh.daemons.runtime.guided.source import GrammarSource, grammar_source

pytest.importorskip("xgrammar")
EOS = 256
TURN = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["side", "steps"],
    "additionalProperties": False,
}
STOP = {
    "type": "object",
    "properties": {"now": {"type": "boolean"}},
    "required": ["now"],
    "additionalProperties": False,
}
FORMATS = (*dict.fromkeys(form.names[0] for form in CALL_FORMATS.values()), "none")


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    from radixmesh.daemons.runtime.guided.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(GuidedVocabulary([bytes((byte,)) for byte in range(256)] + [b""], (EOS,), 257))


def functions(**more: object) -> bytes:
    tools = [("turn", TURN), ("robot.stop", STOP)]
    return json.dumps(
        [{"type": "function", "function": {"name": name, "parameters": schema, **more}} for name, schema in tools]
    ).encode()


def sampled(backend: GrammarBackend, source: GrammarSource, seed: int, begin: str = "", most: int = 2000) -> str:
    """A text of `begin` and random characters that the grammar allows, ended where it allows that half of the time."""
    matcher = backend.load(backend.compile(source)).matcher()
    assert all(matcher.accept(byte) for byte in begin.encode()), begin
    words, rng, text = np.zeros(9, np.int32), random.Random(seed), bytearray(begin.encode())
    for _ in range(most):
        matcher.fill(words)
        allowed = [token for token in range(257) if words[token // 32] >> (token % 32) & 1]
        # Free text takes any bytes, UTF-8 or not: only markup has others than ASCII here.
        allowed = [token for token in allowed if token < 128 or token == EOS] or allowed
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            break
        token = rng.choice([token for token in allowed if token != EOS])
        assert matcher.accept(token)
        text.append(token)
    return text.decode(errors="ignore")  # Cut off, perhaps within a character.


def tag(use: ToolUse, calls: str) -> tuple[GrammarSource, bool]:
    grammar = tool_grammar(use, ChatFormat(calls).tags, has_special_markup=False)
    assert grammar is not None
    return grammar_source(common_pb2.Grammar(structural_tag=grammar.structural_tag)), grammar.is_list


def check_calls(message: ChatMessage) -> None:
    for call in message.tool_calls:
        value = json.loads(call.arguments)
        if call.name == "turn":
            assert value["side"] in ("left", "right") and 1 <= value["steps"] <= 99 and len(value) == 2
        else:
            assert call.name == "robot.stop" and list(value) == ["now"] and isinstance(value["now"], bool)


@pytest.mark.parametrize("calls", FORMATS)
@pytest.mark.parametrize("choice", [b'"required"', b'{"type": "function", "function": {"name": "robot.stop"}}'])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid(backend: GrammarBackend, calls: str, choice: bytes, parallel: bool) -> None:
    use = read_tools(functions(), choice, parallel)
    source, is_list = tag(use, calls)
    form = ChatFormat.of(calls, "none", "")
    for seed in range(3):
        text = sampled(backend, source, seed)
        message = read_whole(form.parser(use, "", request_id="r", index=0, is_list=is_list), text)
        assert message.tool_calls and message.content == "", (text, message)
        assert parallel or len(message.tool_calls) == 1
        if use.mode is ToolMode.NAMED:
            assert [call.name for call in message.tool_calls] == ["robot.stop"]
        check_calls(message)


@pytest.mark.parametrize(
    ("calls", "begin"),
    [
        ("hermes", 'Well.\n<tool_call>\n{"name": "'),
        ("qwen3_coder", "Well.\n<tool_call>\n<function="),
        ("glm45", "Well.\n<tool_call>"),
        ("deepseek_v3", "Well.\n<｜tool▁calls▁begin｜>"),
        ("deepseek_v31", "Well.\n<｜tool▁calls▁begin｜>"),
    ],
)
def test_strict_tools_bind_a_call_that_the_model_begins(backend: GrammarBackend, calls: str, begin: str) -> None:
    use = read_tools(functions(strict=True), None, None)
    assert use.mode is ToolMode.AUTO and not is_unguided(use, ChatFormat(calls).tags, has_special_markup=False)
    source, is_list = tag(use, calls)
    matcher = backend.load(backend.compile(source)).matcher()
    assert all(matcher.accept(byte) for byte in b'No call, and {"name": 1}.') and matcher.accept(EOS)
    for seed in range(3):
        text = sampled(backend, source, seed, begin, most=400)
        message = read_whole(ChatFormat.of(calls, "none", "").parser(use, "", request_id="r", index=0), text)
        assert message.tool_calls and message.content.startswith("Well.") and not is_list
        check_calls(message)


def allowing(mode: str, *names: str) -> bytes:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return json.dumps({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}).encode()


def test_calls_among_some_of_the_tools(backend: GrammarBackend) -> None:
    use = read_tools(functions(), allowing("required", "robot.stop"), None)
    assert use.mode is ToolMode.REQUIRED and [tool.name for tool in use.tools] == ["robot.stop"]
    text = sampled(backend, tag(use, "hermes")[0], 3)
    assert '"robot.stop"' in text and '"turn"' not in text
    auto = read_tools(functions(), allowing("auto", "turn"), None)
    assert auto.mode is ToolMode.AUTO
    for name, num_calls in (("turn", 1), ("robot.stop", 0)):
        written = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        parser = ChatFormat("hermes").parser(auto, "", request_id="r", index=0)
        message = read_whole(parser, written)
        assert len(message.tool_calls) == num_calls and (num_calls or message.content == written)


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        (allowing("required"), "tool_choice"),
        (allowing("required", "fly"), "tool_choice"),
        (allowing("never", "turn"), "tool_choice.allowed_tools.mode"),
        (b'{"type": "allowed_tools"}', "tool_choice"),
        (
            b'{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}',
            "tool_choice.allowed_tools.tools.0.function.name",
        ),
        (allowing("auto", *["turn"] * 1025), "tool_choice.allowed_tools.tools"),
    ],
)
def test_a_choice_among_tools_that_are_not_there(choice: bytes, field: str) -> None:
    with pytest.raises(MeshError) as raised:
        read_tools(functions(), choice, None)
    assert raised.value.metadata["field"] == field, raised.value


OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<stop>", "schema": STOP, "end": "</stop>"}],
    "triggers": ["<stop"],
}


@pytest.mark.parametrize("is_text", [False, True])
def test_structural_tags_as_they_were_written_first(backend: GrammarBackend, is_text: bool) -> None:
    raw = json.dumps(json.dumps(OLDER_TAG) if is_text else OLDER_TAG).encode()
    grammar, field = grammar_of({"structural_tag" if is_text else "response_format": raw})
    assert grammar is not None and field
    matcher = backend.load(backend.compile(grammar_source(grammar))).matcher()
    text = 'I <b>will</b> <stop>{"now": true}</stop> so'
    taken = [matcher.accept(byte) for byte in text.encode()]
    assert all(taken), text[: taken.index(False)]
    matcher = backend.load(backend.compile(grammar_source(grammar))).matcher()
    assert not all(matcher.accept(byte) for byte in b'<stop>{"now": 1}</stop>')


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"triggers": []}, "structural_tag"),
        ({"structures": []}, "structural_tag"),
        ({"structures": [{"begin": "<stop>", "end": "x"}]}, "structural_tag.structures.0.schema"),
        ({"structures": [{"begin": "<stop>", "schema": {"not": {}}, "end": "x"}]}, ""),
        ({"structures": [{}] * 1025}, "structural_tag.structures"),
    ],
)
def test_structural_tags_that_cannot_be(changes: dict[str, object], field: str) -> None:
    with pytest.raises(MeshError) as raised:
        grammar_of({"structural_tag": json.dumps({**OLDER_TAG, **changes}).encode()})
    assert raised.value.metadata.get("field", "") == field, raised.value


def test_tools_that_nobody_holds_to_their_schemas() -> None:
    loose, strict = read_tools(functions(), None, None), read_tools(functions(strict=True), None, None)
    assert tool_grammar(loose, ChatFormat("hermes").tags, has_special_markup=False) is None
    assert not is_unguided(loose, ChatFormat("mistral").tags, has_special_markup=True)
    assert is_unguided(strict, ChatFormat("hermes").tags, has_special_markup=True) and is_unguided(
        strict, ChatFormat("").tags, has_special_markup=False
    )
    must = read_tools(functions(), b'"required"', None)
    grammar = tool_grammar(must, ChatFormat("hermes").tags, has_special_markup=True)
    assert grammar is not None and grammar.is_list


def test_a_constraint_holds_from_the_end_of_the_thought_on(backend: GrammarBackend) -> None:
    def settled(prompt: str, *, is_always: bool = False, **form: str) -> GrammarSource:
        thought = common_pb2.Thought(begin="<think>", end="</think>", is_always=is_always)
        grammar = common_pb2.Grammar(thought=thought, **form)  # type: ignore[arg-type]
        settle_thought(grammar, prompt)
        return grammar_source(grammar)

    hermes = ChatFormat.of("hermes", "qwen3", "")
    use = read_tools(functions(), b'"required"', None)
    tool_tag = tag(use, "hermes")[0].text
    forms = ({"json_schema": json.dumps(STOP)}, {"regex": "[ab]{3}"}, {"ebnf": 'root ::= "x" | "yy"'})
    for form in (*forms, {"structural_tag": tool_tag}):
        closed = settled("user\n<think>\n\n</think>\n\n", **form)
        assert closed.thought is None
        for prompt, begin in (("a<think>\n", "hm, {</think>"), ("a", "<think>hm, {</think>\n\n"), ("a", "")):
            source = settled(prompt, **form)
            assert source.digest != closed.digest
            text = sampled(backend, source, 1, begin)
            if text.startswith("<think>") and not begin:
                continue  # Chosen by chance: random text does not end it.
            parser = hermes.parser(use, prompt, request_id="r", index=0)
            message = read_whole(parser, text)
            assert message.reasoning == ("hm, {" if begin else ""), text
            if "json_schema" in form:
                assert list(json.loads(message.content)) == ["now"]
            elif "structural_tag" in form:
                check_calls(message)
                assert message.tool_calls and not message.content
            else:
                assert message.content in ("x", "yy") or set(message.content) <= {"a", "b"}
    assert settled("a", is_always=True, regex="a").thought == ("<think>", "</think>", True)


def test_a_schema_that_no_grammar_follows() -> None:
    tools = functions().replace(b'"type": "boolean"', b'"type": "boolean", "not": {}')
    assert 'additionalProperties": true' in read_tools(tools, b'"required"', None).tools[1].guided
    strict = tools.replace(b'"parameters"', b'"strict": true, "parameters"')
    with pytest.raises(MeshError) as caught:
        read_tools(strict, None, None)
    assert caught.value.metadata["field"] == "tools.1.function.parameters"
    assert caught.value.reason_name == "INVALID_GRAMMAR"


def test_any_object_is_any_object(backend: GrammarBackend) -> None:
    use = ToolUse((Tool("f", guided='{"type": "object", "additionalProperties": true}'),), ToolMode.REQUIRED)
    matcher = backend.load(backend.compile(tag(use, "none")[0])).matcher()
    text = b'[{"name": "f", "parameters": {"a": [1, {"b": null}]}}]'
    assert all(matcher.accept(byte) for byte in text) and matcher.accept(EOS)


def test_schemas_of_tools_are_bounded_together_as_a_grammar_follows_them() -> None:
    names = {f"{number:04d}": {} for number in range(10_000)}
    schema = {"type": "object", "properties": names}
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "strict": True, "parameters": schema}}
        for number in range(10)
    ]
    with pytest.raises(MeshError) as caught:
        read_tools(json.dumps(tools).encode(), None, None)
    assert caught.value.metadata == {"field": "tools", "limit": "source_bytes"}


def test_tools_keep_their_form_on_the_way_between_processes() -> None:
    use = read_tools(functions(strict=True), b'"required"', False)
    packed = json.loads(json.dumps(pack_use(use)))
    assert unpack_use(packed) == use
