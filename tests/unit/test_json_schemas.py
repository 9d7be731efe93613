"""Schemas that a grammar cannot follow are refused by name; of those it follows, every text validates."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.json_patterns import other_names
from radixmesh.daemons.runtime.guided.json_schemas import followable
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource

BYTES = GuidedVocabulary([bytes([byte]) for byte in range(256)] + [b""], (256,), 257)
AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}


@cache
def backend() -> GrammarBackend:
    pytest.importorskip("xgrammar")
    return load_backend("xgrammar", BYTES)


def matchers(schema: object, *, as_it_is: bool = False) -> Callable[[str], bool]:
    """Tells texts that a schema's grammar takes. as_it_is: the library's own grammar, nothing refused or spelt out."""
    with pytest.MonkeyPatch.context() as patch:
        if as_it_is:
            patch.setattr("radixmesh.daemons.runtime.guided.xgrammar_backend.followable", lambda text: text)
        grammar = backend().load(backend().compile(GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps(schema))))

    def is_taken(text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(256)

    return is_taken


def takes(schema: object, text: str) -> bool:
    return matchers(schema)(text)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"type": "string"}}),
        ("if", {"type": "object", "properties": AB, "if": {"required": ["a"]}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("contains", {"type": "array", "contains": {"const": 5}}),
        ("dependentRequired", {"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}}),
        ("unevaluatedProperties", {"type": "object", "properties": AB, "unevaluatedProperties": False}),
        ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 5}]}),
        ("properties", {"properties": AB, "anyOf": [{"required": ["a"]}]}),
        ("type", {"type": "integer", "anyOf": [{"minimum": 5, "type": "integer"}]}),
        ("minimum", {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 5}),
        ("minimum", {"minimum": 5}),
        ("enum", {"type": "string", "enum": ["a", 1]}),
        ("const", {"type": "integer", "const": True}),
        ("minLength", {"enum": ["a", "abc"], "minLength": 2}),
        ("minLength", {"type": "string", "pattern": "^a+$", "minLength": 3}),
        ("$ref", {"$ref": "http://example.com/x.json"}),
        ("$ref", {"$ref": "#/$defs/absent"}),
        ("required", {"type": "object", "properties": AB, "required": ["c"], "additionalProperties": False}),
        ("required", {"type": "object", "properties": {"a": {"required": True}}}),
        ("pattern", {"type": "string", "pattern": "a$b"}),
        ("pattern", {"type": "string", "pattern": "(a$)+"}),
        ("pattern", {"type": "string", "pattern": "^(?!a)b"}),
        ("pattern", {"type": "string", "pattern": "^[^]$"}),
        ("pattern", {"type": "string", "pattern": '^["\\\\]$'}),
        ("pattern", {"type": "string", "pattern": "^[\\x22\\n]$"}),
        ("pattern", {"type": "string", "pattern": "\\bword"}),
        ("propertyNames", {"type": "object", "properties": AB, "propertyNames": {"pattern": "^[a-z]$"}}),
        ("patternProperties", {"type": "object", "properties": AB, "patternProperties": {"^[a-z]$": {}}}),
        ("patternProperties", {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {}}}),
        ("minProperties", {"type": "object", "minProperties": 2}),
    ],
)
def test_a_keyword_that_would_be_dropped_is_refused_by_name(keyword: str, schema: dict[str, object]) -> None:
    for nested in (schema, {"type": "object", "properties": {"x": {"type": "array", "items": schema}}}):
        if "$ref" in schema and nested is not schema:
            nested = {**nested, "$defs": schema.get("$defs", {})}
        with pytest.raises(MeshError) as caught:
            followable(json.dumps(nested))
        assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR
        assert f"'{keyword}'" in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Name"},
        {"allOf": [{"$ref": "#/$defs/x"}], "title": "X", "$defs": {"x": {"type": "integer", "minimum": 3}}},
        {"$ref": "#/definitions/node", "definitions": {"node": {"type": "object", "additionalProperties": False,
            "properties": {"next": {"anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]}}}}},
        {"type": "integer", "enum": [1, 2.0]},
        {"type": "object", "propertyNames": {"pattern": "a+"}},
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
        {"type": "array", "uniqueItems": False, "prefixItems": [{"type": "integer"}], "items": False},
        # Not reached from the root.
        {"type": "integer", "$defs": {"unused": {"not": {}}}},
    ],
)  # fmt: skip
def test_common_schemas_pass_as_they_are(schema: object) -> None:
    assert json.loads(followable(json.dumps(schema))) == schema


def test_required_names_that_nothing_describes_are_spelt_out() -> None:
    found = json.loads(followable('{"required": ["b"], "additionalProperties": {"type": "integer"}}'))
    assert found["properties"] == {"b": {"type": "integer"}} and found["type"] == "object"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ('^"$', '"'),
        (r"^\\$", "\\"),
        ("^\n$", "\n"),
        (r"^\n\x22$", '\n"'),
        (r"^\v$", "\v"),
        ('^(?<q>"+)$', '""'),
        ("^$|^a$", ""),
        ("^(a|b$)", "b"),
        (r"^[\[\]y]+$", "[y"),
        (r"^a\$$", "a$"),
        (r"^[^\s]$", "é"),
    ],
)
def test_a_pattern_is_one_of_the_strings_text_in_json(pattern: str, text: str) -> None:
    """The library put a pattern's quotes and line breaks into the text as they are: no JSON."""
    assert re.search(pattern.replace("?<", "?P<"), text)
    assert takes({"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=False))
    assert not takes({"type": "string", "pattern": pattern}, f'"{text}x"')


def test_a_name_in_escapes_is_no_other_name() -> None:
    schema = {"type": "object", "properties": AB}
    assert takes(schema, '{"a": 1, "z": "x", "c": null}')
    for text in ('{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"z": 1, "a": "x"}'):
        assert not takes(schema, text)
    assert takes({**schema, "patternProperties": {"^z": {"type": "null"}}}, '{"a": 1, "z": null}')
    assert not takes({**schema, "patternProperties": {"^z": {"type": "null"}}}, '{"a": 1, "z": 5}')


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from('abgrö\t"\\/ -]^'), min_size=1, max_size=6), min_size=1, max_size=6), st.data())
def test_other_names_are_all_but_these(names: list[str], data: st.DataObject) -> None:
    schema = {"type": "object", "patternProperties": {other_names(names): {}}, "additionalProperties": False}
    grammar = matchers(schema, as_it_is=True)
    near = data.draw(st.lists(st.text(st.sampled_from('abgrö\t"\\/ -]^'), max_size=7), max_size=20))
    for name in (*names, *(name[:-1] for name in names), *(f"{name}a" for name in names), *near):
        for text in (json.dumps({name: 1}), json.dumps({name: 1}, ensure_ascii=False)):
            is_taken = grammar(text)
            assert not (is_taken and name in names), text
            is_plain = name.isascii() and name.isprintable() and not {"\\", '"'} & set(name)
            assert is_taken or name in names or not name or not is_plain, text


