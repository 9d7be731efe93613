"""Constraints on an answer under the names that OpenAI, vLLM and SGLang give them, as the router's one Grammar.

Schemas may be objects or JSON texts. A choice is an EBNF alternation, which needs no escaping of a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.http.bodies.field_decoders import (
    check_values,
    decode,
    invalid,
    list_of,
    read_fields,
    text_of,
)
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.json_schemas import followable

MAX_CHOICES = 1024
# Values that ask for nothing, wherever they are sent.
_NOTHING = (b"null", b"false", b'""', b"[]", b"{}")
_OBJECT_SCHEMA = '{"type": "object"}'
_TEXTS = msgspec.json.Decoder(list[str])
_FLAG = msgspec.json.Decoder(bool)
# Structural tags as xgrammar, SGLang and vLLM wrote them first.
_OLDER = re.compile(r'"structures"\s*:')
_MAX_WHITESPACE = 16  # Blanks without end would be a text without end.
Grammar = common_pb2.Grammar


def grammar_of(fields: Mapping[str, Bytes | None]) -> tuple[Grammar | None, str]:
    """The constraint, and the field that set it; None where none did. fields: those of NAMES, None where not sent.

    Raises MeshError naming the field; INVALID_ARGUMENT where two are set, since only one can be followed.
    """
    found: Grammar | None = None
    by = ""
    for field, read in _READERS.items():
        raw = fields.get(field)
        if raw is None or bytes(memoryview(raw)[:6]) in _NOTHING:
            continue
        grammar = read(raw, field)
        if grammar is None:
            continue
        if found is not None:
            raise invalid(field, f"{by} and {field} both constrain the answer: send one of them")
        found, by = grammar, field
    return found, by


def _schema(raw: Bytes, field: str) -> Grammar:
    check_values(raw, field)
    is_text = bytes(memoryview(raw)[:1]) == b'"'
    return Grammar(json_schema=text_of(raw, field) if is_text else bytes(raw).decode())


def _regex(raw: Bytes, field: str) -> Grammar:
    return Grammar(regex=text_of(raw, field))


def _ebnf(raw: Bytes, field: str) -> Grammar:
    return Grammar(ebnf=text_of(raw, field))


def _choice(raw: Bytes, field: str) -> Grammar:
    list_of(raw, field, MAX_CHOICES)
    choices = decode(_TEXTS, raw, field)
    if not choices or not all(choices):
        raise invalid(field, f"{field} needs one text at least, and none that is empty")
    return Grammar(ebnf="root ::= " + " | ".join(_quoted(choice) for choice in choices))


def _quoted(text: str) -> str:
    """A literal of EBNF: what is not plain ASCII goes by its code."""
    return '"' + "".join(char if char.isalnum() and char.isascii() else f"\\U{ord(char):08X}" for char in text) + '"'


def _json_object(raw: Bytes, field: str) -> Grammar | None:
    return Grammar(json_schema=_OBJECT_SCHEMA) if decode(_FLAG, raw, field) else None


def _structural_tag(raw: Bytes, field: str) -> Grammar:
    check_values(raw, field)
    if bytes(memoryview(raw)[:1]) != b'"':
        return _tag_object(raw, field)
    text = text_of(raw, field)
    if not _OLDER.search(text):
        return Grammar(structural_tag=text)
    inner = text.encode()
    check_values(inner, field)
    return _tag_object(inner, field)


def _tag_object(raw: Bytes, field: str) -> Grammar:
    """In either form: with a `format`, or the older one of `structures` and `triggers`."""
    fields = read_fields(raw, field)
    if "structures" not in fields or "format" in fields:
        return Grammar(structural_tag=bytes(raw).decode())
    triggers = decode(_TEXTS, fields.get("triggers", msgspec.Raw(b"[]")), f"{field}.triggers")
    entries = list_of(fields["structures"], f"{field}.structures", MAX_CHOICES)
    if not triggers or not entries:
        raise invalid(field, f"{field} needs structures, and the triggers that begin them: send one of each at least")
    tags = ", ".join(_structure(entry, f"{field}.structures.{index}") for index, entry in enumerate(entries))
    form = f'{{"type": "triggered_tags", "triggers": {_json(triggers)}, "tags": [{tags}]}}'
    return Grammar(structural_tag=f'{{"type": "structural_tag", "format": {form}}}')


def _structure(raw: Bytes, where: str) -> str:
    """A tag of the newer form. Raises INVALID_GRAMMAR for a schema that no grammar follows."""
    fields = read_fields(raw, where)
    missing = [name for name in ("begin", "schema", "end") if name not in fields]
    if missing:
        raise invalid(f"{where}.{missing[0]}", f"{where}.{missing[0]} is missing: send begin, schema and end")
    begin, end = (text_of(fields[name], f"{where}.{name}") for name in ("begin", "end"))
    try:
        schema = followable(_schema(fields["schema"], f"{where}.schema").json_schema)
    except MeshError as error:
        raise MeshError(error.reason, f"{where}.schema: {error.message}", error.metadata) from None
    content = f'{{"type": "json_schema", "json_schema": {schema}, "max_whitespace_cnt": {_MAX_WHITESPACE}}}'
    return f'{{"type": "tag", "begin": {_json(begin)}, "content": {content}, "end": {_json(end)}}}'


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _response_format(raw: Bytes, field: str) -> Grammar | None:
    fields = read_fields(raw, field)
    kind = text_of(fields["type"], f"{field}.type") if "type" in fields else ""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(json_schema=_OBJECT_SCHEMA)
    if kind == "json_schema":
        inner = read_fields(fields.get("json_schema", msgspec.Raw(b"{}")), f"{field}.json_schema")
        if "schema" not in inner:
            raise invalid(field, f"{field}.json_schema has no schema: send {{'name': ..., 'schema': {{...}}}}")
        return _schema(inner["schema"], f"{field}.json_schema.schema")
    if kind == "structural_tag":
        return _structural_tag(raw, field)
    raise unsupported(f"{field}.type", f"{field}.type is {kind[:40]!r}: send text, json_object or json_schema")


_STRUCTURED: Mapping[str, Callable[[Bytes, str], Grammar | None]] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}


def _structured_outputs(raw: Bytes, field: str) -> Grammar | None:
    """vLLM's object: exactly one of its constraints."""
    found: Grammar | None = None
    for name, value in read_fields(raw, field).items():
        if bytes(value) in _NOTHING:
            continue
        if name not in _STRUCTURED:
            raise unsupported(
                f"{field}.{name}", f"{field}.{name} is not offered: choose one of {', '.join(_STRUCTURED)}"
            )
        if found is not None:
            raise invalid(field, f"{field} has more than one constraint: send one")
        found = _STRUCTURED[name](value, f"{field}.{name}")
    return found


_READERS: Mapping[str, Callable[[Bytes, str], Grammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "regex": _regex,
    "json_schema": _schema,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
    "guided_json": _schema,
    "guided_json_object": _json_object,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
}
NAMES = tuple(_READERS)


def with_field(error: MeshError, field: str) -> MeshError:
    """An error of the grammar, told of the field that brought it."""
    if error.metadata.get("field") not in (None, "grammar"):
        return error
    return MeshError(error.reason, error.message, {**error.metadata, "field": field})


def constraining_field(body: object) -> str:
    """The field of a body that brings its grammar, empty where none does. Not read: a wrong one counts too."""
    sent = ((name, getattr(body, name, None)) for name in reversed(NAMES))
    return next((name for name, raw in sent if raw is not None and bytes(memoryview(raw)[:6]) not in _NOTHING), "")


@contextmanager
def named_by(field: str) -> Iterator[None]:
    """Errors of the router's `grammar` tell the field that brought it; empty: the path alone tells its name."""
    try:
        yield
    except MeshError as error:
        if field and error.metadata.get("field", error.metadata.get("feature")) == "grammar":
            raise with_field(error, field) from None
        raise
