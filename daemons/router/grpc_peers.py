"""The peers over gRPC: streams and calls as the domain sees them."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.frame_stream import FrameStream, Req, Resp
from radixmesh.daemons.router.tokenizer_pool import TokenizerReplica
from radixmesh.daemons.runtime.channel import open_channel
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc_errors import mesh_error_from_rpc
from radixmesh.detokenizer.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

_Call = grpc.aio.StreamStreamCall[Req, Resp]


class GrpcFrameStream(FrameStream[Req, Resp]):
    """A bidi call on a channel of its own: a peer that hung does not hold up the next attempt."""

    def __init__(self, channel: grpc.aio.Channel, call: _Call[Req, Resp], address: str) -> None:
        self._channel = channel
        self._call = call
        self._address = address

    async def send(self, frame: Req) -> None:
        try:
            await self._call.write(frame)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            # The call has ended. Why is what receive() says.
            raise await self._reason() from error

    async def receive(self) -> Resp | None:
        try:
            frame = await self._call.read()
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error
        return None if frame is grpc.aio.EOF else cast("Resp", frame)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _reason(self) -> MeshError:
        code, details = await self._call.code(), await self._call.details()
        message = f"{self._address}: {code.name} {details or ''}".rstrip()
        return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": self._address})


def dial_scheduler(address: str) -> FrameStream[scheduler_pb2.ServeRequest, scheduler_pb2.ServeResponse]:
    channel = open_channel(address)
    return GrpcFrameStream(channel, scheduler_pb2_grpc.SchedulerServiceStub(channel).Serve(), address)


def dial_detokenizer(
    address: str,
) -> FrameStream[detokenizer_pb2.DetokenizeRequest, detokenizer_pb2.DetokenizeResponse]:
    channel = open_channel(address)
    return GrpcFrameStream(channel, detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Detokenize(), address)


class GrpcTokenizer(TokenizerReplica):
    """A tokenizer daemon."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)

    async def encode(self, request: tokenizer_pb2.EncodeRequest, timeout_s: float) -> tokenizer_pb2.EncodeResponse:
        try:
            return await self._stub.Encode(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error

    async def decode(self, request: tokenizer_pb2.DecodeRequest, timeout_s: float) -> tokenizer_pb2.DecodeResponse:
        try:
            return await self._stub.Decode(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error

    async def vocabulary(self, timeout_s: float) -> tokenizer_pb2.GetVocabularyResponse:
        try:
            return await self._stub.GetVocabulary(tokenizer_pb2.GetVocabularyRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error

    async def close(self) -> None:
        await self._channel.close()
