"""JSON schemas as a grammar can follow them: what it could not enforce is refused by name, never dropped.

The library compiles such schemas too and leaves the keyword out; the answer would not validate. What is refused here
was found by giving xgrammar 0.2.8 each keyword with a text that breaks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from radixmesh.daemons.runtime.guided.json_objects import closed_object
from radixmesh.daemons.runtime.guided.json_patterns import json_pattern
from radixmesh.daemons.runtime.guided.source import MAX_SOURCE_BYTES, invalid_grammar

# Keywords that no grammar of the library's expresses.
_UNSUPPORTED = frozenset(
    ("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas")
) | frozenset(("dependencies", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"))
_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$schema",
        "$id",
        "id",
        "$comment",
        "$defs",
        "definitions",
    )
) | frozenset(
    ("deprecated", "readOnly", "writeOnly", "format", "contentEncoding", "contentMediaType", "strict", "name")
)
# Of a string as JSON writes it, without escapes: all but quotes, backslashes and control characters.
_PLAIN_CHARACTER = "[ !#-\\[\\]-\U0010ffff]"
# Keywords that count for one type only; without a type beside them the library takes any value.
_TYPED: Mapping[str, str] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
}
_CHOOSERS = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int, float), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip
Schema = dict[str, object]


def followable(text: str) -> str:
    """The schema (JSON text) with what it requires spelt out. Raises INVALID_GRAMMAR naming what cannot be followed."""
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise invalid_grammar("the json_schema is neither an object nor true: send a JSON schema", "")
        if isinstance(schema, dict):
            _Walk(schema).run()
        return json.dumps(schema)
    except RecursionError:
        raise invalid_grammar("the json_schema is nested too deeply: flatten it", "depth") from None
    except ValueError as error:
        raise invalid_grammar(f"the json_schema is no JSON ({error})", "") from error


class _Walk:
    """All subschemas that the root leads to."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._seen: set[int] = set()
        self._has_copies = False

    def run(self) -> None:
        waiting: list[tuple[str, object]] = [("#", self._root)]
        while waiting:
            path, schema = waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self._seen:
                self._seen.add(id(schema))
                self._check(path, schema)
                waiting.extend(self._inner(path, schema))
        # A schema of a few KB may say a schema for each name, each of which says one for each name, and so on.
        if self._has_copies and _num_bytes(self._root, {}) > MAX_SOURCE_BYTES:
            text = (
                f"the json_schema has over {MAX_SOURCE_BYTES} bytes once each required name is described: simplify it"
            )
            raise invalid_grammar(text, "source_bytes")

    def _check(self, path: str, schema: Schema) -> None:
        for keyword in schema:
            is_off = keyword == "unevaluatedProperties" and schema[keyword] is True
            if keyword in _UNSUPPORTED and not is_off:
                raise _refused(path, keyword)
        if schema.get("uniqueItems"):
            raise _refused(path, "uniqueItems")
        _check_choosers(path, schema)
        if "type" not in schema and not any(name in schema for name in _CHOOSERS):
            for keyword, kind in _TYPED.items():
                if keyword in schema and not (kind == "string" and path.endswith("/propertyNames")):
                    raise _refused(path, keyword, f"without a type: add 'type': '{kind}'")
        if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
            raise _refused(path, "minLength" if "minLength" in schema else "maxLength", "beside a pattern")
        if _require_named(path, schema):
            self._has_copies = True
        if "pattern" in schema:
            schema["pattern"] = _pattern(path, schema["pattern"])
        _bound_by_pattern(schema)
        try:
            closed_object(schema)
        except ValueError as error:
            keyword, _, why = str(error).partition(" ")
            raise _refused(path, keyword, why) from error

    def _inner(self, path: str, schema: Schema) -> Iterator[tuple[str, object]]:
        for keyword in ("properties", "patternProperties"):
            named = schema.get(keyword)
            if isinstance(named, dict):
                yield from ((_below(path, keyword, name), inner) for name, inner in named.items())
        for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            listed = schema.get(keyword)
            if isinstance(listed, list):
                yield from ((_below(path, keyword, str(number)), inner) for number, inner in enumerate(listed))
        for keyword in ("items", "additionalProperties", "unevaluatedItems", "propertyNames"):
            yield _below(path, keyword), schema.get(keyword)
        if "$ref" in schema:
            yield str(schema["$ref"])[:120], self._target(path, schema["$ref"])

    def _target(self, path: str, reference: object) -> object:
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            raise _refused(path, "$ref", f"to {str(reference)[:60]!r}: only '#/...' of the same schema")
        found: object = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise _refused(path, "$ref", f"to {reference[:60]!r}, which is not there")
        return found


