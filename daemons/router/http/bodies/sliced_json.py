"""Large JSON answers made a slice at a time: other requests get their turn between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import msgspec
from starlette.responses import Response, StreamingResponse

from radixmesh.daemons.router.http.bodies.json_text import dump, split_at
from radixmesh.daemons.runtime.arrays import IntArray

_MARK = "what comes in slices"
_IDS_PER_SLICE = 1 << 13
_CHARS_PER_SLICE = 1 << 15
_JSON = "application/json"
# Up to here an answer is one piece, with its length said before it.
_WHOLE = 1 << 16


def ids_answer(
    fields: Mapping[str, object], name: str, lists: Sequence[IntArray], headers: Mapping[str, str], *, is_list: bool
) -> Response:
    """fields, and beside them `name`: the ids, a list of lists of them if is_list."""
    return _answer(fields, name, _joined(map(_ids, lists), is_list), sum(map(len, lists)) + len(lists), headers)


def texts_answer(name: str, texts: Sequence[str], headers: Mapping[str, str], *, is_list: bool) -> Response:
    """{name: the text, or a list of them}."""
    return _answer({}, name, _joined(map(_text, texts), is_list), sum(map(len, texts)) + len(texts), headers)


def _answer(
    fields: Mapping[str, object], name: str, slices: Iterator[bytes], size: int, headers: Mapping[str, str]
) -> Response:
    before, after = split_at({**fields, name: _MARK}, _MARK)
    if size <= _WHOLE:
        return Response(before + b"".join(slices) + after, headers=headers, media_type=_JSON)
    return StreamingResponse(_told(before, slices, after), headers=headers, media_type=_JSON)


async def _told(before: bytes, slices: Iterator[bytes], after: bytes) -> AsyncIterator[bytes]:
    yield before
    for part in slices:
        yield part
        await asyncio.sleep(0)
    yield after


def _joined(values: Iterator[Iterator[bytes]], is_list: bool) -> Iterator[bytes]:
    if is_list:
        yield b"["
    for place, value in enumerate(values):
        if place:
            yield b","
        yield from value
    if is_list:
        yield b"]"


def _ids(ids: IntArray) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(ids), _IDS_PER_SLICE):
        if start:
            yield b","
        yield msgspec.json.encode(ids[start : start + _IDS_PER_SLICE].tolist())[1:-1]
    yield b"]"


def _text(text: str) -> Iterator[bytes]:
    yield b'"'
    for start in range(0, len(text), _CHARS_PER_SLICE):
        yield dump(text[start : start + _CHARS_PER_SLICE])[1:-1]
    yield b'"'
