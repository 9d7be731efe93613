"""Fields of other APIs read and put together as the one chat request that all of them become."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from radixmesh.daemons.router.http.bodies.field_decoders import Raw, invalid, plain_json
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.bodies.known_fields import judge, unsupported
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

MAX_NAME = 256
JsonObject = Mapping[str, object]


class TextParts(NamedTuple):
    """Parts that are texts: their types, their known fields, and their path without numbers."""

    kinds: tuple[str, ...]
    fields: tuple[str, ...]
    shape: str


class FieldReader:
    """Values within one body. ignored: names of fields that are not served and change nothing."""

    def __init__(self) -> None:
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self._ignored)

    def json(self, raw: Bytes, where: str) -> object:
        """Any value, its size counted before it is decoded. Raises TOO_LARGE, MALFORMED_MESSAGE, INVALID_ARGUMENT."""
        return plain_json(raw, where)

    def made(self, raw: Bytes | None, where: str, make: Callable[[FieldReader, object], object]) -> Raw | None:
        """JSON of what `make` makes of a field's value; None where the field was not sent."""
        return None if raw is None else packed(make(self, self.json(raw, where)))

    def fields(self, value: object, where: str, known: Collection[str], shape: str = "") -> JsonObject:
        """An object of these fields. shape: `where` without indexes, for names of ignored fields.

        Raises INVALID_ARGUMENT for what is none, UNSUPPORTED for a field whose absence would change the answer.
        """
        if not isinstance(value, dict):
            raise invalid(where, f"{where} is no object: send one")
        for name, inner in value.items():
            if name not in known and judge(name, msgspec.json.encode(inner), known, where):
                self.ignore(f"{shape or where}.{name}")
        return value

    def ignore(self, name: str) -> None:
        self._ignored[name] = None

    def text(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise invalid(where, f"{where} is no text: send one")
        return value

    def name(self, value: object, where: str) -> str:
        """A text of at most MAX_NAME characters."""
        text = self.text(value, where)
        if len(text) > MAX_NAME:
            raise invalid(where, f"{where} has {len(text)} characters: send at most {MAX_NAME}")
        return text

    def entries(self, value: object, where: str) -> Sequence[object]:
        if not isinstance(value, list):
            raise invalid(where, f"{where} is no list: send one")
        return value

    def required(self, fields: JsonObject, name: str, where: str) -> object:
        if fields.get(name) is None:
            path = f"{where}.{name}"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, f"{path} is missing: set it", {"field": path})
        return fields[name]

    def required_text(self, fields: JsonObject, name: str, where: str) -> str:
        return self.text(self.required(fields, name, where), f"{where}.{name}")

    def texts(self, value: object, where: str, form: TextParts) -> str:
        """A text, or those of a list of parts."""
        if isinstance(value, str):
            return value
        parts = self.entries(value, where)
        return "".join(self.part_text(part, f"{where}.{index}", form) for index, part in enumerate(parts))

    def part_text(self, part: object, where: str, form: TextParts) -> str:
        """Raises UNSUPPORTED for a part of another kind than text."""
        fields = self.fields(part, where, form.fields, form.shape)
        if fields.get("type") not in form.kinds:
            raise only_text(fields.get("type"), where)
        return self.required_text(fields, "text", where)


def packed(value: object) -> Raw:
    """JSON of a translated value, for the fields that are kept as bytes."""
    return msgspec.Raw(msgspec.json.encode(value))


def function_tool(reader: FieldReader, entry: object, where: str, schema: str) -> JsonObject:
    """A tool in the form of OpenAI's chat completions. schema: the name of the field with its parameters."""
    fields = reader.fields(entry, where, ("type", "name", "description", schema, "strict"), "tools")
    function: dict[str, object] = {"name": reader.required_text(fields, "name", where)}
    if fields.get("description"):
        function["description"] = fields["description"]
    parameters = fields.get(schema)
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    if fields.get("strict") is not None:
        function["strict"] = fields["strict"]
    return {"type": "function", "function": function}


def only_text(kind: object, where: str) -> MeshError:
    """UNSUPPORTED for a part of another kind than text."""
    if kind is None:
        return unsupported(where, f"{where} has no type: send parts of text, with type and text")
    return unsupported(where, f"{where} is a part of type {str(kind)[:32]!r}: send parts of text alone")
