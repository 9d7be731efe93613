"""The peers over gRPC: streams and calls as the domain sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health_pb2

from radixmesh.daemons.router.peers.encode_stream import EncodeStream
from radixmesh.daemons.router.peers.frame_stream import FrameStream, Req, Resp
from radixmesh.daemons.router.peers.tokenizer_pool import TokenizerReplica
from radixmesh.daemons.router.placement.cache_view import CacheChange, Insert, Split, Tier, Trim
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.cancellation import raise_if_cancelled
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.rpc.wire_bounds import parse_frame
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.tracing import TRACEPARENT, current_context
from radixmesh.detokenizer.v1 import detokenizer_pb2
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    from radixmesh.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

log = get_logger(__name__)

_Call = grpc.aio.StreamStreamCall[Req, bytes]
_SERVE = "/radixmesh.scheduler.v1.SchedulerService/Serve"
_DETOKENIZE = "/radixmesh.detokenizer.v1.DetokenizerService/Detokenize"
_ENCODE_EACH = "/radixmesh.tokenizer.v1.TokenizerService/EncodeEach"
# For calls that still run on a channel that was replaced.
_CLOSE_S = 5.0
# After which a tokenizer that had no EncodeEach is asked for it again: it may have been upgraded.
_UNARY_S = 60.0
# For the status of a call that cannot be written to: it is there, or on its way.
_STATUS_S = 1.0
_MAX_STORE_ID = 64


class GrpcFrameStream(FrameStream[Req, Resp]):
    """A bidi call on a channel of its own: a peer that hung does not hold up the next attempt.

    parse: makes a frame of bytes; grpc's own parsing would log what is none, and call it the end of the stream.
    """

    def __init__(
        self, channel: grpc.aio.Channel, call: _Call[Req], address: str, parse: Callable[[bytes], Resp]
    ) -> None:
        self._channel = channel
        self._call = call
        self._address = address
        self._parse = parse

    async def send(self, frame: Req) -> None:
        try:
            await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError) as error:
            # The call has ended, or ends: a refusal that meets a write leaves nothing of its reason in the write's own
            # error. The call's status has it.
            raise_if_cancelled()
            raise await self._reason() from error

    async def receive(self) -> Resp | None:
        try:
            frame = await self._call.read()
        except grpc.RpcError as error:
            raise_if_cancelled()
            raise mesh_error_from_rpc(error) from error
        except grpc.aio.InternalError as error:
            raise_if_cancelled()
            raise await self._reason() from error
        raise_if_cancelled()
        return None if frame is grpc.aio.EOF else self._parse(cast("bytes", frame))

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _reason(self) -> MeshError:
        """Why the call has ended, by its status."""
        try:
            async with asyncio.timeout(_STATUS_S):
                code, details = await self._call.code(), await self._call.details()
                trailing = await self._call.trailing_metadata()
        except TimeoutError:
            return _broke_off(self._address, "a frame could not be written")
        if code is grpc.StatusCode.OK:
            return _broke_off(self._address, "the peer ended the stream")
        initial = grpc.aio.Metadata()
        return mesh_error_from_rpc(grpc.aio.AioRpcError(code, initial, trailing or initial, details))


class _SharedChannelStream(GrpcFrameStream[Req, Resp]):
    """A bidi call on a channel that other calls use too."""

    async def close(self) -> None:
        self._call.cancel()


def _broke_off(address: str, why: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, f"{address}: {why}", {"daemon": address})


def _call(channel: grpc.aio.Channel, method: str, serialize: Callable[[Req], bytes]) -> _Call[Req]:
    multi: grpc.aio.StreamStreamMultiCallable[Any, bytes] = channel.stream_stream(
        method, request_serializer=cast("Any", serialize), response_deserializer=None
    )
    return multi()


def dial_scheduler(
    address: str, tls: TlsFiles | None = None
) -> FrameStream[scheduler_pb2.ServeRequest, scheduler_pb2.ServeResponse]:
    channel = open_channel(address, tls)
    call: _Call[scheduler_pb2.ServeRequest] = _call(channel, _SERVE, scheduler_pb2.ServeRequest.SerializeToString)
    return GrpcFrameStream(channel, call, address, lambda raw: parse_frame(raw, scheduler_pb2.ServeResponse))


def dial_detokenizer(
    address: str, tls: TlsFiles | None = None
) -> FrameStream[detokenizer_pb2.DetokenizeRequest, detokenizer_pb2.DetokenizeResponse]:
    channel = open_channel(address, tls)
    serialize = detokenizer_pb2.DetokenizeRequest.SerializeToString
    call: _Call[detokenizer_pb2.DetokenizeRequest] = _call(channel, _DETOKENIZE, serialize)
    return GrpcFrameStream(channel, call, address, lambda raw: parse_frame(raw, detokenizer_pb2.DetokenizeResponse))


async def watch_cache(
    address: str, after_revision: int | None, takes_store: bool, tls: TlsFiles | None = None
) -> AsyncIterator[CacheChange]:
    """The scheduler's WatchCache, on a channel of its own. takes_store: with what lies in a store. Raises MeshError as
    it ends."""
    channel = open_channel(address, tls)
    try:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchCache(
            scheduler_pb2.WatchCacheRequest(after_revision=after_revision, takes_store_tier=takes_store)
        )
        try:
            async for message in call:
                yield cache_change(message)
        except grpc.RpcError as error:
            raise_if_cancelled()
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                message_text = f"{address} tells nobody what it has cached"
                raise MeshError(
                    ErrorReason.ERROR_REASON_UNSUPPORTED, message_text, {"feature": "WatchCache"}
                ) from error
            raise mesh_error_from_rpc(error) from error
    finally:
        await channel.close()


async def flush_cache(address: str, timeout_s: float, tls: TlsFiles | None = None) -> int:
    """Pages that the scheduler had cached. Raises MeshError, DEADLINE_EXCEEDED if something still runs."""
    async with open_channel(address, tls) as channel:
        request = scheduler_pb2.FlushCacheRequest(timeout_ms=max(1, int(1000 * timeout_s)))
        try:
            # The scheduler's own deadline first: its error says what still runs.
            answer = await scheduler_pb2_grpc.SchedulerServiceStub(channel).FlushCache(
                request, timeout=timeout_s + _STATUS_S
            )
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error
        return answer.flushed_pages


def cache_change(message: scheduler_pb2.WatchCacheResponse) -> CacheChange:
    """A message of WatchCache as placement takes it. Raises MeshError for broken arrays."""
    return CacheChange(
        revision=message.revision,
        is_snapshot=message.is_snapshot,
        is_reset=message.is_reset,
        splits=[Split(node=split.node, upper=split.upper, num_upper=split.num_upper) for split in message.splits],
        inserts=[
            Insert(
                node=insert.node,
                parent=insert.parent,
                ids=insert.ids,
                namespace=insert.cache_namespace,
                weights_version=insert.weights_version,
                # Of a tier that is not known here: no prefix is further away than the store's.
                tier=Tier(min(insert.tier, Tier.STORE)) if insert.tier >= 0 else Tier.STORE,
            )
            for insert in message.inserts
        ],
        trims=[Trim(node=trim.node, num_left=trim.num_left) for trim in message.trims],
        evicted=unpack_ints(message.evicted_nodes, "evicted_nodes").tolist(),
        store_id=message.store_id[:_MAX_STORE_ID],
    )


class GrpcTokenizer(TokenizerReplica):
    """A tokenizer daemon. The channel lasts, so it is replaced when the files of TLS are."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        self.address = address
        self._tls = tls or TlsFiles()
        self._closing: set[asyncio.Task[None]] = set()
        self._encoding: EncodeStream | None = None
        self._unary_until_s = 0.0
        self._open()

    async def encode(self, request: tokenizer_pb2.EncodeRequest, timeout_s: float) -> tokenizer_pb2.EncodeResponse:
        stub = self._current()
        stream = self._encode_stream()
        if stream is not None and stream.takes(request.ByteSize()):
            try:
                return await stream.encode(request, current_context(), timeout_s)
            except MeshError as error:
                if not (stream.is_over and error.reason is ErrorReason.ERROR_REASON_UNSUPPORTED):
                    raise
                self._unary_until_s = time.monotonic() + _UNARY_S
        try:
            return await stub.Encode(request, timeout=timeout_s, metadata=_trace_metadata())
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error

    def begin(self, request: tokenizer_pb2.EncodeRequest) -> asyncio.Future[tokenizer_pb2.EncodeResponse] | None:
        self._current()
        stream = self._encode_stream()
        if stream is None or not stream.has_answered or not stream.takes(request.ByteSize()):
            return None
        return stream.begin(request, current_context())

    async def decode(self, request: tokenizer_pb2.DecodeRequest, timeout_s: float) -> tokenizer_pb2.DecodeResponse:
        try:
            return await self._current().Decode(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error

    async def compile_grammar(
        self, request: tokenizer_pb2.CompileGrammarRequest, timeout_s: float
    ) -> tokenizer_pb2.CompileGrammarResponse:
        try:
            return await self._current().CompileGrammar(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error

    async def vocabulary(self, timeout_s: float) -> tokenizer_pb2.GetVocabularyResponse:
        try:
            return await self._current().GetVocabulary(tokenizer_pb2.GetVocabularyRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise mesh_error_from_rpc(error) from error

    async def is_working(self, timeout_s: float) -> bool:
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer: health_pb2.HealthCheckResponse = await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        if self._encoding is not None:
            await self._encoding.close()
        await asyncio.gather(self._channel.close(), *self._closing)

    def _encode_stream(self) -> EncodeStream | None:
        """The stream for short calls, opened anew where it has ended; None: this tokenizer has none."""
        if self._encoding is None or self._encoding.is_over:
            if time.monotonic() < self._unary_until_s:
                return None
            serialize = tokenizer_pb2.EncodeEachRequest.SerializeToString
            call: _Call[tokenizer_pb2.EncodeEachRequest] = _call(self._channel, _ENCODE_EACH, serialize)
            stream = _SharedChannelStream(
                self._channel, call, self.address, lambda raw: parse_frame(raw, tokenizer_pb2.EncodeEachResponse)
            )
            self._encoding = EncodeStream(stream, self.address)
        return self._encoding

    def _open(self) -> None:
        self._stamp = self._tls.stamp()
        self._channel = open_channel(self.address, self._tls)
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)

    def _current(self) -> TokenizerServiceAsyncStub:
        if self._tls.has_client and self._tls.stamp() != self._stamp:
            former = self._channel
            try:
                self._open()
            except MeshError as error:  # Files that are half replaced: the next call looks again.
                self._stamp = ()
                log.warning("certificates_not_reloaded", error=str(error))
                return self._stub
            # Its stream ends with the former channel, behind the calls that it has.
            self._encoding = None
            task = asyncio.ensure_future(former.close(_CLOSE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._stub


def _trace_metadata() -> tuple[tuple[str, str], ...] | None:
    context = current_context()
    return ((TRACEPARENT, context),) if context else None
