"""gRPC towards the workers: a RankTransport over a channel of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import TypeVar

import grpc

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.cancellation import raise_if_cancelled
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.scheduler.group.rank_transport import Connect
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

_EXECUTE = "/radixmesh.worker.v1.WorkerService/Execute"
T = TypeVar("T")
_Call = grpc.aio.StreamStreamCall[bytes, bytes]


class GrpcRank:
    """See RankTransport. The channel is closed with it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._call: _Call | None = None
        # grpc takes one message of a call at a time.
        self._writing = asyncio.Lock()

    def open(self) -> None:
        execute: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            _EXECUTE, request_serializer=_as_is, response_deserializer=_as_is
        )
        self._call = execute()

    async def write(self, data: bytes) -> None:
        assert self._call is not None
        try:
            async with self._writing:
                await self._call.write(data)
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            raise mesh_error_from_rpc(error) from error
        except asyncio.InvalidStateError as error:
            # The call had ended before: its status says why.
            raise_if_cancelled()
            raise await self._reason() from error
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            raise _lost() from error

    async def read(self) -> bytes:
        assert self._call is not None
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            raise mesh_error_from_rpc(error) from error
        raise_if_cancelled()
        if isinstance(answer, bytes):
            return answer
        raise await self._reason()

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def form_group(self, request: worker_pb2.FormGroupRequest) -> None:
        await _called(self._stub.FormGroup(request))

    async def leave_group(self, request: worker_pb2.LeaveGroupRequest) -> None:
        await _called(self._stub.LeaveGroup(request))

    async def put_blob(self, blob_hash: str, data: bytes) -> None:
        await _called(self._stub.PutBlob(worker_pb2.PutBlobRequest(hash=blob_hash, data=data)))

    async def snapshot(
        self, request: worker_pb2.SnapshotCacheRequest
    ) -> AsyncIterator[worker_pb2.SnapshotCacheResponse]:
        try:
            async for message in self._stub.SnapshotCache(request):
                yield message
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            raise mesh_error_from_rpc(error) from error

    async def prepare_transfer(self, request: worker_pb2.PrepareTransferRequest) -> worker_pb2.PrepareTransferResponse:
        return await _called(self._stub.PrepareTransfer(request))

    async def renew_transfers(self, request: worker_pb2.RenewTransfersRequest) -> None:
        await _called(self._stub.RenewTransfers(request))

    async def start_transfer(self, request: worker_pb2.StartTransferRequest) -> None:
        await _called(self._stub.StartTransfer(request))

    async def commit_transfer(self, request: worker_pb2.CommitTransferRequest) -> worker_pb2.CommitTransferResponse:
        return await _called(self._stub.CommitTransfer(request))

    async def watch_transfer(
        self, request: worker_pb2.WatchTransferRequest
    ) -> AsyncIterator[worker_pb2.WatchTransferResponse]:
        try:
            async for message in self._stub.WatchTransfer(request):
                yield message
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            raise mesh_error_from_rpc(error) from error

    async def abort_transfer(self, request: worker_pb2.AbortTransferRequest) -> None:
        await _called(self._stub.AbortTransfer(request))

    async def fetch_pages(self, request: worker_pb2.FetchPagesRequest) -> worker_pb2.FetchPagesResponse:
        return await _called(self._stub.FetchPages(request))

    async def close(self) -> None:
        self.cancel()
        with suppress(grpc.aio.AioRpcError):
            await self._channel.close()

    async def _reason(self) -> MeshError:
        """Why the stream has ended, by its status."""
        assert self._call is not None
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return _lost()
        details, trailing = await self._call.details(), await self._call.trailing_metadata()
        initial = grpc.aio.Metadata()
        return mesh_error_from_rpc(grpc.aio.AioRpcError(code, initial, trailing or initial, details))


def grpc_connect(tls: TlsFiles | None = None) -> Connect:
    """Connects over gRPC. tls: read at each connect; None = plain."""
    return lambda address: GrpcRank(open_channel(address, tls))


async def _called(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise_if_cancelled()
        raise mesh_error_from_rpc(error) from error


def _as_is(data: bytes) -> bytes:
    return data


def _lost() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_GROUP_LOST, "the worker closed the step stream")