def test_depth_and_broken_text_are_typed() -> None:
    for text in ("[" * 5000, '{"items":' * 4000 + "{}" + "}" * 4000, "{", "3"):
        with pytest.raises(MeshError) as caught:
            followable(text)
        assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR


def _nested(levels: int) -> object:
    """A schema whose required names each have another such schema."""
    inner = _nested(levels - 1) if levels else {"type": "integer"}
    return {"type": "object", "required": [f"name{number}" for number in range(200)], "additionalProperties": inner}


_MANY_NAMES = {f"{number:05d}": {} for number in range(6000)}
_CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a" * 40 + "!": {"type": "null"}}, "patternProperties": {"^(a+)+$": {"type": "integer"}}},
        {"properties": {"a" * 4000: {"type": "null"}}, "patternProperties": {"a*b": {"type": "integer"}}},
        {"properties": AB, "patternProperties": {"a{99999999999999999999}": {}}},
        {"type": "string", "pattern": "|".join(["^a"] * 10_000)},
        {"type": "string", "pattern": "|".join(["a$"] * 10_000)},
        {"type": "string", "pattern": "^" * 30_000},
        {"type": [*["null"] * 4000, "integer"], "enum": list(range(8000))},
        {**_CLOSED, "properties": {"a" * 50_000: {**_CLOSED, "properties": _MANY_NAMES}}},
        _nested(2),
        {"type": "object", "required": [["a"]]},
        {"type": "string", "enum": "abc"},
        {"type": "string", "enum": 5},
    ],
)
def test_a_schema_is_read_within_bounds(schema: object) -> None:
    """Routers read schemas of tools on their event loop: no pattern of a client is run where it may take long, and no
    schema becomes many times its size."""
    text = json.dumps(schema)
    tracemalloc.start()
    began_s = time.process_time()
    try:
        assert len(followable(text)) < 4 * len(text)
    except MeshError as error:
        assert error.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR
    finally:
        took_s = time.process_time() - began_s
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert took_s < 5.0 and peak_bytes < 64 << 20, (took_s, peak_bytes)


def test_names_that_a_pattern_cannot_match_may_be_described_beside_it() -> None:
    schema = {"type": "object", "properties": AB, "patternProperties": {"^x[_-]|_id$": {"type": "null"}}}
    assert '"^(' in followable(json.dumps(schema))


@pytest.mark.parametrize("kind", ["string", ["string", "null"]])
@pytest.mark.parametrize("bounds", [{"minLength": 2}, {"maxLength": 3}, {"minLength": 1, "maxLength": 3}])
def test_strings_of_bounded_length_have_no_control_characters(bounds: dict[str, int], kind: object) -> None:
    """The library's own form of lengths lets them through, and the answer is no JSON."""
    source = GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps({"type": kind, **bounds}))
    grammar = backend().load(backend().compile(source))
    least, most = bounds.get("minLength", 0), bounds.get("maxLength", 9)
    for text in ("", "a", "é", "ab", "日本", "abc", "😀 ~", "abcd"):
        matcher = grammar.matcher()
        taken = all(matcher.accept(byte) for byte in f'"{text}"'.encode()) and matcher.accept(256)
        assert taken == (least <= len(text) <= most), text
    for control in (0, 0x17, 0x0A, 0x1F):
        matcher = grammar.matcher()
        assert matcher.accept(ord('"')) and not matcher.accept(control)
