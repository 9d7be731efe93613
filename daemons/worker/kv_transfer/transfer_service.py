"""KV transfers over gRPC: the writing end, and the handler of what another worker writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.cancellation import raise_if_cancelled
from radixmesh.daemons.runtime.rpc.hello import check_peer_names
from radixmesh.daemons.runtime.rpc.peer_channels import PeerChannels
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece, check_device_memory
from radixmesh.daemons.worker.kv_transfer.host_process import HostProcess, host_name
from radixmesh.daemons.worker.kv_transfer.receiver import Region
from radixmesh.daemons.worker.kv_transfer.transfers import KvTransfers
from radixmesh.daemons.worker.kv_transfer.transport import (
    WRITE_BYTES,
    ByteArray,
    KvTransport,
    KvWriter,
    RegionMemory,
    checksum_of,
)
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

# A receiver that takes nothing for so long is stopped, or gone without a word.
PATIENCE_S = 10.0
_MAX_DATA_BYTES = 4 << 20


_Call = grpc.aio.StreamStreamCall[worker_pb2.WriteTransferRequest, worker_pb2.WriteTransferResponse]


class GrpcTransport(KvTransport):
    """Over the port that workers have anyway, for machines without anything faster. tls: None = plain.

    before_last_word: awaited when all data is written.
    """

    def __init__(
        self,
        tls: TlsFiles | None = None,
        *,
        patience_s: float = PATIENCE_S,
        before_last_word: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._channels = PeerChannels(tls)
        self._patience_s = patience_s
        self.before_last_word = before_last_word

    def new_memory(self, num_bytes: int) -> RegionMemory:
        return RegionMemory(num_bytes)

    def close(self) -> None:
        self._channels.close()

    @asynccontextmanager
    async def open(self, address: str, region: worker_pb2.TransferRegion, writer: str) -> AsyncIterator[KvWriter]:
        try:
            async with self._channels.channel(address) as channel:
                call = worker_pb2_grpc.WorkerServiceStub(channel).WriteTransfer()
                try:
                    yield GrpcWriter(self, call, worker_pb2.WriteTransferRequest(region=region, writer=writer))
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            raise mesh_error_from_rpc(error) from error
        except TimeoutError as error:
            message = f"the worker at {address} took nothing for {self._patience_s:g} s"
            raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message) from error

    async def give_up(self, address: str, region: worker_pb2.TransferRegion, writer: str) -> None:
        async with GrpcTransport.open(self, address, region, writer) as words:
            assert isinstance(words, GrpcWriter)
            await words.abort()

    async def written(self, call: _Call, request: worker_pb2.WriteTransferRequest) -> None:
        """Sends one message."""
        async with asyncio.timeout(self._patience_s):
            await call.write(request)

    async def answer_of(self, call: _Call) -> None:
        """Returns when the receiver has heard the last word."""
        async with asyncio.timeout(self._patience_s):
            answer = await call.read()
            raise_if_cancelled()
            if isinstance(answer, worker_pb2.WriteTransferResponse):
                return
            code, details = await call.code(), await call.details()
            trailing = await call.trailing_metadata()
        if code is not grpc.StatusCode.OK:
            metadata = trailing or grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
        raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, "the worker ended the transfer without an answer")


class GrpcWriter(KvWriter):
    """The stream of one writer. first: what it begins with."""

    def __init__(self, transport: GrpcTransport, call: _Call, first: worker_pb2.WriteTransferRequest) -> None:
        self._transport = transport
        self._call = call
        self._request = first
        self.is_answered = False
        """The receiver has heard the last word."""

    async def begin(self) -> None:
        """Tells who writes, for a writer whose data goes another way."""
        await self._write()

    async def ask(self, process: HostProcess) -> None:
        """Asks to write to the region's memory from this process; returns when it may. Raises TRANSFER_FAILED."""
        self._request.writer_process.CopyFrom(worker_pb2.HostProcess(**process._asdict()))
        await self._write()
        await self._transport.answer_of(self._call)

    async def wrote(self, offset: int, num_bytes: int, *, is_last: bool = False) -> None:
        """Tells progress on another way. is_last: done() tells it."""
        self._request.offset, self._request.num_written = offset, num_bytes
        if not is_last:
            await self._write()

    async def ending(self) -> None:
        self._request.is_ending = True
        await self._write()

    async def write(self, offset: int, data: ByteArray | DevicePiece) -> None:
        assert not isinstance(data, DevicePiece), "buffers of this transport lie in memory of the host"
        for start in range(0, len(data), WRITE_BYTES):
            self._request.offset = offset + start
            self._request.data = data[start : start + WRITE_BYTES].tobytes()
            await self._write()

    async def done(self, checksum: int, gather_start: worker_pb2.GatherStart | None = None) -> None:
        if self._transport.before_last_word is not None:
            await self._transport.before_last_word()
        self._request.checksum = checksum
        self._request.last_word = worker_pb2.TRANSFER_LAST_WORD_DONE
        if gather_start is not None:
            self._request.gather_start.CopyFrom(gather_start)
        with suppress(asyncio.InvalidStateError):
            await self._transport.written(self._call, self._request)
        await self._transport.answer_of(self._call)
        self.is_answered = True

    async def abort(self) -> None:
        """Says that nothing will be written; returns when the receiver knows."""
        self._request.last_word = worker_pb2.TRANSFER_LAST_WORD_ABORTED
        with suppress(asyncio.InvalidStateError):
            await self._transport.written(self._call, self._request)
        try:
            await self._transport.answer_of(self._call)
        except grpc.aio.AioRpcError as error:
            # Refused: the transfer is over there, or its writer's stream tells of its end. The channel is sound.
            if mesh_error_from_rpc(error).reason != ErrorReason.ERROR_REASON_TRANSFER_FAILED:
                raise

    async def _write(self) -> None:
        try:
            await self._transport.written(self._call, self._request)
        except asyncio.InvalidStateError:
            # The call has ended: its status says why.
            raise_if_cancelled()
            await self._transport.answer_of(self._call)
            raise
        self._request = worker_pb2.WriteTransferRequest()


