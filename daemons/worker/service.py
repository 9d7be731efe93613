"""The gRPC server of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import grpc

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import check_peer_names
from radixmesh.daemons.worker.core import WorkerCore
from radixmesh.daemons.worker.kv_transfer.device_memory import check_device_memory
from radixmesh.daemons.worker.kv_transfer.transfer_service import receive
from radixmesh.daemons.worker.stream.result_stream import ResultStream, Send
from radixmesh.daemons.worker.stream.session import ExecuteSession
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

_ExecuteContext = grpc.aio.ServicerContext[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Validates, converts, delegates to the core. open_stream: the writing end of each Execute stream."""

    def __init__(self, core: WorkerCore, open_stream: Callable[[Send], ResultStream] = ResultStream) -> None:
        self._core = core
        self._open_stream = open_stream

    # A coroutine that writes itself: messages come and go independently. The stub's type knows generators only.
    async def Execute(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: _ExecuteContext
    ) -> None:
        stream = self._open_stream(context.write)
        session = ExecuteSession(self._core, stream.fault_of, may_merge=stream.may_merge)
        reader = asyncio.ensure_future(_read_all(request_iterator, session))
        try:
            # Whatever ends the stream comes through the outbox: a write that is cut off half-way could not be followed
            # by the status that says why.
            while (response := await session.next_response()) is not None:
                await stream.write(response)
            await stream.flush()
        finally:
            session.close()
            stream.close()
            reader.cancel()
            await asyncio.wait((reader,))

    async def SnapshotCache(
        self, request: worker_pb2.SnapshotCacheRequest, context: object
    ) -> AsyncIterator[worker_pb2.SnapshotCacheResponse]:
        for message in await self._core.snapshot(request.epoch, request.instance_id):
            yield message

    async def GetCapabilities(
        self, request: worker_pb2.GetCapabilitiesRequest, context: object
    ) -> worker_pb2.GetCapabilitiesResponse:
        return worker_pb2.GetCapabilitiesResponse(
            hello=self._core.hello,
            capabilities=self._core.capabilities(),
            highest_epoch=self._core.ledger.highest_epoch,
            holder_instance_id=self._core.ledger.holder_instance_id,
            transfers=self._core.transfers.counts(),
        )

    async def FormGroup(self, request: worker_pb2.FormGroupRequest, context: object) -> worker_pb2.FormGroupResponse:
        check_peer_names(rendezvous=request.rendezvous)
        for name in request.member_instance_ids:
            check_peer_names(member_instance_ids=name)
        await self._core.formation.form(request)
        return worker_pb2.FormGroupResponse()

    async def LeaveGroup(self, request: worker_pb2.LeaveGroupRequest, context: object) -> worker_pb2.LeaveGroupResponse:
        await self._core.formation.leave(request.epoch, request.instance_id)
        return worker_pb2.LeaveGroupResponse()

    async def PutBlob(self, request: worker_pb2.PutBlobRequest, context: object) -> worker_pb2.PutBlobResponse:
        if request.WhichOneof("content") == "nixl":
            raise _unsupported("blobs over NIXL", "nixl")
        if not request.HasField("data"):
            message = "content is missing: send data"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "data"})
        # Hashing megabytes takes milliseconds that results would wait for.
        was_known = await asyncio.to_thread(self._core.put_blob, request.hash, request.data)
        return worker_pb2.PutBlobResponse(was_known=was_known, ttl_ms=int(self._core.blobs.ttl_s * 1000))

    async def Profile(self, request: worker_pb2.ProfileRequest, context: object) -> worker_pb2.ProfileResponse:
        return worker_pb2.ProfileResponse(path=await self._core.profile(request.action, request.num_steps))

    async def Stage(self, request: worker_pb2.StageRequest, context: object) -> worker_pb2.StageResponse:
        what = request.WhichOneof("what")
        if what is None:
            message = "nothing to stage: set weights_path, adapter or expert_placement"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "what"})
        raise _unsupported(f"staging {what}", what)

    async def PrepareTransfer(
        self, request: worker_pb2.PrepareTransferRequest, context: object
    ) -> worker_pb2.PrepareTransferResponse:
        return worker_pb2.PrepareTransferResponse(region=self._core.transfers.prepare(request))

    async def RenewTransfers(
        self, request: worker_pb2.RenewTransfersRequest, context: object
    ) -> worker_pb2.RenewTransfersResponse:
        num = self._core.transfers.renew(request.epoch, request.instance_id, request.transfer_ids, request.lease_ms)
        return worker_pb2.RenewTransfersResponse(num_renewed=num)

    async def StartTransfer(
        self, request: worker_pb2.StartTransferRequest, context: object
    ) -> worker_pb2.StartTransferResponse:
        check_peer_names(address=request.address, transfer_id=request.region.transfer_id)
        check_device_memory(request.region.device)
        await self._core.transfers.start(request)
        return worker_pb2.StartTransferResponse()

    async def WriteTransfer(
        self, request_iterator: AsyncIterator[worker_pb2.WriteTransferRequest], context: object
    ) -> AsyncIterator[worker_pb2.WriteTransferResponse]:
        async with aclosing(receive(self._core.transfers, request_iterator)) as answers:
            async for answer in answers:
                yield answer

    async def CommitTransfer(
        self, request: worker_pb2.CommitTransferRequest, context: object
    ) -> worker_pb2.CommitTransferResponse:
        check_peer_names(cache_namespace=request.cache_namespace)
        return await self._core.transfers.commit(request)

    async def FetchPages(self, request: worker_pb2.FetchPagesRequest, context: object) -> worker_pb2.FetchPagesResponse:
        check_peer_names(cache_namespace=request.cache_namespace)
        return worker_pb2.FetchPagesResponse(num_pages=await self._core.fetch_pages(request))

    async def WatchTransfer(
        self, request: worker_pb2.WatchTransferRequest, context: object
    ) -> AsyncIterator[worker_pb2.WatchTransferResponse]:
        async for message in self._core.transfers.watch(request.transfer_id):
            yield message

    async def AbortTransfer(
        self, request: worker_pb2.AbortTransferRequest, context: object
    ) -> worker_pb2.AbortTransferResponse:
        self._core.transfers.abort(request.transfer_id, is_writer_gone=request.is_writer_gone)
        return worker_pb2.AbortTransferResponse()


async def _read_all(requests: AsyncIterator[worker_pb2.ExecuteRequest], session: ExecuteSession) -> None:
    try:
        async for request in requests:
            await session.receive(request)
            del request  # A stream that is idle holds no plan: one may be megabytes.
    except Exception as error:
        session.fail(error)
    else:
        session.finish()


def _unsupported(what: str, feature: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, f"{what}: not offered by this worker", {"feature": feature})
