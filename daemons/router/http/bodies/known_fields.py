"""Fields that are not served: those that change nothing are ignored and named, all others are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import msgspec

from radixmesh.daemons.router.http.bodies.field_decoders import shown
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

# No text of an answer depends on these: accounting, caches, logs, hints of speed.
HARMLESS = frozenset(
    (
        *(
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_retention",
        ),
        *(
            "prediction",
            "kv_transfer_params",
            "keep_alive",
            "log_metrics",
            "no_logs",
            "custom_labels",
            "stream_interval",
        ),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "conversation_id", "background"),
        # Reasoning is always streamed where answers are.
        *("stream_reasoning",),
        # Of stream_options: usage comes at the end alone; obfuscation pads events.
        *("continuous_usage_stats", "include_obfuscation"),
        *("cache_control",),
        # Of Ollama's options: memory and threads of its own runner. Contexts here are as long as the model's.
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram"),
        *("use_mmap", "use_mlock", "vocab_only", "f16_kv", "draft_num_predict"),
        # Ids beside the text are left out; the text is the same.
        *("return_token_ids",),
        # The library that follows a constraint: whichever it is, the answer keeps to it.
        *("guided_decoding_backend",),
    )
)
# Constraints on an answer: without them it would be another one.
CONSTRAINTS = frozenset(
    (
        *("response_format", "regex", "json_schema", "ebnf", "grammar", "structural_tag", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_whitespace_pattern", "guided_json_object", "tool_choice", "function_call", "stop_regex", "choice"),
    )
)
# Known elsewhere, and not offered here.
UNSUPPORTED = frozenset(
    (
        *(
            "chat_template",
            "lora_path",
            "use_beam_search",
            "prompt_logprobs",
            "suffix",
            "length_penalty",
            "early_stopping",
        ),
        *(
            "logits_processors",
            "custom_logit_processor",
            "custom_params",
            "bad_words",
            "allowed_token_ids",
            "documents",
        ),
        *(
            "truncate_prompt_tokens",
            "truncation",
            "functions",
            "modalities",
            "audio",
            "web_search_options",
            "verbosity",
        ),
        *("image_data", "video_data", "audio_data", "input_embeds", "prompt_embeds", "session_params"),
        *("return_hidden_states", "return_tokens_as_token_ids", "token_ids_logprob", "vllm_xargs"),
        *("spaces_between_special_tokens", "mm_processor_kwargs", "typical_p", "best_of", "add_special_tokens", "echo"),
        *("parallel_tool_calls", "thinking", "beam_width", "num_beams"),
        *("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "repeat_last_n", "penalize_newline"),
        *("images", "template", "context", "conversation", "max_tool_calls", "mcp_servers", "container"),
        *("context_management", "inference_geo", "stop_reason"),
    )
)
# Values that ask for nothing: a field's default elsewhere. Null, false, "", [] and {} ask for nothing anywhere.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "length_penalty": (0, 1),
    "typical_p": (1,),
    "beam_width": (1,),
    "num_beams": (1,),
    "mirostat": (0,),
    "tfs_z": (1,),
    "repeat_last_n": (-1,),
    "truncate_prompt_tokens": (-1,),
}
_EMPTY: tuple[object, ...] = (None, False, "", [], {})
# Of these false is what asks for something.
_ON_BY_DEFAULT = frozenset(
    ("parallel_tool_calls", "penalize_newline", "spaces_between_special_tokens", "add_special_tokens")
)
# Longer than any of them.
_MAX_NEUTRAL_BYTES = 64
_MAX_ALIKE_CHARS = 40


def judge(name: str, raw: Bytes, known: Iterable[str], where: str = "") -> bool:
    """True for a field that is ignored and to be named as such, False for one that asks for nothing.

    known: the fields that are served beside it. where: what it is a field of, "" = the body. Raises UNSUPPORTED, with
    the field's name, for one whose absence would change the answer.
    """
    if name in HARMLESS:
        return True
    is_known = name in CONSTRAINTS or name in UNSUPPORTED
    if _asks_for_nothing(name, raw):
        return not is_known
    field = f"{where}.{name}" if where else name
    raise unsupported(field if is_known else _shortened(field), _advice(name, is_known, known))


def unsupported(feature: str, message: str) -> MeshError:
    """An option that is known and not offered."""
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": feature, "field": feature})


def _asks_for_nothing(name: str, raw: Bytes) -> bool:
    if len(raw) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if name in _ON_BY_DEFAULT:
        return value is None or value is True
    # By type too: 0 == False in Python, and may well ask for something.
    is_empty = any(type(value) is type(empty) and value == empty for empty in _EMPTY)
    return is_empty or (not isinstance(value, bool) and value in _NEUTRAL.get(name, ()))


def _advice(name: str, is_known: bool, known: Iterable[str]) -> str:
    if name in CONSTRAINTS:
        return f"{name} is not offered yet, and without it the answer would not keep to it: leave it out"
    if is_known:
        return f"{name} is not offered: leave it out"
    alike = difflib.get_close_matches(name, list(known), 1) if len(name) <= _MAX_ALIKE_CHARS else []
    hint = f"did you mean {alike[0]}?" if alike else "leave it out; docs/http.md lists what is served"
    return f"no field of the name {shown(name)} is served here: {hint}"


def _shortened(field: str) -> str:
    return field if len(field) <= 2 * _MAX_ALIKE_CHARS else field[: 2 * _MAX_ALIKE_CHARS]
