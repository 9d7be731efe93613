"""Answers of models in every format that is read, as the models write them."""

from __future__ import annotations

from typing import NamedTuple

from radixmesh.daemons.router.chat.parts import ChatMessage, Tool, ToolCall, ToolMode, ToolUse

WEATHER = Tool(
    "get_weather",
    '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"},'
    ' "tags": {"type": "array", "items": {"type": "string"}}}}',
)
NOTE = Tool("note.add", '{"type": "object", "properties": {"text": {"type": "string"}}}')
USE = ToolUse((WEATHER, NOTE), ToolMode.AUTO)
BERLIN = {"city": 'Berlin "Mitte" }]', "days": 3, "tags": ["a,b", "ü"]}
TEXT = {"text": "line 1\n</x> {[\t\\"}


class Output(NamedTuple):
    """An answer. content, reasoning: what it says beside calls. calls: name and arguments of each."""

    parser: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = (("get_weather", BERLIN), ("note.add", TEXT))
    thought: str = "none"
    prompt: str = ""


_B = r'{"city": "Berlin \"Mitte\" }]", "days": 3, "tags": ["a,b", "\u00fc"]}'
_T = r'{"text": "line 1\n</x> {[\t\\"}'
_JSON_B = f'{{"name": "get_weather", "arguments": {_B}}}'
_JSON_T = f'{{"arguments": {_T}, "id": 7, "name": "note.add"}}'
_NONE: tuple[tuple[str, dict[str, object]], ...] = ()

OUTPUTS = (
    Output("hermes", f"Let me see.\n<tool_call>\n{_JSON_B}\n</tool_call>\n<tool_call>{_JSON_T}</tool_call>\n",
           "Let me see."),
    Output("hermes", f"<think>\nHm, <tool_call>?\n</think>\n\n<tool_call>{_JSON_B}</tool_call>"
           f"\n\nDone {{x}}.<tool_call>{_JSON_T}",
           "\n\nDone {x}.", "Hm, <tool_call>?", thought="qwen3"),
    Output("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 1}"}</tool_call>'
           '<tool_call>{"name": "note.add"}</tool_call>', calls=(("get_weather", {"days": 1}), ("note.add", {}))),
    Output("hermes", "  plain text < tool_call >\n", "  plain text < tool_call >\n", calls=_NONE),
    Output("llama3_json", f'{_JSON_B.replace("arguments", "parameters")}; {_JSON_T}'),
    Output("llama3_json", f"<|python_tag|>{_JSON_B}, {_JSON_T}"),
    Output("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', calls=_NONE),
    Output("pythonic", "[get_weather(city='Berlin \"Mitte\" }]', days=3, tags=[\"a,b\", \"ü\"]), "
           "note.add(text=\"line 1\\n</x> {[\\t\\\\\")]"),
    Output("pythonic", "<|python_start|>[get_weather(days=3)]<|python_end|>", calls=(("get_weather", {"days": 3}),)),
    Output("pythonic", "[see here](x) and [note]", "[see here](x) and [note]", calls=_NONE),
    Output("mistral", f"Sure.[TOOL_CALLS] [{_JSON_B}, {_JSON_T}]", "Sure."),
    Output("mistral", f"[THINK]a b[/THINK][TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{_B}[TOOL_CALLS]note.add{_T}",
           reasoning="a b", thought="mistral"),
    Output("deepseek_v3", "x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
           f"{_B}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>note.add\n```json\n{_T}\n```"
           "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "x"),
    Output("deepseek_v31", f"a thought</think>ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
           f"{_B}<｜tool▁call▁end｜><｜tool▁call▁begin｜>note.add<｜tool▁sep｜>{_T}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
           "ok", "a thought", thought="deepseek_r1", prompt="<｜Assistant｜><think>\n"),
    Output("kimi_k2", "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
           f"<|tool_call_argument_begin|>{_B}<|tool_call_end|><|tool_call_begin|>functions.note.add:1"
           f"<|tool_call_argument_begin|>{_T}<|tool_call_end|><|tool_calls_section_end|>", "I look."),
    Output("kimi_k2", "think of it <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
           f"<|tool_call_argument_begin|>{_B}<|tool_call_end|><|tool_calls_section_end|>", reasoning="think of it",
           calls=(("get_weather", BERLIN),), thought="kimi_k2", prompt="<think>"),
    Output("qwen3_coder", "I'll do it.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin \"Mitte\" }]\n"
           "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a,b\", \"ü\"]\n</parameter>\n"
           "</function>\n</tool_call>\n<tool_call>\n<function=note.add>\n<parameter=text>\nline 1\n</x> {[\t\\\n"
           "</parameter>\n</function>\n</tool_call>", "I'll do it."),
    Output("glm45", "<think>so</think>\nYes\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin "
           "\"Mitte\" }]</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n"
           "<arg_value>[\"a,b\", \"ü\"]</arg_value>\n</tool_call>\n<tool_call>note.add<arg_key>text</arg_key>"
           "<arg_value>line 1\n</x> {[\t\\</arg_value></tool_call>", "Yes", "so", thought="glm45"),
    Output("gpt_oss", "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary<|message|>"
           "I call.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
           f"{_B}<|call|><|start|>assistant to=functions.note.add<|channel|>commentary json<|message|>{_T}", "I call.",
           "They ask.", thought="gpt_oss"),
    Output("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>!",
           "Hi <b>!",
           "Hm.", calls=_NONE, thought="gpt_oss"),
    Output("none", "only thoughts", reasoning="only thoughts", calls=_NONE, thought="deepseek_r1"),
    Output("none", "no thoughts", "no thoughts", calls=_NONE, thought="deepseek_r1", prompt="<think>\n\n</think>\n\n"),
    Output("none", "◁think▷a◁/think▷b", "b", "a", calls=_NONE, thought="kimi"),
)  # fmt: skip

# Text that begins like a call: (format, text). All of it is content.
MALFORMED = (
    ("hermes", "<tool_call>oops</tool_call>"),
    ("hermes", '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "\\ud800"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_wea'),
    ("hermes", "a <tool_call> b <tool_call"),
    ("llama3_json", '{"a": 1}'),
    ("llama3_json", "{not json"),
    ("pythonic", "[get_weather(open('x'))]"),
    ("pythonic", "[get_weather(days=3"),
    ("pythonic", "[get_weather(days=" + "[" * 40 + "]" * 40 + ")]"),
    ("pythonic", "[get_weather(city='\\ud800')]"),
    ("mistral", "[TOOL_CALLS]what is this"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>hello"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>nothing\n```json\n{}"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>nothing<｜tool▁sep｜>{}"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
    ("qwen3_coder", "<tool_call><function=who>x</function></tool_call>"),
    ("glm45", "<tool_call>nobody\n<arg_key>a</arg_key></tool_call>"),
    ("gpt_oss", "<|channel|>commentary to=python code<|message|>1+1"),
    ("gpt_oss", "<|channel|>analysis and no message"),
)


def told(message: ChatMessage) -> tuple[str, str, list[ToolCall]]:
    """The message's parts for comparison."""
    return message.content, message.reasoning, message.tool_calls
