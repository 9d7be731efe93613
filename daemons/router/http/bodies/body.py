"""Request bodies: read within bounds of size, time and number, parsed by their type."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import islice
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar, cast

from google.protobuf.message import Message
from starlette.requests import Request

from radixmesh.daemons.router.http.bodies.body_budget import BodyBudget, BodyShare
from radixmesh.daemons.router.http.bodies.field_decoders import decode, decoders_of, is_null, malformed, read_fields
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.bodies.known_fields import judge
from radixmesh.daemons.router.http.bodies.parser_pool import ParserPool
from radixmesh.daemons.router.http.server.connection import connection_of
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

IGNORED_HEADER = "x-radixmesh-ignored-fields"
# Parsed where they are: less than a millisecond for most. Larger ones cost the event loop a copy to another process.
SMALL_BYTES = 32 << 10
_MAX_NAMED = 16
# Of ignored fields the header names those that a header can hold.
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_UTF8_BLOCK = 1 << 18

# By model: the tokens that its context holds.
Contexts = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A JSON object. Null means "as if absent". Types are strict: a number is no text, a text no number, true no 1.

    Fields of the type MaybeRaw are kept as bytes. ignored: names of what is not served and changes nothing, in the
    order in which they came. is_batch: whether the input came as a list of inputs. OWN_FIELDS: those that no client
    sets; BULK: those that end up in the messages, and are not kept beside them.
    """

    OWN_FIELDS: ClassVar[frozenset[str]] = frozenset(("ignored", "is_batch"))
    BULK: ClassVar[frozenset[str]] = frozenset()

    ignored: Sequence[str] = ()
    is_batch: bool = False

    def settled(self) -> Self:
        """The same with its own fields made from those of its client. Raises MeshError."""
        return self

    def to_messages(self, contexts: Contexts) -> Iterator[Message]:
        """The messages that ask the mesh for it, ids of requests left out. Raises MeshError naming the field."""
        raise NotImplementedError

    @classmethod
    def message_type(cls) -> type[Message]:
        """The type of all its messages."""
        raise NotImplementedError

    def ignored_headers(self) -> dict[str, str]:
        """A response header that names the ignored fields; none where there are none."""
        names = list(islice(filter(_HEADER_NAME.fullmatch, self.ignored), _MAX_NAMED))
        return {IGNORED_HEADER: ", ".join(names)} if names else {}

    def without_bulk(self) -> dict[str, object]:
        """The fields that answers depend on, by name: all but those that are in the messages."""
        bulk = _bulk(type(self))
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in bulk}


_B = TypeVar("_B", bound=Body)


class Parsed(NamedTuple, Generic[_B]):
    """body: without what is in the messages."""

    body: _B
    messages: list[Message]


class UnreadBody(MeshError):
    """The rest of the body will not be read: the connection cannot be used again."""


class ClientGone(Exception):
    """The client has left: nobody is there to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """max_bytes: of one body. timeout_s: from the headers to the body's end. budget: of all bodies together."""

    max_bytes: int
    timeout_s: float
    budget: BodyBudget
    parsers: ParserPool
    contexts: Callable[[], Contexts]

    async def read(self, request: Request, kind: type[_B]) -> Parsed[_B]:
        """The request's body. Raises TOO_LARGE before more than max_bytes are read, NOT_SERVING when others' bodies
        take all there is, DEADLINE_EXCEEDED, ClientGone, MALFORMED_MESSAGE for what is no JSON, and MISSING_FIELD,
        INVALID_ARGUMENT or UNSUPPORTED naming the first wrong field."""
        with self.budget.share() as share:
            parts = await self._parts(request, share)
            if share.num_bytes <= SMALL_BYTES:
                return parse_whole(b"".join(parts), kind, self.contexts())
            light, messages = await self.parsers.parse(
                parts,
                share.num_bytes,
                kind.__name__,
                self.contexts(),
                cast("Callable[[bytearray], Message]", kind.message_type().FromString),
            )
            return Parsed(_light(kind, light), messages)

    async def _parts(self, request: Request, share: BodyShare) -> list[bytes]:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            raise self._too_large(int(announced))
        if connection_of(request.scope).has_whole_body:
            return await self._gather(request, share)  # It waits for nobody.
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._gather(request, share)
        except TimeoutError as error:
            message = f"the body did not arrive within {self.timeout_s:g} s: send it at once"
            raise UnreadBody(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message) from error

    async def _gather(self, request: Request, share: BodyShare) -> list[bytes]:
        parts: list[bytes] = []
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            if share.num_bytes + len(parts[-1]) > self.max_bytes:
                raise self._too_large(share.num_bytes + len(parts[-1]))
            if not share.take(len(parts[-1])):
                busy = "this router is reading as many bodies as it can hold: retry, or send less at once"
                raise UnreadBody(ErrorReason.ERROR_REASON_NOT_SERVING, busy)
            if not message.get("more_body", False):
                return parts

    def _too_large(self, size: int) -> UnreadBody:
        message = f"the body has {size} bytes or more, this router takes {self.max_bytes}: send less at once"
        metadata = {"size": str(size), "max": str(self.max_bytes)}
        return UnreadBody(ErrorReason.ERROR_REASON_TOO_LARGE, message, metadata)


