"""Formats of tool calls and reasoning, by the names that SGLang and vLLM give them or by a chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from radixmesh.daemons.router.chat.call_reader import CallIds, CallReader, call_ids
from radixmesh.daemons.router.chat.harmony import HarmonyReader
from radixmesh.daemons.router.chat.json_calls import DeepSeekCalls, HermesCalls, KimiCalls, LlamaCalls, MistralCalls
from radixmesh.daemons.router.chat.parts import ChatParser, PlainParser, ToolMode, ToolUse
from radixmesh.daemons.router.chat.pythonic_calls import PythonicCalls
from radixmesh.daemons.router.chat.thoughts import ThoughtParser, ThoughtTags
from radixmesh.daemons.router.chat.xml_calls import GlmCalls, QwenCoderCalls

CallFormat = Callable[[ToolUse, CallIds], CallReader]
AUTO, NONE = "auto", "none"
HARMONY = "gpt_oss"

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
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
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
    """The way a model writes calls and reasoning. calls: a name of TOOL_PARSERS; "" = none known. thought: None = it
    does not reason, or all in harmony's channels."""

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

    def parser(self, use: ToolUse, prompt: str, *, request_id: str, index: int) -> ChatParser:
        """The parser of one output. prompt: its end will do, 64 characters."""
        ids = call_ids(request_id, index)
        has_tools = bool(use.tools) and use.mode is not ToolMode.NONE
        if self.is_harmony:
            return HarmonyReader(use if has_tools else ToolUse(), ids)
        make = _CALLS.get(self.calls)
        inner: ChatParser = make(use, ids) if has_tools and make is not None else PlainParser()
        if self.thought is None:
            return inner
        return ThoughtParser(self.thought, inner, is_open=self.thought.is_open_after(prompt))


def _found_calls(template: str) -> str:
    for name, texts in _TEMPLATES_OF_CALLS:
        if all(text in template for text in texts):
            return name
    return NONE


def _found_thought(template: str) -> str:
    return next((name for name, text in _TEMPLATES_OF_THOUGHTS if text in template), NONE)
