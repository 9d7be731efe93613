"""Bodies with a value of the wrong shape at each of their places: every one is taken, or refused with a typed error."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hostile.http_bodies import BASES, ROUTES, bodies

from radixmesh.daemons.router.http.bodies.body import parse_whole
from radixmesh.daemons.router.http.bodies.field_decoders import decoders_of
from radixmesh.daemons.router.http.errors import error_body
from radixmesh.daemons.router.http.openapi import description
from radixmesh.daemons.runtime.errors import MeshError

Place = tuple[str | int, ...]
_SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
_TEXT = {"type": "text", "text": "x"}
_ANTHROPIC: dict[str, Any] = {
    "messages": [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                {**_TEXT, "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [_TEXT]}]},
    ],
    "system": [_TEXT],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA, "type": "custom", "strict": None}],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
}
_RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x", "annotations": []}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "instructions": "s",
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
    "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
    "tool_choice": "none",
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"team": "a"},
    "include": ["reasoning.encrypted_content"],
}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
_OLLAMA: dict[str, Any] = {"model": "m", "format": _SCHEMA, "options": {"num_predict": 3, "stop": ["a"]}, "think": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [_TEXT]}, {"role": "assistant", "tool_calls": [_CALL]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "/v1/messages": {**_ANTHROPIC, "max_tokens": 3, "stop_sequences": ["a"]},
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/responses": _RESPONSES,
    "/api/chat": {**_OLLAMA, "messages": [{"role": "assistant", "content": "x", "tool_calls": [_CALL]}]},
    "/api/generate": {**_OLLAMA, "prompt": "x", "system": "s"},
    "/api/show": {"model": "m", "name": "n"},
}
WRONG: list[object] = [None, True, -1, 1.5, 10**30, "", "x", "\ud800", [], {}, [[]], [{}], {"type": []}, {"x": None}]


def places(value: object, here: Place = ()) -> Iterator[Place]:
    yield here
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*here, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from places(inner, (*here, place))


def changed(body: dict[str, Any], place: Place, value: object) -> Any:
    if not place:
        return value
    made: Any = copy.deepcopy(body)
    at = made
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    return made


def refusal(path: str, body: object) -> MeshError | None:
    try:
        parse_whole(json.dumps(body).encode(), ROUTES[path], {})
    except MeshError as error:
        return error
    return None


# Grammars of these are read by the tokenizer, which refuses what is none.
_FOR_THE_TOKENIZER = ("json_schema", "guided_json", "structural_tag")
# Of what a client reads last: an imperative.
_ADVICE = re.compile(r"\b(send|choose|leave|write|use|set|name) ")


@pytest.mark.parametrize("path", ROUTES)
def test_a_wrong_value_is_named_and_the_message_says_what_to_send(path: str) -> None:
    """By fields, as a client that has mixed something up sends them; none of the decoder's own words."""
    tried = [(field, {**BASES[path], field: value}) for field in decoders_of(ROUTES[path]) for value in WRONG]
    refused = 0
    for field, body in tried:
        error = refusal(path, body)
        if error is None or error.reason_name == "MALFORMED_MESSAGE":
            continue
        refused += 1
        message = error_body(error, path)["error"]
        message = message["message"] if isinstance(message, dict) else message
        assert _ADVICE.search(message) and "Expected" not in message, (field, message)
        assert "$" not in message and error.metadata.get("field"), (field, message)
    assert refused > 8 * (len(decoders_of(ROUTES[path])) - 1)


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [
        ("/v1/completions", "max_tokens", "5", "max_tokens is a text: send a whole number"),
        ("/v1/completions", "max_tokens", -1, "max_tokens is below 0: send a whole number from there on"),
        ("/v1/completions", "n", 10**12, "n is too large: send at most 4294967295"),
        ("/v1/completions", "stop", ["a", 1], "stop.1 is a number: send a text"),
        ("/v1/completions", "stream", "yes", "stream is a text: send true or false"),
        ("/v1/completions", "model", "m" * 300, "model is too long: send at most 256 characters"),
        ("/v1/chat/completions", "messages", "Hi", "messages is a text: send a list"),
        ("/v1/score", "label_token_ids", [1] * 65, "label_token_ids is too long: send at most 64 entries"),
        ("/v1/embeddings", "encoding_format", "x", "encoding_format is none of its values: send float or base64"),
    ],
)
def test_a_wrong_type_is_told_in_plain_words(path: str, field: str, value: object, message: str) -> None:
    error = refusal(path, {**BASES[path], field: value})
    assert error is not None and (error.message, error.metadata["field"]) == (message, field)


@pytest.mark.parametrize("path", BODIES)
def test_wrong_shapes_are_refused_with_a_typed_error(path: str) -> None:
    refused = 0
    for place in places(BODIES[path]):
        for value in WRONG:
            error = refusal(path, changed(BODIES[path], place, value))
            refused += error is not None and error.reason_name != "INTERNAL"
    assert refused > 10


@pytest.mark.parametrize(("path", "field"), [("/v1/messages/count_tokens", "messages"), ("/v1/responses", "input")])
def test_a_wrong_part_is_named_by_its_place(path: str, field: str) -> None:
    at = f"{field}.0.content.1"
    for part, where in (({"type": "text"}, f"{at}.text"), ({"type": "audio"}, at)):
        error = refusal(path, {field: [{"role": "user", "content": [_TEXT, part]}]})
        assert error is not None and error.metadata["field"] == where, error


@pytest.mark.parametrize("path", ROUTES)
def test_openapi_describes_every_field_and_nothing_narrower_than_what_is_taken(path: str) -> None:
    kind = ROUTES[path]
    schema = description()["components"]["schemas"][kind.__name__]  # type: ignore[index]
    assert all(schema["properties"].values()), [name for name, form in schema["properties"].items() if not form]
    takes = jsonschema.Draft202012Validator(schema)
    legal = [json.loads(body.data) for body in bodies(1) if body.path == path and not body.code]
    # Values that ask for nothing are taken whatever the field.
    asking = [value for value in WRONG if value not in (None, "", [], {})]
    fields = [field for field in decoders_of(kind) if field not in _FOR_THE_TOKENIZER]
    tried = [{**BASES[path], field: value} for field in fields for value in asking]
    if path == "/tokenize":
        # Beside a prompt, fields of chats are named as ignored, and not read.
        tried = [{"messages": [{"role": "user", "content": "x"}], **body} for body in tried if body.pop("prompt")]
    legal = [body for body in legal if all(value not in ("", [], {}) for value in body.values())]
    taken = [*legal, BASES[path], *(body for body in tried if refusal(path, body) is None)]
    for body in taken:
        assert takes.is_valid(body), (body, next(takes.iter_errors(body)).message)
    mistyped = [{**BASES[path], field: [[[1.5]]]} for field in decoders_of(kind)]
    assert not any(takes.is_valid(body) for body in mistyped)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/score", {"query": "x", "items": ["x"], "text_2": "y"}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": "y", "item_first": True}, "text_1"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(path: str, body: dict[str, Any], field: str) -> None:
    error = refusal(path, body)
    assert error is not None and error.metadata["field"] == field


def test_fields_of_chats_are_named_as_ignored_beside_a_prompt() -> None:
    body = {"prompt": "x", "tools": [], "add_generation_prompt": True}
    parsed = parse_whole(json.dumps(body).encode(), ROUTES["/tokenize"], {})
    assert tuple(parsed.body.ignored) == ("tools", "add_generation_prompt")
