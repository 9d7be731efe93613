"""Counts and sizes of a message's fields, taken from its bytes before any object is made of them.

An empty element of a repeated field is two bytes on the wire and a hundred in memory, and parsing holds the event loop:
30 MiB of them made 1.5 GiB. Every repeated and every string field has a bound here, one that is added tomorrow too; the
code that reads a field knows the exact one. Messages are walked at all levels; of frames of streams, which have many
small entries, the first 4 MiB of those are not, and what is in an entry is counted for that entry, but for the sizes
of its strings: an error of a peer that says too much is cut, its stream goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError, Message

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

_M = TypeVar("_M", bound=Message)

# Elements of a repeated field, all occurrences in a message together; bytes of a string.
DEFAULT_COUNT = 1 << 14
DEFAULT_STRING_BYTES = 64 << 10
MAX_COUNTS: Mapping[str, int] = {
    "radixmesh.router.v1.Resume.outputs": 128,
    "radixmesh.common.v1.StopParams.stop": 64,
}
# Of all texts of one message: their ids, four bytes each, have to fit one answer.
MAX_TEXT_BYTES = 12 << 20
MAX_BYTES: Mapping[str, int] = {
    "radixmesh.router.v1.GenerateRequest.text": MAX_TEXT_BYTES,
    "radixmesh.tokenizer.v1.EncodeItem.text": MAX_TEXT_BYTES,
    "radixmesh.tokenizer.v1.ChatMessage.content": MAX_TEXT_BYTES,
    "radixmesh.tokenizer.v1.ChatMessage.extra_json": MAX_TEXT_BYTES,
    "radixmesh.tokenizer.v1.ChatInput.tools_json": MAX_TEXT_BYTES,
    "radixmesh.tokenizer.v1.ChatInput.template_args_json": MAX_TEXT_BYTES,
    "radixmesh.common.v1.Grammar.json_schema": 1 << 20,
    "radixmesh.common.v1.Grammar.regex": 1 << 20,
    "radixmesh.common.v1.Grammar.ebnf": 1 << 20,
    "radixmesh.common.v1.Grammar.structural_tag": 1 << 20,
    # One uint64 has up to ten bytes.
    "radixmesh.router.v1.Resolved.seeds": 1280,
    "radixmesh.detokenizer.v1.DetokenizeRequest.close_handles": 4 << 20,
}
_REASONS = {"radixmesh.common.v1.StopParams.stop": ErrorReason.ERROR_REASON_TOO_MANY_STOPS}
# Fields of all levels that are walked, unknown and repeated ones too: 40 ms on a quiet machine.
MAX_FIELDS = 1 << 17
# Too few bytes to do harm, whatever they hold.
UNSCANNED_BYTES = 64 << 10
# Of the entries of a frame: frames of ours are read on the loop, and their entries are small (frames.py).
_SMALL_ENTRY_BYTES = 4 << 10
_UNSCANNED_ENTRIES_BYTES = 4 << 20


class _Field(NamedTuple):
    """max_count, max_bytes: 0 = not bounded here. inner: of a message."""

    name: str
    max_count: int
    max_bytes: int
    inner: Descriptor | None


@cache
def scan_of(method: str) -> Callable[[bytes], None] | None:
    """The check of the requests of "/package.Service/Verb", which some daemon serves; None for a service that is not
    ours. Kept for ever: not to be asked with names that peers choose."""
    service_name, _, verb = method.lstrip("/").partition("/")
    if not service_name.startswith("radixmesh."):
        return None
    try:
        found = Default().FindServiceByName(service_name).methods_by_name[verb]
    except KeyError:
        return None
    request: Descriptor = found.input_type
    is_frame: bool = found.client_streaming
    return lambda raw: check_counts(raw, request, is_frame=is_frame)


def check_counts(raw: bytes, descriptor: Descriptor, *, is_frame: bool = False) -> None:
    """Raises MeshError TOO_LARGE beyond a bound or MAX_FIELDS. Bytes that are no message are left to the parser.

    is_frame: of a stream: the first 4 MiB of its small entries are not looked into, counts are those of each entry.
    """
    if len(raw) <= UNSCANNED_BYTES:
        return
    counts: dict[str, int] = {}
    num_fields = 0
    num_unscanned = _UNSCANNED_ENTRIES_BYTES if is_frame else 0
    is_top = True
    spans = [(0, len(raw), descriptor, False)]
    while spans:
        offset, end, inner, is_entry = spans.pop()
        if is_entry:
            # All spans of the entry before it are done: what an entry holds lies above it on the stack.
            counts.clear()
        fields = fields_of(inner)
        while offset < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise _too_many("a message", num_fields, MAX_FIELDS)
            # Almost all tags and lengths have one byte.
            tag, offset = raw[offset], offset + 1
            if tag > 0x7F:
                tag, offset = _varint(raw, offset - 1, end)
            kind = tag & 7
            field = fields.get(tag >> 3)
            if field is not None and field.max_count:
                counts[field.name] = counts.get(field.name, 0) + 1
                if counts[field.name] > field.max_count:
                    raise _too_many(field.name, counts[field.name], field.max_count)
            if kind == 2:
                length, offset = raw[offset] if offset < end else 0, offset + 1
                if length > 0x7F:
                    length, offset = _varint(raw, offset - 1, end)
                if field is not None:
                    # A length beyond the end is the parser's to refuse.
                    is_sized = field.max_bytes and (is_top or not is_frame)
                    if is_sized and min(length, end - offset) > field.max_bytes:
                        raise _too_many(f"bytes of {field.name}", length, field.max_bytes)
                    if field.inner is not None and length:
                        if length <= _SMALL_ENTRY_BYTES and length <= num_unscanned:
                            num_unscanned -= length
                        else:
                            spans.append((offset, min(offset + length, end), field.inner, is_frame and is_top))
                offset += length
            elif kind == 0:
                _, offset = _varint(raw, offset, end)
            elif kind in (1, 5):
                offset += 8 if kind == 1 else 4
            else:  # Groups, of which no contract has any.
                return
        is_top = False


def parse_frame(raw: bytes, kind: type[_M]) -> _M:
    """A frame that a peer sent, as a message. Raises TOO_LARGE as check_counts(), MALFORMED_MESSAGE for other bytes."""
    check_counts(raw, cast(Descriptor, kind.DESCRIPTOR), is_frame=True)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        message = f"{len(raw)} bytes are no {kind.DESCRIPTOR.name} ({error}): check the versions of both ends"
        raise MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, message) from error


@cache
def fields_of(descriptor: Descriptor) -> Mapping[int, _Field]:
    found: dict[int, _Field] = {}
    for field in descriptor.fields:
        max_count = MAX_COUNTS.get(field.full_name, DEFAULT_COUNT) if field.is_repeated else 0
        default = DEFAULT_STRING_BYTES if field.type == FieldDescriptor.TYPE_STRING else 0
        max_bytes = MAX_BYTES.get(field.full_name, default)
        found[field.number] = _Field(field.full_name, max_count, max_bytes, field.message_type)
    return found


def _varint(raw: bytes, offset: int, end: int) -> tuple[int, int]:
    """A number and the offset behind it. What is cut off counts as ended: the parser will say so."""
    value = shift = 0
    while offset < end:
        byte = raw[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 63:
            break
    return 0, end


def _too_many(what: str, count: int, limit: int) -> MeshError:
    message = f"{count} or more of {what} in one message, at most {limit} are taken: send less at once"
    reason = _REASONS.get(what, ErrorReason.ERROR_REASON_TOO_LARGE)
    return MeshError(reason, message, {"field": what, "max": str(limit)})
