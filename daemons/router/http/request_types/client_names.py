"""The names of fields as HTTP clients know them: an error of the router's `logit_bias_ids` is one of `logit_bias`."""

from __future__ import annotations

from collections.abc import Mapping

from radixmesh.daemons.runtime.errors import MeshError

_OPENAI: Mapping[str, str] = {
    "logit_bias_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
    "stop_ids": "stop_token_ids",
    "stop.stop": "stop",
    "stop.ignore_eos": "ignore_eos",
    "num_top_logprobs": "logprobs",
    "sampling.logprobs": "logprobs",
    "grammar": "response_format",
    "prompt_ids": "prompt",
    "input": "prompt",
    "text": "prompt",
}
_CHAT: Mapping[str, str] = {
    **_OPENAI,
    "num_top_logprobs": "top_logprobs",
    "extra_json": "messages",
    "tools_json": "tools",
    "template_args_json": "chat_template_kwargs",
    **dict.fromkeys(("prompt_ids", "input", "text", "chat"), "messages"),
}
_CONSTRAINTS = ("grammar", "response_format")
_MESSAGES: Mapping[str, str] = {
    **_CHAT,
    **dict.fromkeys(("stop", "stop.stop"), "stop_sequences"),
    **dict.fromkeys(_CONSTRAINTS, "output_config"),
    **dict.fromkeys(("template_args_json", "chat_template_kwargs"), "thinking"),
    "reasoning_effort": "output_config.effort",
}
_RESPONSES: Mapping[str, str] = {
    **_CHAT,
    **dict.fromkeys(("messages", "prompt_ids", "input", "text", "chat", "extra_json"), "input"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    **dict.fromkeys(_CONSTRAINTS, "text.format"),
    "reasoning_effort": "reasoning.effort",
}
_OLLAMA_OPTIONS: Mapping[str, str] = {
    **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: f"options.{name}" for name in ("frequency_penalty", "presence_penalty")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "options.num_predict"),
    "repetition_penalty": "options.repeat_penalty",
    "stop.stop": "options.stop",
    **dict.fromkeys(_CONSTRAINTS, "format"),
    **dict.fromkeys(("template_args_json", "chat_template_kwargs", "reasoning_effort"), "think"),
}
NATIVE_SAMPLING: Mapping[str, str] = {
    name: f"sampling_params.{own}"
    for name, own in {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "logit_bias_ids": "logit_bias",
        "logit_bias_values": "logit_bias",
        "stop_ids": "stop_token_ids",
        "stop.stop": "stop",
        "stop.ignore_eos": "ignore_eos",
        "n": "n",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "frequency_penalty": "frequency_penalty",
        "presence_penalty": "presence_penalty",
        "repetition_penalty": "repetition_penalty",
        "logit_bias": "logit_bias",
        "stop": "stop",
        "stop_token_ids": "stop_token_ids",
    }.items()
}
_NATIVE: Mapping[str, str] = {
    "grammar": "sampling_params",
    **NATIVE_SAMPLING,
    "num_top_logprobs": "top_logprobs_num",
    "sampling.logprobs": "return_logprob",
    "prompt_ids": "input_ids",
    "input": "text",
    "request_id": "rid",
}
_BY_PATH: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": _OPENAI,
    "/v1/chat/completions": _CHAT,
    "/v1/embeddings": dict.fromkeys(("prompt_ids", "text", "input"), "input"),
    **dict.fromkeys(("/classify", "/v1/classify"), dict.fromkeys(("prompt_ids", "text", "input"), "input")),
    "/v1/score": dict.fromkeys(("prompt_ids", "text", "input"), "items"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), dict.fromkeys(("prompt_ids", "text"), "documents")),
    "/generate": _NATIVE,
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), _MESSAGES),
    "/v1/responses": _RESPONSES,
    "/api/chat": {**_CHAT, **_OLLAMA_OPTIONS},
    "/api/generate": {
        **_CHAT,
        **_OLLAMA_OPTIONS,
        **dict.fromkeys(("messages", "prompt_ids", "text", "chat"), "prompt"),
    },
    "/tokenize": {**_CHAT, "text": "prompt"},
    "/detokenize": {"ids": "tokens", "prompt_ids": "tokens"},
}
# The input, where an error of it names no field.
_INPUTS: Mapping[str, str] = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens", "/api/chat"), "messages"),
    "/v1/responses": "input",
    "/api/generate": "prompt",
    "/v1/embeddings": "input",
    "/classify": "input",
    "/v1/classify": "input",
    "/v1/score": "items",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "documents"),
    "/generate": "text",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}
# The path is the task: what another model would do is the model's to be named.
_TASKS: Mapping[str, str] = {"task embed": "embeddings", "task score": "scores"}
_ABOUT_INPUT = frozenset(("PROMPT_TOO_LONG", "EMPTY_PROMPT", "INVALID_CHAT"))


def names_of(path: str) -> Mapping[str, str]:
    """The client's names by the router's, where they differ on this path."""
    return _BY_PATH.get(path, {})


def as_sent(error: MeshError, path: str) -> MeshError:
    """The error of a request at this path, its field named as the client does."""
    if "field" not in error.metadata and error.reason_name in _ABOUT_INPUT and path in _INPUTS:
        metadata = {**error.metadata, "field": _INPUTS[path]}
        return MeshError(error.reason, error.message, metadata)
    if made := _TASKS.get(error.metadata.get("feature", "")):
        message = f"the model makes no {made}: name one that does (docs/models.md)"
        return type(error)(error.reason, message, {**error.metadata, "field": "model"})
    return renamed(error, names_of(path))


def renamed(error: MeshError, names: Mapping[str, str]) -> MeshError:
    """The error with its field's name changed, in its message too."""
    given = error.metadata.get("field", error.metadata.get("feature", ""))
    inner = given.partition(" ")[0]
    name = names.get(inner, inner)
    if not inner or (name == inner and error.metadata.get("field") == inner):
        return error
    # "grammar" is a word of messages, too.
    is_word = inner in ("grammar", name)
    message = error.message if is_word else error.message.replace(inner, name, 1)
    metadata = {**error.metadata, "field": name}
    if "feature" in metadata:
        metadata["feature"] = name
    return type(error)(error.reason, message, metadata)
