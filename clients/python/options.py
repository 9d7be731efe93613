"""The options of a request, and the message they become."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from radixmesh.client.errors import InvalidRequestError
from radixmesh.client.tools import NamedTool, Thought, Tool, ToolChoice, calls_tag, tools_json
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

Message = Mapping[str, object]
_MESSAGE_KEYS = ("role", "content")
_CONSTRAINTS = ("json_schema", "json_object", "regex", "ebnf", "choices", "structural_tag")
_CHAT_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "reasoning_effort", "template_args")


class Options(TypedDict, total=False):
    """Every option may be left out; the defaults are the contract's (common.proto). None means left out."""

    model: str  # Name; the first model if left out.
    n: int | None  # Outputs, 1 to 128.
    temperature: float | None  # 0 = greedy; default 1.
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None  # Chosen by the router if left out.
    logprobs: int | None  # Alternatives per output token; 0 = the token's own logprob only; left out = none.
    prompt_logprobs: bool
    prompt_logprobs_start: (
        int  # The first prompt position that is told, from 1; what is before may come from the cache.
    )
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    skip_special_tokens: bool | None
    json_schema: str | Mapping[str, object] | None  # The output follows it. Of this and the next five at most one.
    json_object: bool | None  # True: the output is JSON, any value.
    regex: str | None
    ebnf: str | None  # GBNF notation, with the root rule "root".
    choices: Sequence[str] | None  # The output is one of them.
    structural_tag: str | Mapping[str, object] | None  # xgrammar's: free text with constrained spans.
    thought: Thought | None  # Free text before what the constraint is about; left out = none.
    # Of chats alone. Calls that are required come as a JSON list, for tool_calls(); others as the model writes them.
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice | None  # "auto" if left out.
    parallel_tool_calls: bool | None  # Several required calls; True if left out.
    enable_thinking: bool | None  # These two are arguments of the model's template, as all of template_args is.
    reasoning_effort: str | None
    template_args: Mapping[str, object] | None
    ids_only: bool  # No text is made.
    cache_salt: str
    priority: int
    tenant: str
    session: str  # A conversation: by the policy "session" its requests go to one scheduler.
    deadline_s: float | None  # For the whole request, resumptions included.
    ttft_deadline_s: float | None  # For the first token of every output.
    request_id: str  # Made if left out.


def request_from(
    prompt: str | Sequence[int] | None, messages: Sequence[Message] | None, options: Options
) -> router_pb2.GenerateRequest:
    """The request without request_id and deadline. Raises InvalidRequestError for values that no message can hold."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise InvalidRequestError(f"no such option: {', '.join(sorted(unknown))}", "INVALID_ARGUMENT")
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("give either a prompt or messages", "MISSING_FIELD", {"field": "input"})
    try:
        request = router_pb2.GenerateRequest(
            model=options.get("model", ""),
            n=options.get("n"),
            sampling=_sampling_from(options),
            stop=_stop_from(options),
            ids_only=bool(options.get("ids_only")),
            cache_salt=options.get("cache_salt", ""),
            priority=options.get("priority", 0),
            tenant=options.get("tenant", ""),
            session=options.get("session", ""),
        )
        given = [name for name in _CHAT_OPTIONS if options.get(name) is not None]
        if given and messages is None:
            raise ValueError(f"{', '.join(given)} are for chats: send messages")
        if messages is not None:
            request.chat.CopyFrom(chat_from(messages))
            _set_template(request.chat, options)
        elif isinstance(prompt, str):
            request.text = prompt
        elif prompt is not None:
            request.prompt_ids = pack_ints(list(prompt))
        grammar = _grammar_from(options)
        if grammar is not None:
            request.grammar.CopyFrom(grammar)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"an option has a value that cannot be sent: {error}", "INVALID_ARGUMENT") from error
    return request


def chat_from(messages: Sequence[Message]) -> tokenizer_pb2.ChatInput:
    """Messages as dicts with role, content, and whatever else the model's template reads."""
    chat = tokenizer_pb2.ChatInput()
    for message in messages:
        extra = {key: value for key, value in message.items() if key not in _MESSAGE_KEYS}
        chat.messages.add(
            role=str(message.get("role", "")),
            content=str(message.get("content") or ""),
            extra_json=json.dumps(extra) if extra else "",
        )
    return chat


def _sampling_from(options: Options) -> common_pb2.SamplingParams:
    bias = options.get("logit_bias") or {}
    return common_pb2.SamplingParams(
        repetition_penalty=options.get("repetition_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        presence_penalty=options.get("presence_penalty"),
        logit_bias_ids=pack_ints(list(bias)),
        logit_bias_values=pack_floats(list(bias.values())),
        temperature=options.get("temperature"),
        top_k=options.get("top_k"),
        top_p=options.get("top_p"),
        min_p=options.get("min_p"),
        seed=options.get("seed"),
        num_top_logprobs=options.get("logprobs"),
        prompt_logprobs=bool(options.get("prompt_logprobs")),
        prompt_logprobs_start=options.get("prompt_logprobs_start", 0),
    )


def _set_template(chat: tokenizer_pb2.ChatInput, options: Options) -> None:
    tools, choice = options.get("tools") or (), options.get("tool_choice") or "auto"
    if tools and choice != "none":
        chat.tools_json = tools_json(tools)
    args = dict(options.get("template_args") or {})
    if options.get("enable_thinking") is not None:
        args["enable_thinking"] = options.get("enable_thinking")
    if options.get("reasoning_effort") is not None:
        args["reasoning_effort"] = options.get("reasoning_effort")
    if args:
        chat.template_args_json = json.dumps(args)


def _grammar_from(options: Options) -> common_pb2.Grammar | None:
    given = [name for name in _CONSTRAINTS if options.get(name) is not None and options.get(name) is not False]
    choice = options.get("tool_choice") or "auto"
    must_call = isinstance(choice, NamedTool) or choice == "required"
    if not must_call and choice not in ("auto", "none"):
        raise ValueError(f"tool_choice is {choice!r}: send auto, none, required or a NamedTool")
    if len(given) + must_call > 1:
        raise ValueError(f"of {', '.join(_CONSTRAINTS)} and a required call one at most can be followed")
    grammar: common_pb2.Grammar | None = None
    if must_call:
        is_parallel = options.get("parallel_tool_calls") is not False
        tag = calls_tag(options.get("tools") or (), choice, is_parallel=is_parallel)
        grammar = common_pb2.Grammar(structural_tag=tag)
    elif given:
        grammar = _grammar_of(given[0], options)
    thought = options.get("thought")
    if thought is not None:
        if grammar is None:
            raise ValueError("a thought comes before a constraint, and there is none")
        thought_of = common_pb2.Thought(begin=thought.begin, end=thought.end, is_always=thought.is_always)
        grammar.thought.CopyFrom(thought_of)
    return grammar


def _grammar_of(name: str, options: Options) -> common_pb2.Grammar:
    if name == "json_object":
        return common_pb2.Grammar(any_json=True)
    if name == "choices":
        return common_pb2.Grammar(ebnf=choice_grammar(options.get("choices") or ()))
    if name == "regex":
        return common_pb2.Grammar(regex=options.get("regex") or "")
    if name == "ebnf":
        return common_pb2.Grammar(ebnf=options.get("ebnf") or "")
    if name == "structural_tag":
        return common_pb2.Grammar(structural_tag=_json_text(options.get("structural_tag")))
    return common_pb2.Grammar(json_schema=_json_text(options.get("json_schema")))


def _json_text(value: str | Mapping[str, object] | None) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def choice_grammar(choices: Sequence[str]) -> str:
    """EBNF of a text that is one of these: what is not plain ASCII goes by its code."""
    if not choices or not all(choices):
        raise ValueError("choices need one text at least, and none that is empty")
    literals = (
        "".join(char if char.isalnum() and char.isascii() else f"\\U{ord(char):08X}" for char in choice)
        for choice in choices
    )
    return "root ::= " + " | ".join(f'"{literal}"' for literal in literals)


def _stop_from(options: Options) -> common_pb2.StopParams:
    stop = options.get("stop") or ()
    return common_pb2.StopParams(
        max_tokens=options.get("max_tokens"),
        min_tokens=options.get("min_tokens"),
        stop=[stop] if isinstance(stop, str) else stop,
        stop_ids=pack_ints(list(options.get("stop_ids") or ())),
        ignore_eos=bool(options.get("ignore_eos")),
        include_stop=bool(options.get("include_stop")),
        skip_special_tokens=options.get("skip_special_tokens") is not False,
    )