async def receive(
    transfers: KvTransfers, requests: AsyncIterator[worker_pb2.WriteTransferRequest]
) -> AsyncGenerator[worker_pb2.WriteTransferResponse, None]:
    """Copies what a writer sends into its region, until its last word; answers that, and before it a writer that asks
    for the memory itself. Raises TRANSFER_FAILED or MISSING_FIELD."""
    first = await anext(requests, None)
    if first is None or not first.HasField("region"):
        message = "a writer begins with the region that it writes to"
        raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "region"})
    check_peer_names(transfer_id=first.region.transfer_id, instance_id=first.region.instance_id, writer=first.writer)
    check_device_memory(first.region.device)
    process = _process_of(first)
    region, writer = transfers.open(first.region, first.writer, process), first.writer
    reading: asyncio.Future[worker_pb2.WriteTransferRequest | None] | None = None
    try:
        if process is not None:
            yield worker_pb2.WriteTransferResponse()
        request: worker_pb2.WriteTransferRequest | None = first
        del first
        while request is not None:
            await _take(transfers, region, writer, request)
            if request.last_word:
                yield worker_pb2.WriteTransferResponse()
                return
            reading = asyncio.ensure_future(_next(requests))
            request = None
            # A region that is given up waits for no writer: that may be stopped.
            while not reading.done() and not region.reception.is_over:
                change = region.change()
                await asyncio.wait((reading, change), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
            if not reading.done():
                break
            request = reading.result()
        message = "the transfer is over" if region.reception.is_over else "the writer left without a last word"
        raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message)
    finally:
        if reading is not None:
            reading.cancel()
        transfers.receiver.stream_over(region, writer)


def _process_of(first: worker_pb2.WriteTransferRequest) -> HostProcess | None:
    """The process that asks for the region's memory; None: it does not. Raises INVALID_ARGUMENT."""
    if not first.HasField("writer_process"):
        return None
    process = first.writer_process
    check_peer_names(host=process.host)
    return HostProcess(process.host, process.pid, process.started)


async def _take(transfers: KvTransfers, region: Region, writer: str, request: worker_pb2.WriteTransferRequest) -> None:
    if len(request.data) > _MAX_DATA_BYTES:
        message = f"{len(request.data)} bytes in one message: send at most {_MAX_DATA_BYTES}"
        raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"field": "data", "max": str(_MAX_DATA_BYTES)})
    if request.data:
        transfers.receiver.write(region, writer, request.offset, request.data)
    if request.num_written:
        transfers.receiver.wrote(region, writer, request.num_written, request.offset)
    if request.is_ending:
        transfers.receiver.ending(region, writer)
    if request.last_word == worker_pb2.TRANSFER_LAST_WORD_UNSPECIFIED:
        return
    is_done = request.last_word == worker_pb2.TRANSFER_LAST_WORD_DONE
    check_peer_names(host=request.gather_start.host)
    if is_done and request.gather_start.host == host_name():
        start = request.gather_start
        transfers.receiver.gather_began(region, start.monotonic_ns * 1e-9, start.num_bytes)
    is_sound, memory = True, region.written
    # Bytes on the device are looked at by their stamps alone.
    if is_done and isinstance(memory, np.ndarray):
        is_sound = await asyncio.to_thread(checksum_of, memory) == request.checksum
    transfers.receiver.last_word(region, writer, is_done=is_done, is_sound=is_sound)
    if is_done:
        transfers.written(region)


async def _next(
    requests: AsyncIterator[worker_pb2.WriteTransferRequest],
) -> worker_pb2.WriteTransferRequest | None:
    return await anext(requests, None)