def _check_choosers(path: str, schema: Schema) -> None:
    """anyOf, $ref and the like stand for the whole schema: the library does not look at what is beside them."""
    given = [name for name in _CHOOSERS if name in schema]
    if not given:
        return
    if not isinstance(schema.get("enum", []), list):
        raise _refused(path, "enum", "that is no list")
    chooser = given[0]
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    beside = set(schema) - _ANNOTATIONS - {chooser, "type", "nullable"}
    is_listed = values is not None and chooser in ("enum", "const")
    if beside:
        raise _refused(path, sorted(beside)[0], f"beside {chooser}")
    if "type" in schema:
        kinds = set(map(str, schema["type"] if isinstance(schema["type"], list) else [schema["type"]]))
        if not is_listed:
            raise _refused(path, "type", f"beside {chooser}: move it into each branch")
        assert isinstance(values, list)
        if not all(any(_is_of(value, kind) for kind in kinds) for value in values):
            raise _refused(path, chooser, "with values of another type than 'type' says")
    if chooser == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        raise _refused(path, "allOf", "of several schemas: merge them")


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def _require_named(path: str, schema: Schema) -> bool:
    """Names that are required and not described get the schema of additional properties: the library drops them.

    Returns whether there were any.
    """
    required = schema.get("required")
    if required is None:
        return False
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(path, "required", "that is no list of names")
    properties = schema.setdefault("properties", {})
    if not isinstance(properties, dict):
        raise _refused(path, "properties", "that is no object")
    schema.setdefault("type", "object")
    missing = [name for name in required if name not in properties]
    for name in missing:
        others = schema.get("additionalProperties", True)
        if others is False or "patternProperties" in schema or "propertyNames" in schema:
            raise _refused(path, "required", f"of {str(name)[:60]!r}, which 'properties' does not describe")
        properties[name] = others
    return bool(missing)


def _pattern(path: str, pattern: object) -> str:
    if not isinstance(pattern, str):
        raise _refused(path, "pattern", "that is no text")
    try:
        return json_pattern(pattern)
    except ValueError as error:
        raise _refused(path, "pattern", f"with {error}") from error


def _below(path: str, *parts: str) -> str:
    """Bounded: paths of many schemas below a long name would take more memory than all of the text."""
    return "/".join((path[:120], *(part[:60] for part in parts)))


def _num_bytes(value: object, known: dict[int, int]) -> int:
    """Of a value as JSON, about; `known`: of parts, by id, since the same one may stand in many places."""
    found = known.get(id(value))
    if found is not None:
        return found
    found = 2
    if isinstance(value, dict):
        for name, inner in value.items():
            found += len(name) + 4 + _num_bytes(inner, known)
    elif isinstance(value, list):
        for inner in value:
            found += 2 + _num_bytes(inner, known)
    else:
        return found + len(str(value))
    known[id(value)] = found
    return found


def _bound_by_pattern(schema: Schema) -> None:
    """Lengths of a string as a pattern: the library's own form of them lets control characters into the string."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    is_given = "minLength" in schema or "maxLength" in schema
    if is_given and type(least) is int and (most == "" or type(most) is int):
        schema.pop("minLength", None)
        schema.pop("maxLength", None)
        schema["pattern"] = f"^{_PLAIN_CHARACTER}{{{least},{most}}}$"


def _refused(path: str, keyword: str, why: str = "") -> Exception:
    where = "" if path == "#" else f" at {path}"
    detail = f" {why}" if why else ""
    text = f"the json_schema has {keyword!r}{where}{detail}, which a grammar cannot follow: leave it out"
    return invalid_grammar(text, "keyword")
