"""Pages as objects of an S3-compatible server (`pip install radixmesh[kv-s3]`), which replicas share.

The bucket has the budget: give it a lifecycle rule that expires objects. Endpoint, region and credentials are boto3's
own (`AWS_*` variables, `~/.aws`), so none of them is a flag of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from radixmesh.daemons.worker.kv_store.memory_backend import fill

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError as error:
    raise KvStoreError(StoreFailure.SETTINGS, "pages in S3 need boto3: pip install 'radixmesh[kv-s3]'") from error

T = TypeVar("T")
U = TypeVar("U")

_ABSENT = frozenset(("404", "NoSuchKey", "NotFound"))
# Of S3 and of servers that speak it: MinIO says that its disks are full by these.
_FULL = frozenset(
    ("XMinioStorageFull", "InsufficientStorage", "507", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded")
)
_MAX_REMOVED = 1000


class S3Backend(KvBackend):
    """bucket: is there already. prefix: of object names. num_connections: requests at a time; S3 answers each in tens
    of milliseconds, so a batch needs many. endpoint_url: of a server that is not Amazon's; None: boto3's setting."""

    is_shared = True

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint_url: str | None = None,
        timeout_s: float = 5.0,
        num_connections: int = 16,
    ) -> None:
        self._bucket, self._prefix = bucket, prefix
        config = Config(
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            retries={"total_max_attempts": 2, "mode": "standard"},
            max_pool_connections=num_connections,
        )
        try:
            self._client = boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)
        except (BotoCoreError, ValueError) as error:
            raise KvStoreError(StoreFailure.SETTINGS, f"no S3 server can be asked ({error})") from error
        self._threads = ThreadPoolExecutor(num_connections, "kv_store_s3")
        self._written = 0

    def write(self, pages: Sequence[StoredPage]) -> int:
        def put(page: StoredPage) -> int:
            record = page.head + bytes(page.payload)
            self._client.put_object(Bucket=self._bucket, Key=self.name(page.key), Body=record)
            return len(record)

        # Their store has asked for those that are there; a writer beside it writes the same bytes.
        written = self._each(put, pages)
        self._written += sum(written)
        return len(written)

    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        def get(target: ReadTarget) -> ReadResult:
            try:
                response = self._client.get_object(Bucket=self._bucket, Key=self.name(target.key))
            except ClientError as error:
                if _code(error) in _ABSENT:
                    return ReadResult.ABSENT
                raise
            with response["Body"] as body:
                # One byte more than a record has, so that a longer one shows, and never all of it.
                return fill(target, body.read(target.num_bytes + 1))

        return self._each(get, targets)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        def has(key: bytes) -> bool:
            try:
                self._client.head_object(Bucket=self._bucket, Key=self.name(key))
            except ClientError as error:
                if _code(error) in _ABSENT:
                    return False
                raise
            return True

        return self._each(has, keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        def delete(group: Sequence[bytes]) -> None:
            objects = [{"Key": self.name(key)} for key in group]
            self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})

        self._each(delete, [keys[at : at + _MAX_REMOVED] for at in range(0, len(keys), _MAX_REMOVED)])

    def usage(self) -> Usage:
        return Usage(written_bytes=self._written)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def name(self, key: bytes) -> str:
        """Name of a page's object."""
        return f"{self._prefix}{key.hex()}"

    def _each(self, function: Callable[[T], U], items: Sequence[T]) -> list[U]:
        futures = [self._threads.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except ClientError as error:
            failure = StoreFailure.FULL if _code(error) in _FULL else StoreFailure.UNAVAILABLE
            message = f"the S3 server refuses ({error}): look after bucket, credentials and room"
            raise KvStoreError(failure, message) from error
        except (BotoCoreError, OSError) as error:
            message = f"the S3 server does not answer ({error}): look after it"
            raise KvStoreError(StoreFailure.UNAVAILABLE, message) from error
        finally:
            # Targets are the caller's again only when nobody writes to them any more.
            for future in futures:
                future.cancel() or future.exception()


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
