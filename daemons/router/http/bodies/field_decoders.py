"""Fields of a JSON object decoded one by one, each by its own type: an error names the field that the client sent."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Annotated, TypeVar, cast

import msgspec

from radixmesh.daemons.router.http.bodies.json_shape import Bytes, bound_of_values, shape_of
from radixmesh.daemons.router.http.bodies.type_errors import in_words
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

Raw = msgspec.Raw
# A field whose type is Raw is kept as its bytes, for code that counts before it decodes.
MaybeRaw = Annotated[Bytes | None, "raw"]

MAX_FIELDS = 256
MAX_DEPTH = 64
# Scalars, arrays and objects of one field that is neither a text nor a list of ids.
MAX_VALUES = 1 << 16
_MAX_SHOWN = 32

_T = TypeVar("_T")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_ANY = msgspec.json.Decoder()
_TEXT = msgspec.json.Decoder(str)


def decoders_of(kind: type) -> Mapping[str, msgspec.json.Decoder[object] | None]:
    """By field of a dataclass: the decoder of its type, None for one that is kept as bytes."""
    return _decoders_of(cast("Hashable", kind))


@cache
def _decoders_of(kind: Hashable) -> Mapping[str, msgspec.json.Decoder[object] | None]:
    hints = typing.get_type_hints(kind, include_extras=True)
    own: frozenset[str] = getattr(kind, "OWN_FIELDS", frozenset())
    names = [field.name for field in dataclasses.fields(cast("type", kind)) if field.name not in own]
    return {name: None if hints[name] is MaybeRaw else msgspec.json.Decoder(hints[name]) for name in names}


def read_fields(data: Bytes, where: str = "") -> dict[str, Raw]:
    """An object's fields; of two with one name the last counts. where: its name in errors, "" = the body.

    Raises MALFORMED_MESSAGE, also beyond MAX_DEPTH, and TOO_LARGE beyond MAX_FIELDS.
    """
    if bound_of_values(data) > MAX_DEPTH:
        shape = shape_of(data)
        if shape.depth > MAX_DEPTH:
            raise malformed(f"{where or 'the body'} is nested {shape.depth} levels deep: send at most {MAX_DEPTH}")
        if shape.num_entries > MAX_FIELDS:
            raise too_large(where, "fields", shape.num_entries, MAX_FIELDS)
    try:
        return _OBJECT.decode(data)
    except msgspec.ValidationError as error:
        if where:
            raise invalid(where, in_words(where, str(error), dict)) from None
        raise malformed(f"the body has the wrong shape ({error}): send an object") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise malformed(f"the body is no JSON ({error}): send an object") from None


def decode(decoder: msgspec.json.Decoder[_T], raw: Bytes, where: str) -> _T:
    """The value. Raises INVALID_ARGUMENT naming the field, and MALFORMED_MESSAGE for broken UTF-8 in a text."""
    try:
        return decoder.decode(raw)
    except UnicodeDecodeError as error:
        raise malformed(f"the body is no JSON ({error}): send UTF-8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(where, in_words(where, str(error), decoder.type)) from None


def text_of(raw: Bytes, where: str) -> str:
    return decode(_TEXT, raw, where)


def list_of(raw: Bytes, where: str, most: int, reason: ErrorReason = ErrorReason.ERROR_REASON_TOO_LARGE) -> list[Raw]:
    """The entries of a list of at most `most`. Raises `reason` for more, INVALID_ARGUMENT for what is no list."""
    check_entries(raw, where, most, reason)
    return decode(_LIST, raw, where)


def check_entries(raw: Bytes, where: str, most: int, reason: ErrorReason) -> None:
    """Raises `reason` for a list or an object of more than `most` entries."""
    if bound_of_values(raw) > most and (num := shape_of(raw).num_entries) > most:
        raise too_large(where, "entries", num, most, reason)


def plain_json(raw: Bytes, where: str) -> object:
    """Any value of at most MAX_VALUES. Raises TOO_LARGE, INVALID_ARGUMENT for numbers beyond 64 bits of float."""
    check_values(raw, where)
    return decode(_ANY, raw, where)


def check_values(raw: Bytes, where: str) -> None:
    """Raises TOO_LARGE for more than MAX_VALUES values, MALFORMED_MESSAGE for more than MAX_DEPTH levels of them."""
    if bound_of_values(raw) <= MAX_DEPTH:
        return
    shape = shape_of(raw)
    if shape.depth > MAX_DEPTH:
        raise malformed(f"{where} is nested {shape.depth} levels deep: send at most {MAX_DEPTH}")
    if shape.num_values > MAX_VALUES:
        raise too_large(where, "values", shape.num_values, MAX_VALUES)


def is_null(raw: Bytes) -> bool:
    return len(raw) == 4 and bytes(raw) == b"null"


def shown(name: str) -> str:
    """A name for messages, as long as one wants to read."""
    return repr(name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}...")


def invalid(field: str, message: str) -> MeshError:
    """An option's value cannot be. field: as the client wrote it."""
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def malformed(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, message)


def too_large(
    field: str, unit: str, num: int, most: int, reason: ErrorReason = ErrorReason.ERROR_REASON_TOO_LARGE
) -> MeshError:
    """num, most: in units. field: "" = the body."""
    message = f"{field or 'the body'} has {num} {unit}: send at most {most}"
    about = {"field": field} if field else {}
    return MeshError(reason, message, {**about, "size": str(num), "max": str(most)})
