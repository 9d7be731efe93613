"""Pages in a Redis-compatible server (`pip install radixmesh[kv-redis]`), which replicas share.

The server has the budget: start it with `--maxmemory SIZE --maxmemory-policy allkeys-lru` and without persistence. A
server that refuses a write because it is full is a FULL store, which goes on being read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from radixmesh.daemons.worker.kv_store.backend import (
    KvBackend,
    KvStoreError,
    ReadResult,
    ReadTarget,
    StoredPage,
    StoreFailure,
    Usage,
)
from radixmesh.daemons.worker.kv_store.batches import groups
from radixmesh.daemons.worker.kv_store.memory_backend import fill

try:
    import redis
except ImportError as error:
    raise KvStoreError(
        StoreFailure.SETTINGS, "pages in Redis need its client: pip install 'radixmesh[kv-redis]'"
    ) from error

T = TypeVar("T")

# Bytes and commands of one round trip: a pipeline is in memory as a whole, ours and the server's.
_MAX_BYTES = 16 << 20
_MAX_COMMANDS = 1024
_PREFIX = b"radixmesh:kv:"


class RedisBackend(KvBackend):
    """url: as the redis client reads it, `redis://[user:password@]host:port/db`, `rediss://` with TLS, or `unix://`.

    timeout_s: to connect, and of each send and receive. expire_s: pages leave so long after they were written; None:
    when the server needs room.
    """

    is_shared = True

    def __init__(self, url: str, *, timeout_s: float = 2.0, expire_s: int | None = None) -> None:
        self._expire_s = expire_s
        try:
            self._client = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, max_connections=16
            )
        except ValueError:
            # Its text may have parts of the password.
            message = "no URL of a Redis server: write redis://[USER:PASSWORD@]HOST:PORT/DB"
            raise KvStoreError(StoreFailure.SETTINGS, message) from None
        self._written = 0

    def write(self, pages: Sequence[StoredPage]) -> int:
        num = 0
        for group in _groups(pages, lambda page: page.num_bytes):
            pipeline = self._client.pipeline(transaction=False)
            for page in group:
                record = page.head + bytes(page.payload)
                pipeline.set(_PREFIX + page.key, record, nx=True, ex=self._expire_s)
                self._written += len(record)
            # None: another writer was first.
            num += sum(result is not None for result in _call(pipeline.execute))
        return num

    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        results: list[ReadResult] = []
        for group in _groups(targets, lambda target: target.num_bytes):
            pipeline = self._client.pipeline(transaction=False)
            for target in group:
                # One byte more than a record has, so that a longer one shows, and never all of it.
                pipeline.getrange(_PREFIX + target.key, 0, target.num_bytes)
            for target, record in zip(group, _call(pipeline.execute), strict=True):
                results.append(fill(target, record) if record else ReadResult.ABSENT)
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for group in _groups(keys, len):
            pipeline = self._client.pipeline(transaction=False)
            for key in group:
                pipeline.exists(_PREFIX + key)
            found += [bool(result) for result in _call(pipeline.execute)]
        return found

    def remove(self, keys: Sequence[bytes]) -> None:
        for group in _groups(keys, len):
            names = [_PREFIX + key for key in group]
            _call(lambda names=names: self._client.unlink(*names))  # type: ignore[misc]

    def usage(self) -> Usage:
        return Usage(written_bytes=self._written)

    def close(self) -> None:
        self._client.close()


def _groups(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    return groups(items, size_of, max_bytes=_MAX_BYTES, max_items=_MAX_COMMANDS)


def _call(function: Callable[[], T]) -> T:
    try:
        return function()
    except redis.exceptions.OutOfMemoryError as error:
        message = f"the Redis server is full ({error}): give it a --maxmemory-policy that evicts, or more memory"
        raise KvStoreError(StoreFailure.FULL, message) from error
    except (redis.exceptions.RedisError, OSError) as error:
        message = f"the Redis server does not answer ({error}): look after it"
        raise KvStoreError(StoreFailure.UNAVAILABLE, message) from error
