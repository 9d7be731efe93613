"""Pages as objects of an S3-compatible server, moved by NIXL's object plugin (`pip install radixmesh[kv-nixl]`).

Objects have the names that `s3_backend.py` gives them: stores of both kinds share a bucket. NIXL reads and writes; it
has no call to delete an object, and tells no failures apart, so that boto3 deletes, looks up and finds out.
Credentials and region are the AWS SDK's own (`AWS_*` variables, `~/.aws`), as they are boto3's.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

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
from radixmesh.daemons.worker.kv_store.nixl_storage import NixlStorage, Place
from radixmesh.daemons.worker.kv_store.registered_memory import Lane, LanePool, aligned
from radixmesh.daemons.worker.kv_store.s3_backend import S3Backend

_MAX_OBJECTS = 256
_THREADS = 8


class NixlObjBackend(KvBackend):
    """bucket, prefix, endpoint_url: as S3Backend has them. pool_bytes: of registered memory; a record takes at most a
    quarter. timeout_s: of a group of at most 256 objects. Raises KvStoreError SETTINGS."""

    is_shared = True

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint_url: str | None = None,
        pool_bytes: int = 256 << 20,
        timeout_s: float = 5.0,
    ) -> None:
        self._server = S3Backend(bucket, prefix=prefix, endpoint_url=endpoint_url, timeout_s=timeout_s)
        self._lanes = LanePool(pool_bytes, name="the S3 server", timeout_s=timeout_s)
        options = {"bucket": bucket, "num_threads": str(_THREADS)}
        if endpoint_url is not None:
            # Names of buckets in paths: servers that are not Amazon's seldom have a domain for each.
            scheme = urlsplit(endpoint_url).scheme
            options |= {"endpoint_override": endpoint_url, "scheme": scheme, "use_virtual_addressing": "false"}
        try:
            self._nixl = NixlStorage("OBJ", "OBJ", options, self._lanes)
        except KvStoreError:
            self._server.close()
            raise
        self._written = 0

    def write(self, pages: Sequence[StoredPage]) -> int:
        most = self._lanes.lane_bytes
        for page in pages:
            if aligned(page.num_bytes) > most:
                message = f"a page of {page.num_bytes} bytes is larger than {most}, a quarter of the pool: give it more"
                raise KvStoreError(StoreFailure.TOO_LARGE, message)
        # Their store has asked for those that are there; a writer beside it writes the same bytes.
        for group in groups(pages, lambda page: aligned(page.num_bytes), max_bytes=most, max_items=_MAX_OBJECTS):
            with self._lanes.lane() as lane:
                places = self._places(lane, lane.fill(group), [page.key for page in group])
                is_written = lane.run(lambda lane=lane, places=places: self._nixl.write(lane, places))  # type: ignore[misc]
            if not is_written:
                self._server.write(group[:1])
                message = "NIXL could not write what the S3 server takes: look at its log"
                raise KvStoreError(StoreFailure.UNAVAILABLE, message)
            self._written += sum(page.num_bytes for page in group)
        return len(pages)

    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        results: list[ReadResult] = []
        most = self._lanes.lane_bytes
        for group in groups(targets, lambda target: aligned(target.num_bytes), max_bytes=most, max_items=_MAX_OBJECTS):
            if aligned(group[0].num_bytes) > most:
                results.append(ReadResult.ABSENT)  # Of a store with a larger pool.
                continue
            with self._lanes.lane() as lane:
                results += self._read(lane, group)
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._server.contains(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._server.remove(keys)

    def usage(self) -> Usage:
        return Usage(written_bytes=self._written)

    def close(self) -> None:
        if self._lanes.close():
            self._nixl.close()
        self._server.close()

    def _read(self, lane: Lane, group: Sequence[ReadTarget]) -> list[ReadResult]:
        where = lane.places([target.num_bytes for target in group])
        places = self._places(lane, where, [target.key for target in group])
        for target, (offset, _) in zip(group, where, strict=True):
            # A shorter object is no failure of NIXL's: what was in the lane must not complete it.
            lane.memory[offset : offset + len(target.head)] = 0
        results = [ReadResult.READ] * len(group)
        if not lane.run(lambda: self._nixl.read(lane, places)):
            # One object that is not there fails all of them.
            has = self._server.contains([target.key for target in group])
            results = [ReadResult.READ if is_there else ReadResult.ABSENT for is_there in has]
            there = [place for place, is_there in zip(places, has, strict=True) if is_there]
            if there and not lane.run(lambda: self._nixl.read(lane, there)):
                message = "NIXL cannot read objects that are there: look after the S3 server"
                raise KvStoreError(StoreFailure.UNAVAILABLE, message)
        for target, (offset, _), result in zip(group, where, results, strict=True):
            if result is ReadResult.READ:
                lane.copy_out(target, offset)
        return results

    def _places(self, lane: Lane, where: Sequence[tuple[int, int]], keys: Sequence[bytes]) -> list[Place]:
        return [
            Place(*at, index, self._server.name(key)) for index, (at, key) in enumerate(zip(where, keys, strict=True))
        ]
