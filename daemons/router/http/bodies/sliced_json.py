"""Large JSON answers made a slice at a time: other requests get their turn between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import msgspec
from starlette.responses import Response, StreamingResponse

from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.runtime.arrays import IntArray

_IDS_PER_SLICE = 1 << 13
_CHARS_PER_SLICE = 1 << 15
_JSON = "application/json"
# Up to here an answer is one piece, with its length said before it.
_WHOLE = 1 << 16


def ids_answer(
    fields: Mapping[str, object],
    lists: Sequence[IntArray],
    headers: Mapping[str, str],
    *,
    is_list: bool,
    spelling: Callable[[int], str] | None = None,
) -> Response:
    """fields, and `tokens`: the ids, a list of lists of them if is_list. With spelling `token_strs` beside them."""
    values = {"tokens": _joined(map(_ids, lists), is_list)}
    if spelling is not None:
        values["token_strs"] = _joined((_spellings(ids, spelling) for ids in lists), is_list)
    return _answer(fields, values, sum(map(len, lists)) * len(values) + len(lists), headers)


def texts_answer(names: Sequence[str], texts: Sequence[str], headers: Mapping[str, str], *, is_list: bool) -> Response:
    """{name: the text, or a list of them}, the same under every name."""
    values = {name: _joined(map(_text, texts), is_list) for name in names}
    return _answer({}, values, sum(map(len, texts)) * len(names) + len(texts), headers)


def _answer(
    fields: Mapping[str, object], values: Mapping[str, Iterator[bytes]], size: int, headers: Mapping[str, str]
) -> Response:
    slices = _object(fields, values)
    if size <= _WHOLE:
        return Response(b"".join(slices), headers=headers, media_type=_JSON)
    return StreamingResponse(_told(slices), headers=headers, media_type=_JSON)


def _object(fields: Mapping[str, object], values: Mapping[str, Iterator[bytes]]) -> Iterator[bytes]:
    before = dump(fields)[:-1] + (b"," if fields else b"")
    for name, slices in values.items():
        yield before + dump(name) + b":"
        yield from slices
        before = b","
    yield b"}"


async def _told(slices: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in slices:
        yield part
        await asyncio.sleep(0)


def _joined(values: Iterator[Iterator[bytes]], is_list: bool) -> Iterator[bytes]:
    if is_list:
        yield b"["
    for index, value in enumerate(values):
        if index:
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


def _spellings(ids: IntArray, spelling: Callable[[int], str]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(ids), _IDS_PER_SLICE):
        texts = [spelling(token) for token in ids[start : start + _IDS_PER_SLICE].tolist()]
        yield (b"," if start else b"") + dump(texts)[1:-1]
    yield b"]"


def _text(text: str) -> Iterator[bytes]:
    yield b'"'
    for start in range(0, len(text), _CHARS_PER_SLICE):
        yield dump(text[start : start + _CHARS_PER_SLICE])[1:-1]
    yield b'"'
