"""Request bodies: read within bounds of size and time, parsed by their type."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

IGNORED_HEADER = "x-radixmesh-ignored-fields"
_MAX_NAMED = 16
_MAX_FORMS = 4


class Body(BaseModel):
    """A JSON object. Fields that no one knows are kept apart and told to the client; null means "as if absent".

    Strict: a number is no text, a text no number, true no 1.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def ignored_headers(self) -> dict[str, str]:
        """A response header that names the unknown fields; none where there are none."""
        names = [name for name in self.__pydantic_extra__ or {} if name.isascii() and name.replace("_", "").isalnum()]
        return {IGNORED_HEADER: ", ".join(names[:_MAX_NAMED])} if names else {}


_B = TypeVar("_B", bound=Body)


class UnreadBody(MeshError):
    """The rest of the body will not be read: the connection cannot be used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """max_bytes: of one body. timeout_s: from the headers to the body's end."""

    max_bytes: int
    timeout_s: float

    async def read(self, request: Request, kind: type[_B]) -> _B:
        """The request's body. Raises TOO_LARGE before more than max_bytes are read, DEADLINE_EXCEEDED, ClientGone,
        MALFORMED_MESSAGE for what is no JSON, and MISSING_FIELD or INVALID_ARGUMENT naming the first wrong field."""
        return parse(await self._bytes(request), kind)

    async def _bytes(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            raise self._too_large(int(announced))
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._gather(request)
        except TimeoutError as error:
            message = f"the body did not arrive within {self.timeout_s:g} s: send it at once"
            raise UnreadBody(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message) from error

    async def _gather(self, request: Request) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self.max_bytes:
                raise self._too_large(num_bytes)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self, size: int) -> UnreadBody:
        message = f"the body has {size} bytes or more, this router takes {self.max_bytes}: send less at once"
        metadata = {"size": str(size), "max": str(self.max_bytes)}
        return UnreadBody(ErrorReason.ERROR_REASON_TOO_LARGE, message, metadata)


class ClientGone(Exception):
    """The client has left: nobody is there to answer."""


def parse(data: bytes, kind: type[_B]) -> _B:
    """A body of that type. Raises MeshError as BodyReader.read says."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _mesh_error(error.errors(include_url=False, include_context=False, include_input=False)) from None


def _mesh_error(details: Sequence[ErrorDetails]) -> MeshError:
    first = details[0]
    if first["type"] == "json_invalid":
        message = f"the body is no JSON ({first['msg'].removeprefix('Invalid JSON: ')}): send an object"
        return MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, message)
    if not first["loc"]:
        message = f"the body has the wrong shape: {first['msg']}"
        return MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, message)
    field, where = str(first["loc"][0]), _place_of(first)
    if first["type"] == "missing":
        return MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, f"{where} is missing: set it", {"field": where})
    # Of a field that has several forms, each says why it does not fit.
    same_field = [detail for detail in details if detail["loc"][:1] == first["loc"][:1]]
    message = "; or ".join(f"{_place_of(detail)}: {detail['msg']}" for detail in same_field[:_MAX_FORMS])
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def _place_of(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"]).replace("constrained-", "")
