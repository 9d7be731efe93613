"""Chat templates: Jinja as transformers renders them, so that any model's own template works unchanged.

Environment, filters and globals, the treatment of None, of reasoning fields and of an open last message follow
`apply_chat_template` of transformers 5; tests compare the two. Templates come with the model and are as trusted as its
tokenizer.json; what users send reaches them as plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import read_chat_templates, read_json_object
from radixmesh.daemons.runtime.tokenize.chat import Chat, JsonObject, invalid_chat
from radixmesh.daemons.runtime.tokenize.template_budget import CountingEnvironment, OverBudgetError, RenderBudget

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names under which a message's reasoning is passed; the first is what templates read, gpt-oss's read the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# CPU seconds of one rendering: 4,096 messages take about 0.05.
MAX_RENDER_S = 2.0
# Put behind the message that stays open, and cut off with all that the template adds after it.
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """Renders chats. Thread-safe: nothing changes after construction.

    sources: templates by name; "default", and "tool_use" instead of it where there are tools and such a template.
    special_tokens: bos_token and the like, which templates read by name.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = self._environment = _new_environment()
        self.source = sources.get("tool_use") or sources.get("default") or next(iter(sources.values()), "")
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            message = f"the model's chat template is no Jinja ({error}): repair it in the model's folder"
            raise MeshError(ErrorReason.ERROR_REASON_BAD_CHECKPOINT, message, {"file": "chat_template"}) from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The templates of a model folder. Raises MeshError BAD_CHECKPOINT for a broken one."""
        return cls(read_chat_templates(folder), read_special_tokens(folder))

    @property
    def is_empty(self) -> bool:
        """The model has no template: it does not chat."""
        return not self._templates

    def render(self, chat: Chat, *, max_chars: int = 4 << 20, max_s: float = MAX_RENDER_S) -> str:
        """The text of the prompt, at most max_chars characters, made in max_s seconds of CPU.

        Raises MeshError INVALID_CHAT where chat and template do not fit, TOO_LARGE beyond those bounds.
        """
        name = self._name_for(chat)
        if not chat.messages:
            raise invalid_chat("send at least one message", "messages")
        messages = [_without_nones(message) for message in chat.messages]
        if chat.continue_final_message:
            if chat.add_generation_prompt:
                raise invalid_chat("continue_final_message excludes add_generation_prompt: leave one of them out")
            messages[-1] = _left_open(messages[-1])
        args = {**self._special_tokens, "documents": None, **chat.template_args}
        text = self._rendered(
            name,
            {
                "messages": [_with_reasoning(message) for message in messages],
                "tools": chat.tools,
                "add_generation_prompt": chat.add_generation_prompt,
                **args,
            },
            RenderBudget(max_chars, max_s),
        )
        return _cut_at_open_end(text, chat.messages[-1]) if chat.continue_final_message else text

    def _rendered(self, name: str, args: Mapping[str, object], budget: RenderBudget) -> str:
        self._environment.spend(budget)
        try:
            chunks, num_chars = [], 0
            for chunk in self._templates[name].generate(args):
                chunks.append(chunk)
                num_chars += len(chunk)
                budget.require(num_chars)
            text = "".join(chunks)
            text.encode()
        except OverBudgetError as error:
            message = f"the model's chat template cannot render this chat: {error}"
            raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"max": str(budget.max_chars)}) from error
        except Exception as error:  # A template may do anything with what it is given, arithmetic on text included.
            raise invalid_chat(f"the model's chat template refuses this chat: {error}") from error
        finally:
            self._environment.spend(None)
        return text

    def _name_for(self, chat: Chat) -> str:
        if self.is_empty:
            raise invalid_chat("this model has no chat template: send text or ids instead")
        if chat.tools is not None and "tool_use" in self._templates:
            return "tool_use"
        if "default" not in self._templates:
            raise invalid_chat(f"this model has no default chat template, only {sorted(self._templates)}")
        return "default"


def read_special_tokens(folder: Path) -> Mapping[str, str]:
    """The named special tokens (bos_token, ...) of tokenizer_config.json; special_tokens_map.json fills gaps."""
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        content = read_json_object(folder / file)
        for key in _SPECIAL_TOKEN_KEYS:
            value = content.get(key)
            spelled = value.get("content") if isinstance(value, dict) else value
            if isinstance(spelled, str):
                tokens[key] = spelled
    return tokens


def _new_environment() -> CountingEnvironment:
    environment = CountingEnvironment([_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = environment.counted_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %}: marks for training what the assistant wrote; here its body is all."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so.

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # Variables that the block sets are gone after it, as after a macro.
        return nodes.Scope(body, lineno=lineno)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _without_nones(message: JsonObject) -> JsonObject:
    # Templates handle a missing key; many print "None" for a null one.
    return {key: value for key, value in message.items() if value is not None}


def _with_reasoning(message: JsonObject) -> JsonObject:
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _left_open(message: JsonObject) -> JsonObject:
    content = message.get("content")
    if not isinstance(content, str):
        raise invalid_chat("continue_final_message needs content to continue in the last message")
    return {**message, "content": content + _OPEN_END}


def _cut_at_open_end(text: str, message: JsonObject) -> str:
    content = str(message["content"])
    mark = _OPEN_END.strip()
    if content.strip() not in text or mark not in text:
        raise invalid_chat("the model's chat template does not show the last message as it is: it cannot be continued")
    end = text.rindex(mark)
    # A template that trims contents has taken the mark's space, and would have taken the content's own.
    return text[:end] if text.startswith(_OPEN_END, end) else text[:end].rstrip()
