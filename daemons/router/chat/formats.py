"""Formats of tool calls and reasoning, by the names that SGLang and vLLM give them or by a chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from radixmesh.daemons.router.chat.call_reader import CallIds, CallReader, call_ids
from radixmesh.daemons.router.chat.harmony import HarmonyReader
from radixmesh.daemons.router.chat.json_calls import (
    DeepSeekCalls,
    HermesCalls,
    KimiCalls,
    ListCalls,
    LlamaCalls,
    MistralCalls,
)
from radixmesh.daemons.router.chat.parts import ChatParser, PlainParser, ToolMode, ToolUse
from radixmesh.daemons.router.chat.pythonic_calls import PythonicCalls
from radixmesh.daemons.router.chat.thoughts import ThoughtParser, ThoughtTags
from radixmesh.daemons.router.chat.tool_grammar import CallTags
from radixmesh.daemons.router.chat.xml_calls import GlmCalls, QwenCoderCalls

AUTO, NONE = "auto", "none"


class CallFormat(NamedTuple):
    """A format of tool calls: all that its registration takes.

    names: of the flag; the first one is what `auto` finds. markers: every marker that may be a special token, in one
    text. templates: texts of chat templates by which `auto` knows it: all texts of one of them. tags: the grammar by
    which a model is made to call; None: it writes a JSON list instead.
    """

    names: tuple[str, ...]
    reader: Callable[[ToolUse, CallIds], CallReader]
    markers: str
    templates: tuple[tuple[str, ...], ...]
    tags: CallTags | None = None


_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_MARKERS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>"
# `auto` takes the first that knows the template: the special ones before those whose texts many templates have.
_FORMATS = (
    CallFormat(
        names=("gpt_oss", "gpt-oss", "openai"),
        reader=HarmonyReader,
        markers="<|start|><|channel|><|constrain|><|message|><|end|><|call|>",
        templates=(("<|channel|>", "<|message|>"),),
    ),
    CallFormat(
        names=("kimi_k2",),
        reader=KimiCalls,
        markers="<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>",
        templates=(("<|tool_calls_section_begin|>",),),
    ),
    CallFormat(
        names=("deepseek_v3", "deepseekv3"),
        reader=DeepSeekCalls,
        markers=_DEEPSEEK_MARKERS,
        templates=(("<｜tool▁calls▁begin｜>", "```json"),),
        tags=CallTags(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "\n",
            *_SECTION,
            trigger=_SECTION[0],
        ),
    ),
    CallFormat(
        names=("deepseek_v31", "deepseekv31"),
        reader=DeepSeekCalls,
        markers=_DEEPSEEK_MARKERS,
        templates=(("<｜tool▁calls▁begin｜>",),),
        tags=CallTags(
            "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "", *_SECTION, trigger=_SECTION[0]
        ),
    ),
    CallFormat(
        names=("mistral",),
        reader=MistralCalls,
        markers="[TOOL_CALLS][CALL_ID][ARGS]",
        templates=(("[TOOL_CALLS]",),),
    ),
    CallFormat(
        names=("glm45", "glm47"),
        reader=GlmCalls,
        markers="<tool_call></tool_call><arg_key></arg_key><arg_value></arg_value>",
        templates=(("<arg_key>",),),
        tags=CallTags("<tool_call>{}\n", "</tool_call>", style="glm_xml", trigger="<tool_call>"),
    ),
    CallFormat(
        names=("qwen3_coder", "qwen3_xml"),
        reader=QwenCoderCalls,
        markers="<tool_call><function=</function></tool_call><parameter=</parameter>",
        templates=(("<function=", "<parameter="),),
        tags=CallTags(
            "<tool_call>\n<function={}>\n",
            "\n</function>\n</tool_call>",
            style="qwen_xml",
            trigger="<tool_call>\n<function=",
        ),
    ),
    CallFormat(
        names=("hermes", "qwen", "qwen25"),
        reader=HermesCalls,
        markers="<tool_call></tool_call>",
        templates=(("<tool_call>",),),
        tags=CallTags(
            '<tool_call>\n{{"name": "{}", "arguments": ',
            "}\n</tool_call>",
            trigger='<tool_call>\n{"name": "',
        ),
    ),
    CallFormat(
        names=("pythonic", "llama4_pythonic"),
        reader=PythonicCalls,
        markers="<|python_start|><|python_end|>",
        templates=(("<|python_start|>",),),
    ),
    CallFormat(
        names=("llama3_json", "llama4_json", "llama3"),
        reader=LlamaCalls,
        markers="<|python_tag|>",
        templates=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
        tags=CallTags('{{"name": "{}", "parameters": ', "}", "; "),
    ),
)
CALL_FORMATS: Mapping[str, CallFormat] = {name: form for form in _FORMATS for name in form.names}
_THINK = ThoughtTags()
_ALWAYS = ThoughtTags(is_always=True)
_THOUGHTS: Mapping[str, ThoughtTags] = {
    **dict.fromkeys(("deepseek_r1", "deepseek-r1", "qwen3-thinking"), _ALWAYS),
    **dict.fromkeys(("deepseek_v3", "deepseek-v3", "qwen3", "glm45", "granite", "hybrid"), _THINK),
    "kimi_k2": ThoughtTags(stops=("<|tool_calls_section_begin|>",)),
    "kimi": ThoughtTags("◁think▷", "◁/think▷"),
    "mistral": ThoughtTags("[THINK]", "[/THINK]"),
    "seed_oss": ThoughtTags("<seed:think>", "</seed:think>"),
}
_HARMONY = ("gpt_oss", "gpt-oss", "openai_gptoss")
TOOL_PARSERS = (AUTO, NONE, *CALL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *_THOUGHTS, *_HARMONY)

# The first whose text is in the template.
_TEMPLATES_OF_THOUGHTS: tuple[tuple[str, str], ...] = (
    ("gpt_oss", "<|channel|>analysis"),
    ("mistral", "[THINK]"),
    ("seed_oss", "<seed:think>"),
    ("kimi", "◁/think▷"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("qwen3", "</think>"),
)


class ChatFormat(NamedTuple):
    """The markup of calls and reasoning that a model writes.

    calls: a name of TOOL_PARSERS; "" = none known. thought: None = it does not reason, or in harmony's channels."""

    calls: str = ""
    thought: ThoughtTags | None = None
    is_harmony: bool = False

    @classmethod
    def of(cls, tool_parser: str, reasoning_parser: str, template: str) -> ChatFormat:
        """By the flags' names; "auto" looks into the chat template."""
        calls = _found_calls(template) if tool_parser == AUTO else tool_parser
        thought = _found_thought(template) if reasoning_parser == AUTO else reasoning_parser
        calls = "" if calls == NONE else calls
        own = CALL_FORMATS.get(calls)
        is_harmony = thought in _HARMONY or (own is not None and own.reader is HarmonyReader)
        return cls(calls, None if is_harmony else _THOUGHTS.get(thought), is_harmony)

    @property
    def has_markup(self) -> bool:
        """True where answers have to be read, with or without tools."""
        return self.is_harmony or self.thought is not None

    @property
    def markers(self) -> str:
        """Texts that hold the markup of calls and thoughts: where one is a special token, text has to show those."""
        own = CALL_FORMATS.get(self.calls)
        texts = [own.markers] if own is not None else []
        if self.thought is not None:
            texts += [self.thought.begin, self.thought.end]
        return "".join(texts)

    @property
    def tags(self) -> CallTags | None:
        """The grammar of calls in the model's own format; None where there is none."""
        own = CALL_FORMATS.get(self.calls)
        return None if own is None else own.tags

    def parser(self, use: ToolUse, prompt: str, *, request_id: str, index: int, is_list: bool = False) -> ChatParser:
        """The parser of one output. prompt: its end will do, 64 characters. is_list: calls come as a JSON list."""
        ids = call_ids(request_id, index)
        has_tools = bool(use.tools) and use.mode is not ToolMode.NONE
        if is_list:
            inner: ChatParser = ListCalls(use, ids)
            return inner if self.thought is None else self._behind_thought(inner, prompt)
        if self.is_harmony:
            return HarmonyReader(use if has_tools else ToolUse(), ids)
        own = CALL_FORMATS.get(self.calls)
        inner = own.reader(use, ids) if has_tools and own is not None else PlainParser()
        return inner if self.thought is None else self._behind_thought(inner, prompt)

    def _behind_thought(self, inner: ChatParser, prompt: str) -> ChatParser:
        assert self.thought is not None
        return ThoughtParser(self.thought, inner, is_open=self.thought.is_open_after(prompt))


def _found_calls(template: str) -> str:
    for form in _FORMATS:
        if any(all(text in template for text in texts) for texts in form.templates):
            return form.names[0]
    return NONE


def _found_thought(template: str) -> str:
    return next((name for name, text in _TEMPLATES_OF_THOUGHTS if text in template), NONE)
