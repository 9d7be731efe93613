"""Schemas that a grammar cannot follow are refused by name; of those it follows, every text validates."""

from __future__ import annotations

import json

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.json_schemas import followable

AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}


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
        {"$ref": "#/definitions/node", "definitions": {"node": {"type": "object", "properties": {
            "next": {"anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]}}}}},
        {"type": "integer", "enum": [1, 2.0]},
        {"type": "object", "propertyNames": {"pattern": "^a+$"}},
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


def test_depth_and_broken_text_are_typed() -> None:
    for text in ("[" * 5000, '{"items":' * 4000 + "{}" + "}" * 4000, "{", "3"):
        with pytest.raises(MeshError) as caught:
            followable(text)
        assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR
