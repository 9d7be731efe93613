"""Chat answers read: the same for every split of their text, and without a loss."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable

import pytest
from support.chat_outputs import MALFORMED, OUTPUTS, USE, WEATHER, Output, told

from radixmesh.daemons.router.chat.formats import CALL_FORMATS, REASONING_PARSERS, TOOL_PARSERS, CallFormat, ChatFormat
from radixmesh.daemons.router.chat.json_calls import ListCalls
from radixmesh.daemons.router.chat.parts import (
    ChatMessage,
    ChatParser,
    ToolCallStart,
    ToolMode,
    ToolUse,
    join,
    read_whole,
)
from radixmesh.daemons.router.chat.text_reader import MAX_HELD


def parser_of(calls: str, thought: str = "none", prompt: str = "", use: ToolUse = USE) -> ChatParser:
    return ChatFormat.of(calls, thought, "").parser(use, prompt, request_id="r", index=0)


def read_pieces(parser: ChatParser, pieces: Iterable[str]) -> ChatMessage:
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return join([*parts, *parser.finish()])


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda o: f"{o.parser}-{o.text[:20]!r}")
def test_reads_what_models_write(output: Output) -> None:
    message = read_whole(parser_of(output.parser, output.thought, output.prompt), output.text)
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert (message.content, message.reasoning, calls) == (output.content, output.reasoning, list(output.calls))
    assert len({call.id for call in message.tool_calls}) == len(calls)


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda o: f"{o.parser}-{o.text[:20]!r}")
def test_every_split_reads_the_same(output: Output) -> None:
    """Also of texts that were cut off, or lost a piece: those are malformed in all ways."""
    rng = random.Random(output.text)
    texts = [output.text]
    for _ in range(12):
        start = rng.randrange(len(output.text))
        texts.append(output.text[:start])
        texts.append(output.text[:start] + output.text[start + rng.randint(1, 12) :])
        texts.append(
            output.text[:start] + rng.choice(["{", '"', "<", "]", "\n", ">", output.text]) + output.text[start:]
        )
    for text in texts:
        whole = told(read_whole(parser_of(output.parser, output.thought, output.prompt), text))
        cuts = [[at] for at in range(0, len(text), 7 if text is not output.text else 1)]
        cuts += [sorted(rng.sample(range(len(text) + 1), min(5, len(text)))) for _ in range(3)]
        cuts.append(list(range(len(text))))
        for cut in cuts:
            ends = [*cut, len(text)]
            pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            parts = read_pieces(parser_of(output.parser, output.thought, output.prompt), pieces)
            assert told(parts) == whole, (text, cut)


@pytest.mark.parametrize(("calls", "text"), MALFORMED)
def test_malformed_calls_are_content(calls: str, text: str) -> None:
    for pieces in ([text], list(text)):
        message = read_pieces(parser_of(calls), pieces)
        assert not message.tool_calls
        assert message.reasoning + message.content in (text, text.removeprefix("<|channel|>analysis and"))


@pytest.mark.parametrize(("calls", "text"), MALFORMED)
def test_a_good_call_after_a_malformed_one_is_read(calls: str, text: str) -> None:
    if calls in ("llama3_json", "pythonic", "gpt_oss") or not text.endswith((">", "]")):
        return  # A call is the whole answer there, or this one swallows what follows.
    good = next(output for output in OUTPUTS if output.parser == calls and output.calls)
    message = read_whole(parser_of(calls), text + good.text)
    assert [call.name for call in message.tool_calls] == [name for name, _ in good.calls]


def test_no_word_is_lost_whatever_happens_to_the_markup() -> None:
    rng = random.Random(7)
    for output in OUTPUTS:
        words = ("Berlin", "Mitte", "line", "look", "Done", "Hm")
        for _ in range(60):
            start = rng.randrange(len(output.text))
            text = output.text[:start] + output.text[start + rng.randint(1, 8) :]
            message = read_whole(parser_of(output.parser, output.thought, output.prompt), text)
            said = message.content + message.reasoning + "".join(c.arguments + c.name for c in message.tool_calls)
            assert all(word in said for word in words if word in text), (text, said)


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of("hermes")
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments": ') == []
    start, begun = parser.feed('{"city": "Ber')
    assert isinstance(start, ToolCallStart) and start.name == "get_weather"
    assert begun == (0, '{"city": "Ber')
    assert parser.feed('lin"') == [(0, 'lin"')]
    assert parser.num_calls == 1


def test_one_call_where_no_parallel_ones_are_asked_for() -> None:
    one = USE._replace(parallel=False)
    for output in OUTPUTS:
        if len(output.calls) == 2 and "line 1" in output.text:
            message = read_whole(parser_of(output.parser, output.thought, output.prompt, one), output.text)
            assert [call.name for call in message.tool_calls] == ["get_weather"]
            assert "line 1" in message.content


def test_text_without_tools_is_content() -> None:
    for mode in (ToolUse(), USE._replace(mode=ToolMode.NONE)):
        text = OUTPUTS[0].text
        assert read_whole(parser_of("hermes", use=mode), text).content == text


def test_the_list_of_guided_calls() -> None:
    text = '[{"name": "get_weather", "parameters": {"days": 1}}, {"name": "note.add", "parameters": {}}]'
    for pieces in ([text], list(text)):
        message = read_pieces(ListCalls(USE, str), pieces)
        assert [(call.name, call.arguments) for call in message.tool_calls] == [
            ("get_weather", '{"days": 1}'),
            ("note.add", "{}"),
        ]
        assert message.content == ""
    assert read_whole(ListCalls(USE, str), "[1] text").content == "[1] text"


def test_ids_are_those_of_the_request() -> None:
    def ids(request_id: str, index: int) -> list[str]:
        parser = ChatFormat.of("hermes", "none", "").parser(USE, "", request_id=request_id, index=index)
        return [call.id for call in read_whole(parser, OUTPUTS[0].text).tool_calls]

    assert ids("a", 0) == ids("a", 0)
    assert not set(ids("a", 0)) & set(ids("a", 1)) and not set(ids("a", 0)) & set(ids("b", 0))
    kimi = next(output for output in OUTPUTS if output.parser == "kimi_k2")
    assert read_whole(parser_of("kimi_k2"), kimi.text).tool_calls[0].id == "functions.get_weather:0"


@pytest.mark.parametrize(
    ("calls", "head", "piece"),
    [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "', "ab \\n"),
        ("hermes", '<tool_call>{"arguments": {"city": "', "ab \\n"),
        ("hermes", "", "<tool_call>"),
        ("hermes", "", "<tool_call"),
        ("hermes", "", " \n"),
        ("hermes", "<tool_call>", " "),
        ("llama3_json", "", "["),
        ("llama3_json", "", '{"name": '),
        ("pythonic", "[get_weather(city='", "x"),
        ("pythonic", "[get_weather(a=", "1+"),
        ("pythonic", "[", "a"),
        ("mistral", "[TOOL_CALLS][", '{"name": "get_weather"},'),
        ("deepseek_v3", "", "<｜tool▁call▁begin｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>", "x"),
        ("qwen3_coder", "<function=get_weather><parameter=days>", "1"),
        ("qwen3_coder", "<function=get_weather><parameter=city>", "\n</param"),
        ("glm45", "<tool_call>get_weather", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("gpt_oss", "", "<|channel|>"),
        ("gpt_oss", "<|channel|>final<|message|>", "<|"),
    ],
)
def test_a_feed_costs_what_is_new(calls: str, head: str, piece: str) -> None:
    """In small pieces and at once: eight times the text takes eight times as long, with room for a loaded machine."""

    def seconds(num: int, step: int) -> float:
        text = head + piece * (num // len(piece))
        parser = parser_of(calls)
        since = time.process_time()
        for start in range(0, len(text), step):
            parser.feed(text[start : start + step])
        parser.finish()
        return time.process_time() - since

    # Quadratic cost would be 64 times, and 16 times, as much, each time that it is measured.
    assert any(seconds(40_000, 8) < 24 * seconds(5_000, 8) + 0.2 for _ in range(3))
    assert any(seconds(MAX_HELD, 1 << 20) < 10 * seconds(MAX_HELD // 4, 1 << 20) + 0.2 for _ in range(3))


def test_what_is_held_has_a_bound_that_no_split_moves() -> None:
    long = (
        '<tool_call>{"arguments": {"city": "' + "a" * (MAX_HELD + 5) + '<tool_call>{"name": "get_weather"}</tool_call>'
    )
    whole = told(read_whole(parser_of("hermes"), long))
    assert whole[2] and len(whole[0]) > MAX_HELD
    for step in (1000, 4097, 100_003):
        pieces = [long[start : start + step] for start in range(0, len(long), step)]
        assert told(read_pieces(parser_of("hermes"), pieces)) == whole


def test_blanks_before_an_answer_are_held_no_further_than_that() -> None:
    for text in (" " * (MAX_HELD + 5) + "x", " " * (MAX_HELD - 3) + "<think>t</think>x", "\n" * MAX_HELD * 2):
        whole = told(read_whole(parser_of("hermes", "qwen3"), text))
        for step in (4097, 100_003):
            pieces = [text[start : start + step] for start in range(0, len(text), step)]
            assert told(read_pieces(parser_of("hermes", "qwen3"), pieces)) == whole
        assert whole[0] == text


def test_a_long_schema_is_read_once_however_often_its_tool_is_called() -> None:
    tool = WEATHER._replace(parameters=json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(7000)}}))
    since = time.process_time()
    message = read_whole(
        parser_of("glm45", use=ToolUse((tool,), ToolMode.AUTO)), "<tool_call>get_weather</tool_call>" * 2000
    )
    # Read for each call it takes a hundred times as long.
    assert len(message.tool_calls) == 2000 and time.process_time() - since < 2.5


def test_values_are_of_the_types_that_the_schema_names() -> None:
    def value(text: str, kind: str) -> object:
        tool = WEATHER._replace(parameters=f'{{"properties": {{"x": {kind}}}}}')
        use = ToolUse((tool,), ToolMode.AUTO)
        text = f"<tool_call>get_weather<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
        return json.loads(read_whole(parser_of("glm45", use=use), text).tool_calls[0].arguments)["x"]

    assert value("12", '{"type": "string"}') == "12"
    assert value("12", '{"type": "integer"}') == 12
    assert value("12", '{"type": ["string", "null"]}') == "12"
    assert value("null", '{"type": ["string", "null"]}') is None
    assert value("True", '{"type": "boolean"}') is True
    assert value("twelve", '{"type": "integer"}') == "twelve"
    assert value('{"a": 1}', "{}") == {"a": 1}
    assert value("b", '{"enum": ["a", "b"]}') == "b"
    assert value("1" * 5000, '{"type": "integer"}') == "1" * 5000
    for number in ("NaN", "Infinity", "-Infinity"):
        assert value(number, '{"type": "number"}') == number  # No JSON.


def test_formats_by_chat_template() -> None:
    def found(template: str) -> tuple[str, str]:
        format_ = ChatFormat.of("auto", "auto", template)
        return format_.calls, "harmony" if format_.is_harmony else format_.thought.end if format_.thought else ""

    assert found("{{ messages }}") == ("", "")
    assert found("<tool_call> {{ x.split('</think>') }}") == ("hermes", "</think>")
    assert found("<tool_call> <function= <parameter= </think>") == ("qwen3_coder", "</think>")
    assert found("<tool_call> <arg_key> </think>") == ("glm45", "</think>")
    assert found("[TOOL_CALLS]") == ("mistral", "")
    assert found("<|channel|>analysis<|message|>") == ("gpt_oss", "harmony")
    assert found("<|python_tag|>") == ("llama3_json", "")
    assert found("<｜tool▁calls▁begin｜> </think>") == ("deepseek_v31", "</think>")
    assert found("<｜tool▁calls▁begin｜> ```json") == ("deepseek_v3", "")
    assert found("<|tool_calls_section_begin|>") == ("kimi_k2", "</think>")


def test_every_name_makes_a_parser() -> None:
    for calls in TOOL_PARSERS:
        for thought in REASONING_PARSERS:
            assert read_whole(parser_of(calls, thought, "</think>"), "x y").content == "x y"


@pytest.mark.parametrize("form", dict.fromkeys(CALL_FORMATS.values()), ids=lambda form: form.names[0])
def test_every_format_of_calls_is_whole(form: CallFormat) -> None:
    samples = [output for output in OUTPUTS if output.parser == form.names[0] and output.calls]
    assert samples, "no answer of the format in tests/support/chat_outputs.py"
    assert any(calls == form.names[0] for calls, _ in MALFORMED), "no text there that only begins like a call"
    written = "".join(output.text for output in samples)
    for name in form.names:
        assert CALL_FORMATS[name] is form and ChatFormat(name).markers == form.markers
    assert form.markers, "markers that are special tokens would be missing from the text"
    markers = re.findall(r"<\|?[^<>]*>?|\[[^\[\]]*\]", form.markers)
    assert "".join(markers) == form.markers and any(marker in written for marker in markers)
    for texts in form.templates:
        found = ChatFormat.of("auto", "none", " ".join(texts)).calls
        assert found == form.names[0], f"{found} comes first in the table and knows the same texts"


def test_names_of_formats_are_told_apart() -> None:
    names = [name for form in dict.fromkeys(CALL_FORMATS.values()) for name in form.names]
    assert len(names) == len(set(names)) == len(CALL_FORMATS)
