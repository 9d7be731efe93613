"""The seam between the domain and the wire to one worker: messages as bytes one way, typed errors the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from radixmesh.worker.v1 import worker_pb2


class RankTransport(Protocol):
    """A connection to one worker with one Execute stream. Every method but close() raises MeshError when it is lost."""

    def open(self) -> None:
        """Starts the Execute stream; connects when it is written to."""
        ...

    async def write(self, data: bytes) -> None:
        """Sends an encoded ExecuteRequest. A stream that has ended raises the reason of its end."""
        ...

    async def read(self) -> bytes:
        """The next encoded ExecuteResponse. Raises GROUP_LOST when the worker ended the stream well."""
        ...

    def cancel(self) -> None:
        """Drops the Execute stream. Idempotent."""
        ...

    async def form_group(self, request: worker_pb2.FormGroupRequest) -> None:
        """Returns when the worker has met the other ranks."""
        ...

    async def leave_group(self, request: worker_pb2.LeaveGroupRequest) -> None: ...

    async def put_blob(self, blob_hash: str, data: bytes) -> None:
        """Returns when the worker has the blob. Raises what it says of it."""
        ...

    def snapshot(self, request: worker_pb2.SnapshotCacheRequest) -> AsyncIterator[worker_pb2.SnapshotCacheResponse]:
        """The worker's page records in ascending ranges."""
        ...

    async def prepare_transfer(
        self, request: worker_pb2.PrepareTransferRequest
    ) -> worker_pb2.PrepareTransferResponse: ...

    async def renew_transfers(self, request: worker_pb2.RenewTransfersRequest) -> None: ...

    async def start_transfer(self, request: worker_pb2.StartTransferRequest) -> None:
        """Returns when the pages are gathered."""
        ...

    async def commit_transfer(self, request: worker_pb2.CommitTransferRequest) -> worker_pb2.CommitTransferResponse: ...

    def watch_transfer(
        self, request: worker_pb2.WatchTransferRequest
    ) -> AsyncIterator[worker_pb2.WatchTransferResponse]: ...

    async def abort_transfer(self, request: worker_pb2.AbortTransferRequest) -> None: ...

    async def fetch_pages(self, request: worker_pb2.FetchPagesRequest) -> worker_pb2.FetchPagesResponse:
        """Returns when host pages are filled from the worker's store, as far as that has them."""
        ...

    async def close(self) -> None:
        """Drops the connection. Idempotent; raises nothing."""
        ...


# A transport to a worker's address, which connects lazily. Raises MeshError for files of TLS that cannot be used.
Connect = Callable[[str], RankTransport]