def parse_whole(data: Bytes, kind: type[_B], contexts: Contexts) -> Parsed[_B]:
    """The body without its bulk, and its messages. Raises MeshError as BodyReader.read says."""
    body = parse(data, kind)
    messages = list(body.to_messages(contexts))
    for name, default in _bulk(kind).items():
        # It was made here, and nobody else has it: as _light(), without a second object.
        object.__setattr__(body, name, default)
    return Parsed(body, messages)


def parse(data: Bytes, kind: type[_B]) -> _B:
    """A body of that type. Raises MeshError as BodyReader.read says."""
    _check_utf8(data)
    return read_object(data, kind)


def read_object(data: Bytes, kind: type[_B], where: str = "") -> _B:
    """An object within the body; where: its name in errors."""
    decoders = decoders_of(kind)
    required = _required(kind)
    values: dict[str, object] = {}
    ignored: list[str] = []
    for name, raw in read_fields(data, where).items():
        path = f"{where}.{name}" if where else name
        if name not in decoders:
            if judge(name, raw, decoders, where):
                ignored.append(path)
        elif not is_null(raw) or name in required:
            decoder = decoders[name]
            values[name] = raw if decoder is None else decode(decoder, raw, path)
    for name in required:
        if name not in values:
            path = f"{where}.{name}" if where else name
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, f"{path} is missing: set it", {"field": path})
    return kind(**values, ignored=tuple(ignored)).settled()  # type: ignore[arg-type]


def _light(kind: type[_B], values: Mapping[str, object]) -> _B:
    """The body whose bulk is elsewhere."""
    return kind(**{**dict.fromkeys(_required(kind)), **values})  # type: ignore[arg-type]


def _required(kind: type[Body]) -> frozenset[str]:
    return _shape(cast("Hashable", kind)).required


def _bulk(kind: type[Body]) -> Mapping[str, object]:
    return _shape(cast("Hashable", kind)).bulk


class _Shape(NamedTuple):
    """Of a kind of bodies. required: fields without a default. bulk: fields that are in the messages, with what stands
    in their place: their default, None for one without."""

    required: frozenset[str]
    bulk: Mapping[str, object]


@cache
def _shape(kind: Hashable) -> _Shape:
    body = cast("type[Body]", kind)
    names = body.BULK | {name for name, decoder in decoders_of(body).items() if decoder is None}
    bulk = {f.name: None if f.default is MISSING else f.default for f in fields(body) if f.name in names}
    return _Shape(frozenset(f.name for f in fields(body) if f.default is MISSING), bulk)


def _check_utf8(data: Bytes) -> None:
    """Raises MALFORMED_MESSAGE. Block by block: the text of a large body would be up to four times its size."""
    try:
        if len(data) <= _UTF8_BLOCK:
            codecs.utf_8_decode(data, "strict", True)
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(data), _UTF8_BLOCK):
            decoder.decode(data[start : start + _UTF8_BLOCK])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise malformed(f"the body is no JSON ({error}): send UTF-8") from None
