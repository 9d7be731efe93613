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
from radixmesh.daemons.router.chat.xml_calls import GlmCalls, QwenCoderCalls

CallFormat = Callable[[ToolUse, CallIds], CallReader]
AUTO, NONE = "auto", "none"

_CALLS: Mapping[str, CallFormat] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25"), HermesCalls),
    **dict.fromkeys(("llama3_json", "llama4_json", "llama3"), LlamaCalls),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), PythonicCalls),
    "mistral": MistralCalls,
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"), DeepSeekCalls),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), QwenCoderCalls),
    **dict.fromkeys(("glm45", "glm47"), GlmCalls),
    "kimi_k2": KimiCalls,
    **dict.fromkeys(("openai", "gpt_oss", "gpt-oss"), HarmonyReader),
}
# Every marker that may be a special token.
_MARKERS: Mapping[CallFormat, str] = {
    HermesCalls: "<tool_call></tool_call>",
    LlamaCalls: "<|python_tag|>",
    PythonicCalls: "<|python_start|><|python_end|>",
    MistralCalls: "[TOOL_CALLS][CALL_ID][ARGS]",
    DeepSeekCalls: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    QwenCoderCalls: "<tool_call><function=</function></tool_call><parameter=</parameter>",
    GlmCalls: "<tool_call></tool_call><arg_key></arg_key><arg_value></arg_value>",
    KimiCalls: "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>",
    HarmonyReader: "<|start|><|channel|><|constrain|><|message|><|end|><|call|>",
}
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
TOOL_PARSERS = (AUTO, NONE, *_CALLS)
REASONING_PARSERS = (AUTO, NONE, *_THOUGHTS, "gpt_oss", "gpt-oss", "openai_gptoss")

# The first whose texts are all in the template: the special ones before those that many templates have.
_TEMPLATES_OF_CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)
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
        is_harmony = thought in ("gpt_oss", "gpt-oss", "openai_gptoss") or _CALLS.get(calls) is HarmonyReader
        return cls(calls, None if is_harmony else _THOUGHTS.get(thought), is_harmony)

    @property
    def has_markup(self) -> bool:
        """True where answers have to be read, with or without tools."""
        return self.is_harmony or self.thought is not None

    @property
    def markers(self) -> str:
        """Texts that hold the markup of calls and thoughts: where one is a special token, text has to show those."""
        make = _CALLS.get(self.calls)
        texts = [_MARKERS[make]] if make is not None else []
        if self.thought is not None:
            texts += [self.thought.begin, self.thought.end]
        return "".join(texts)

    def parser(self, use: ToolUse, prompt: str, *, request_id: str, index: int, is_list: bool = False) -> ChatParser:
        """The parser of one output. prompt: its end will do, 64 characters. is_list: calls come as a JSON list."""
        ids = call_ids(request_id, index)
        has_tools = bool(use.tools) and use.mode is not ToolMode.NONE
        if is_list:
            inner: ChatParser = ListCalls(use, ids)
            return inner if self.thought is None else self._behind_thought(inner, prompt)
        if self.is_harmony:
            return HarmonyReader(use if has_tools else ToolUse(), ids)
        make = _CALLS.get(self.calls)
        inner = make(use, ids) if has_tools and make is not None else PlainParser()
        return inner if self.thought is None else self._behind_thought(inner, prompt)

    def _behind_thought(self, inner: ChatParser, prompt: str) -> ChatParser:
        assert self.thought is not None
        return ThoughtParser(self.thought, inner, is_open=self.thought.is_open_after(prompt))


def _found_calls(template: str) -> str:
    for name, texts in _TEMPLATES_OF_CALLS:
        if all(text in template for text in texts):
            return name
    return NONE


def _found_thought(template: str) -> str:
    return next((name for name, text in _TEMPLATES_OF_THOUGHTS if text in template), NONE)
