"""The stored form of a page: a head, its token ids and its KV. Little-endian.

  | magic 4 | version 2 | kind 2 | ids 4 | payload bytes 8 | key 32 | XXH3-128 of ids and payload 16 |
  | XXH3-64 of these 8 | ids, int32 each | payload |

The head's own checksum lets a scan of a log walk from record to record without reading payloads. A payload is looked at
only when its page is read: a record is used if key, ids, length and both checksums are those that the reader expects.
The checksums find accidents, not forgeries: who can write to a store can give its readers any KV.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.keys import KEY_BYTES

try:
    import xxhash
except ImportError as error:
    message = "a store of KV pages needs xxhash: pip install 'radixmesh[kv-store]'"
    raise KvStoreError(StoreFailure.SETTINGS, message) from error

_FIELDS = struct.Struct("<4sHHIQ32s16s")
_MAGIC, _VERSION = b"RMKV", 1
HEAD_BYTES = _FIELDS.size + 8
MAX_PAYLOAD_BYTES = 256 << 20
MAX_PAGE_TOKENS = 1 << 16


class RecordKind(IntEnum):
    """REMOVAL: of a log alone; the page of this key that an earlier record holds is gone."""

    PAGE = 1
    REMOVAL = 2


class Head(NamedTuple):
    """The head of a record. num_bytes: of the whole record."""

    kind: RecordKind
    key: bytes
    num_tokens: int
    num_bytes: int


def encode_head(key: bytes, ids: IntArray, payload: memoryview, kind: RecordKind = RecordKind.PAGE) -> bytes:
    """Head and ids of a record; the payload follows them."""
    assert len(key) == KEY_BYTES and len(ids) <= MAX_PAGE_TOKENS and payload.nbytes <= MAX_PAYLOAD_BYTES
    tokens = ids_bytes(ids)
    body = xxhash.xxh3_128(tokens)
    body.update(payload)
    fields = _FIELDS.pack(_MAGIC, _VERSION, kind, len(ids), payload.nbytes, key, body.digest())
    return fields + xxhash.xxh3_64_digest(fields) + tokens


def encode_removal(key: bytes) -> bytes:
    """Record that takes a page back."""
    return encode_head(key, np.empty(0, np.int32), memoryview(b""), RecordKind.REMOVAL)


def parse_head(data: bytes | memoryview) -> Head | None:
    """The head that begins `data`; None if there is none, or one of another version."""
    if len(data) < HEAD_BYTES or bytes(data[_FIELDS.size : HEAD_BYTES]) != xxhash.xxh3_64_digest(data[: _FIELDS.size]):
        return None
    magic, version, kind, num_tokens, payload_bytes, key, _ = _FIELDS.unpack(data[: _FIELDS.size])
    if magic != _MAGIC or version != _VERSION or kind not in (RecordKind.PAGE, RecordKind.REMOVAL):
        return None
    if num_tokens > MAX_PAGE_TOKENS or payload_bytes > MAX_PAYLOAD_BYTES:
        return None
    return Head(RecordKind(kind), key, num_tokens, HEAD_BYTES + 4 * num_tokens + payload_bytes)


def is_page(head: memoryview, payload: memoryview, key: bytes, ids: IntArray) -> bool:
    """True if `head` (head and ids) and `payload` are, unchanged, what encode_head() was given for this key and ids."""
    tokens = ids_bytes(ids)
    expected = HEAD_BYTES + len(tokens)
    found = parse_head(head)
    if found is None or found.kind is not RecordKind.PAGE or found.key != key or len(head) != expected:
        return False
    if found.num_bytes != expected + payload.nbytes or bytes(head[HEAD_BYTES:]) != tokens:
        return False
    body = xxhash.xxh3_128(tokens)
    body.update(payload)
    return bytes(head[_FIELDS.size - 16 : _FIELDS.size]) == body.digest()


def head_bytes(num_tokens: int) -> int:
    """Bytes before the payload of a page of so many tokens."""
    return HEAD_BYTES + 4 * num_tokens


def ids_bytes(ids: IntArray) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()
