"""Counts of a message's fields, taken from its bytes before any object is made of them.

An empty element of a repeated field is two bytes on the wire and a hundred in memory, and parsing holds the event loop:
30 MiB of them made 1.5 GiB. The scan walks only into messages that lead to a bounded field, and ends at the first bound
that is passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default

from radixmesh.common.v1.common_pb2 import ErrorReason

from .errors import MeshError

# Whatever a daemon's own flags allow: its code looks at the exact bounds.
MAX_COUNTS: Mapping[str, int] = {
    "radixmesh.router.v1.TokenizeRequest.items": 1 << 14,
    "radixmesh.tokenizer.v1.EncodeRequest.items": 1 << 14,
    "radixmesh.tokenizer.v1.DecodeRequest.ids": 1 << 14,
    "radixmesh.tokenizer.v1.ChatInput.messages": 1 << 14,
    "radixmesh.router.v1.Resume.outputs": 128,
    "radixmesh.common.v1.StopParams.stop": 64,
}
_REASONS = {"radixmesh.common.v1.StopParams.stop": ErrorReason.ERROR_REASON_TOO_MANY_STOPS}
# Fields of all levels that are walked, unknown and repeated ones too: 40 ms on a quiet machine.
MAX_FIELDS = 1 << 17
# Too few bytes to do harm, whatever they hold.
UNSCANNED_BYTES = 64 << 10


class _Field(NamedTuple):
    """name: set where the field's count is bounded. inner: of a message that leads to bounded fields."""

    name: str | None
    max_count: int
    inner: Descriptor | None


def scan_of(method: str) -> Callable[[bytes], None] | None:
    """The check of the request of a unary "/package.Service/Verb"; None where nothing of it is bounded here."""
    service_name, _, verb = method.lstrip("/").partition("/")
    try:
        service = Default().FindServiceByName(service_name)
        request: Descriptor = service.methods_by_name[verb].input_type
    except KeyError:
        return None
    return (lambda raw: check_counts(raw, request)) if _fields_of(request) else None


def check_counts(raw: bytes, descriptor: Descriptor) -> None:
    """Raises MeshError TOO_LARGE beyond MAX_COUNTS or MAX_FIELDS. Bytes that are no message are left to the parser."""
    if len(raw) <= UNSCANNED_BYTES:
        return
    counts: dict[str, int] = {}
    num_fields = 0
    spans = [(0, len(raw), descriptor)]
    while spans:
        place, end, inner = spans.pop()
        fields = _fields_of(inner)
        while place < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise _too_many("a message", num_fields, MAX_FIELDS)
            # Almost all tags and lengths have one byte.
            tag, place = raw[place], place + 1
            if tag > 0x7F:
                tag, place = _varint(raw, place - 1, end)
            kind = tag & 7
            if kind == 2:
                length, place = raw[place] if place < end else 0, place + 1
                if length > 0x7F:
                    length, place = _varint(raw, place - 1, end)
                field = fields.get(tag >> 3)
                if field is not None:
                    if field.name is not None:
                        counts[field.name] = counts.get(field.name, 0) + 1
                        if counts[field.name] > field.max_count:
                            raise _too_many(field.name, counts[field.name], field.max_count)
                    if field.inner is not None and length:
                        spans.append((place, min(place + length, end), field.inner))
                place += length
            elif kind == 0:
                _, place = _varint(raw, place, end)
            elif kind in (1, 5):
                place += 8 if kind == 1 else 4
            else:  # Groups, of which no contract has any.
                return


@cache
def _fields_of(descriptor: Descriptor) -> Mapping[int, _Field]:
    found: dict[int, _Field] = {}
    for field in descriptor.fields:
        max_count = MAX_COUNTS.get(field.full_name)
        inner = field.message_type if field.message_type is not None and _fields_of(field.message_type) else None
        if max_count is not None or inner is not None:
            found[field.number] = _Field(field.full_name if max_count is not None else None, max_count or 0, inner)
    return found


def _varint(raw: bytes, place: int, end: int) -> tuple[int, int]:
    """A number and the place behind it. What is cut off counts as ended: the parser will say so."""
    value = shift = 0
    while place < end:
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            break
    return 0, end


def _too_many(what: str, count: int, limit: int) -> MeshError:
    message = f"{count} or more of {what} in one message, at most {limit} are taken: send less at once"
    reason = _REASONS.get(what, ErrorReason.ERROR_REASON_TOO_LARGE)
    return MeshError(reason, message, {"field": what, "max": str(limit)})
