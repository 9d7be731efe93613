"""Streams of requests to a server that has little memory: few of one connection are read, large frames one at a time.

A stream that is idle has to be listened to, and what it then sends is received whole before anybody here sees its
length. So what may arrive together is bounded by the largest message, and by how many streams of one connection are
read: peers of ours open one. What is made of large frames is bounded by permits, which a stream holds while it handles
one and never while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.gates.fair_semaphore import FairSemaphore
from radixmesh.daemons.runtime.rpc.rpc_errors import deserialized, drive
from radixmesh.daemons.runtime.rpc.wire_bounds import scan_of

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_Context = grpc.aio.ServicerContext[object, object]

_OURS = "/radixmesh."
# A frame of more needs a permit: of empty entries it takes a tenth of a second.
_LARGE_BYTES = 16 << 10
# Large frames that are handled at once, one of each connection.
_NUM_HANDLED = 2
# A stream that is still at its frame then waits for something itself: for a peer that reads, or an earlier step.
_TURN_S = 0.25
_NO_LIMIT = 1 << 30
# Streams, or frames, of all connections. Each such stream has a window's bytes here, or a frame.
_MAX_WAITING = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """max_message_bytes: of any message to the server, unary ones too. max_streams: of one connection that are read;
    the next ones wait, patience_s at most.
    """

    max_message_bytes: int
    max_streams: int = 8
    patience_s: float = 30.0


class StreamGate(grpc.aio.ServerInterceptor):
    """Reads the request streams of our services for their handlers. It comes behind the interceptors that check."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._streams = FairSemaphore(_NO_LIMIT, max_per_peer=limits.max_streams, max_waiting=_MAX_WAITING)
        self._frames = FairSemaphore(_NUM_HANDLED, max_per_peer=1, max_waiting=_MAX_WAITING)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or handler.stream_stream is None or not method.startswith(_OURS):
            return handler
        behaviour = cast("Callable[[object, _Context], object]", handler.stream_stream)
        deserialize = cast("Callable[[bytes], Message]", handler.request_deserializer)
        scan = scan_of(method)

        def message_of(raw: bytes) -> object:
            return deserialized(deserialize, raw, scan)

        async def call(_: object, context: _Context) -> None:
            peer = _peer_of(context)
            async with AsyncExitStack() as stack:
                await self._enter(stack, peer)
                frames = _Frames(context, peer, message_of, self._frames)
                stack.callback(frames.close)
                await drive(behaviour(frames, context), context)

        return cast(
            "grpc.RpcMethodHandler[_Req, _Resp]",
            grpc.stream_stream_rpc_method_handler(
                call, None, cast("Callable[[object], bytes]", handler.response_serializer)
            ),
        )

    async def _enter(self, stack: AsyncExitStack, peer: str) -> None:
        try:
            async with asyncio.timeout(self._limits.patience_s):
                await stack.enter_async_context(self._streams.permit(peer))
        except TimeoutError:
            most = self._limits.max_streams
            message = f"{most} streams of this connection are open, as many as are read: close some, or open another"
            metadata = {"retry_after_ms": "1000", "max": str(most)}
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, metadata) from None


class _Frames(AsyncIterator[object]):
    """The requests of one stream. Asking for the next says that the one before is handled.

    Not grpc's own iterator: that holds the bytes that it gave last until the next ones are there.
    """

    __slots__ = ("_context", "_is_over", "_message_of", "_peer", "_permits", "_timer")

    def __init__(
        self, context: _Context, peer: str, message_of: Callable[[bytes], object], permits: FairSemaphore
    ) -> None:
        self._context = context
        self._peer = peer
        self._message_of = message_of
        self._permits = permits
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    async def __anext__(self) -> object:
        self._handled()
        raw = grpc.aio.EOF if self._is_over else await self._context.read()
        if raw is grpc.aio.EOF:
            self._is_over = True
            raise StopAsyncIteration
        data = cast(bytes, raw)
        if len(data) > _LARGE_BYTES:
            await self._permits.take(self._peer)
            self._timer = asyncio.get_running_loop().call_later(_TURN_S, self._handled)
            if self._is_over:  # The call ended in the same moment.
                self._handled()
        return self._message_of(data)

    def close(self) -> None:
        """The call is over: no frame of it takes a permit any more."""
        self._is_over = True
        self._handled()

    def _handled(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._permits.give_back(self._peer)


def _peer_of(context: _Context) -> str:
    """The connection that a call came by. Those of a unix socket have one name, and count one by one."""
    peer = context.peer()
    return f"{peer}#{id(context)}" if peer.startswith("unix") else peer
