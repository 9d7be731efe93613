"""A chat as it came over the wire, its JSON parts read and checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

JsonObject = Mapping[str, object]

# Of all JSON of one chat: a value takes up to 100 bytes of memory for the two or three that it is written in.
MAX_JSON_VALUES = 100_000
MAX_JSON_CHARS = 4 << 20
# Most that any tokenizer takes, whatever its --max-messages.
MAX_MESSAGES = 1 << 14

# Names that the renderer itself hands to templates.
_RESERVED_ARGS = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """messages: role, content and what else a template reads. tools: None = none, which templates tell from []."""

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] | None = None
    template_args: JsonObject = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def read_message(role: str, content: str, extra_json: str) -> JsonObject:
    """One message. Raises MeshError INVALID_CHAT for an extra_json that is no object or repeats role or content."""
    extra = read_object(extra_json, "extra_json")
    for key in ("role", "content"):
        if key in extra:
            raise invalid_chat(f"extra_json repeats {key!r}: send it in the field of that name only", "extra_json")
    return {"role": role, "content": content, **extra}


def read_object(text: str, name: str) -> JsonObject:
    """A JSON object; empty text is {}. Raises MeshError INVALID_CHAT, naming the field."""
    value = _read_json(text, name) if text else {}
    if not isinstance(value, dict):
        raise invalid_chat(f"{name} has to be a JSON object", name)
    return value


def read_template_args(text: str) -> JsonObject:
    """Raises MeshError INVALID_CHAT for what is no object, or for arguments that the request sets elsewhere."""
    args = read_object(text, "template_args_json")
    for key in _RESERVED_ARGS:
        if key in args:
            raise invalid_chat(f"template_args_json holds {key!r}, which has a field of its own", "template_args_json")
    return args


def read_tools(text: str) -> Sequence[JsonObject] | None:
    """An array of objects; empty text is None. Raises MeshError INVALID_CHAT."""
    if not text:
        return None
    value = _read_json(text, "tools_json")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise invalid_chat("tools_json has to be a JSON array of objects", "tools_json")
    return value


def invalid_chat(message: str, field_name: str | None = None) -> MeshError:
    metadata = {} if field_name is None else {"field": field_name}
    return MeshError(ErrorReason.ERROR_REASON_INVALID_CHAT, message, metadata)


def check_chat_size(num_messages: int, json_texts: Iterable[str]) -> None:
    """Looks at a chat before objects are made of it. Raises MeshError TOO_LARGE."""
    if num_messages > MAX_MESSAGES:
        _refuse(f"a chat of {num_messages} messages", num_messages, MAX_MESSAGES)
    num_chars = num_values = 0
    for text in json_texts:
        num_chars += len(text)
        # Every value but the first of its array or object stands behind a comma. Those inside strings count too.
        num_values += text.count(",") + text.count("[") + text.count("{")
    if num_chars > MAX_JSON_CHARS:
        _refuse(f"a chat with {num_chars} characters of JSON", num_chars, MAX_JSON_CHARS)
    if num_values > MAX_JSON_VALUES:
        _refuse(f"a chat whose JSON has {num_values} commas and brackets", num_values, MAX_JSON_VALUES)


def _refuse(what: str, size: int, limit: int) -> NoReturn:
    message = f"{what} is more than the {limit} that a tokenizer takes: send less"
    raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"size": str(size), "max": str(limit)})


def _read_json(text: str, name: str) -> object:
    try:
        value: object = json.loads(text)
        # JSON may spell half of a surrogate pair, which no UTF-8 text can hold.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise invalid_chat(f"{name} holds a lone surrogate: send whole characters", name) from error
    except (ValueError, RecursionError) as error:
        raise invalid_chat(f"{name} is no JSON ({error})", name) from error
    return value
