"""Calls of one message to a server that has little memory: few messages arrive and few large answers leave at a time.

grpc receives the messages of all calls at once, and an answer stays in memory until its client has taken it: 32 calls
of 13 MiB are 400 MiB before a handler runs, and as many answers of four times that. Behind this gate a call that waits
for a permit holds what its stream's window lets in (64 KiB), and calls that hold more than there is room for are told
to come again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.gates.fair_semaphore import FairSemaphore
from radixmesh.daemons.runtime.rpc.rpc_errors import deserialized, drive
from radixmesh.daemons.runtime.rpc.wire_bounds import scan_of
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_Context = grpc.aio.ServicerContext[object, object]
_Call = Callable[[object, _Context], Awaitable[None]]

# Answered at once, whatever else there is to do.
_OPEN = ("/grpc.health.v1.Health/",)
# Calls that wait for a permit to arrive or to leave: each has a window's bytes here.
_MAX_WAITING = 1024
# Requests of no more always find room: their number has a bound elsewhere.
_SMALL_BYTES = 16 << 10
# An answer of more waits for a permit to leave: it is in memory three times meanwhile.
_LARGE_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaryLimits:
    """max_message_bytes: of a request. max_bytes: see Room.

    num_receiving: messages that arrive at once, each of which may be as large as one can be; one connection has less
    than all of them. A message that takes longer than quick_s makes room for others, and goes on arriving where that
    many and one more may. patience_s: for one message to arrive.
    num_sending: large answers that leave at once, one of a connection. send_patience_s: for one of them to leave;
    answers of streams are not looked at.
    """

    max_message_bytes: int
    max_bytes: int
    patience_s: float = 5.0
    send_patience_s: float = 5.0
    quick_s: float = 1.0
    num_receiving: int = 3
    num_sending: int = 1


class Room:
    """Bytes of requests from their arrival until their answers have left.

    max_bytes: of all but small ones; one peer may hold three quarters, and a request that is alone is always taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, peer: str, num_bytes: int) -> Iterator[None]:
        """Within it the bytes count. Raises MeshError OVERLOADED where there is no room."""
        if num_bytes <= _SMALL_BYTES:
            yield
            return
        total, ours = self._held.total(), self._held[peer]
        if total and (total + num_bytes > self._max_bytes or ours + num_bytes > self._max_bytes * 3 // 4):
            message = f"calls of {total} bytes are here already, {ours} of yours: retry later, or on another replica"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        self._held[peer] += num_bytes
        try:
            yield
        finally:
            self._held[peer] -= num_bytes
            if not self._held[peer]:
                del self._held[peer]


class UnaryGate(grpc.aio.ServerInterceptor):
    """Makes streams of one message of the handlers of unary calls: such a handler decides when its message is read.

    Callers see no difference. It comes behind the interceptors that check and type: it is the last one.
    """

    def __init__(self, limits: UnaryLimits) -> None:
        self._limits = limits
        num = limits.num_receiving
        self._receiving = FairSemaphore(num, max_per_peer=num - max(1, num // 4), max_waiting=_MAX_WAITING)
        # Its calls hold bytes already, so that none can wait for a permit.
        self._slow = FairSemaphore(num + 1, max_per_peer=max(2, num // 2), max_waiting=0)
        self._sending = FairSemaphore(limits.num_sending, max_per_peer=1, max_waiting=_MAX_WAITING)
        self._room = Room(limits.max_bytes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler_call_details.method.startswith(_OPEN):
            return handler
        call = self._unary(handler) if handler.unary_unary is not None else self._unary_stream(handler)
        deserialize = cast("Callable[[bytes], Message]", handler.request_deserializer)
        scan = scan_of(handler_call_details.method)

        async def receive_and_call(_: object, context: _Context) -> None:
            await call(deserialized(deserialize, await self._received(context), scan), context)

        return cast(
            "grpc.RpcMethodHandler[_Req, _Resp]",
            grpc.stream_stream_rpc_method_handler(
                receive_and_call,
                None,
                cast("Callable[[object], bytes]", handler.response_serializer),
            ),
        )

    def _unary(self, handler: grpc.RpcMethodHandler[_Req, _Resp]) -> _Call:
        behaviour = cast("Callable[[object, _Context], Awaitable[Message]]", handler.unary_unary)

        async def call(request: object, context: _Context) -> None:
            with self._room.held(context.peer(), cast(Message, request).ByteSize()):
                answer = await behaviour(request, context)
                del request
                await self._send(answer, context)

        return call

    def _unary_stream(self, handler: grpc.RpcMethodHandler[_Req, _Resp]) -> _Call:
        behaviour = cast("Callable[[object, _Context], object]", handler.unary_stream)

        async def call(request: object, context: _Context) -> None:
            responses = behaviour(request, context)
            del request
            await drive(responses, context)

        return call

    async def _send(self, answer: Message, context: _Context) -> None:
        num_bytes = answer.ByteSize()
        if num_bytes <= _LARGE_ANSWER_BYTES:
            await context.write(answer)
            return
        async with self._sending.permit(context.peer()):
            try:
                async with asyncio.timeout(self._limits.send_patience_s):
                    await context.write(answer)  # Until flow control has let the last byte go.
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None  # The client went away.
            except TimeoutError:
                # No status goes past a message that is not sent: the call is reset, and the answer with it let go.
                log.warning("answer_not_read", peer=context.peer(), num_bytes=num_bytes)
                raise asyncio.CancelledError from None

    async def _received(self, context: _Context) -> bytes:
        peer = context.peer()
        await self._receiving.take(peer)
        arrival = _Arrival(peer, self._receiving, self._slow, self._limits)
        try:
            # In the handler's own task, and with one timer: most calls are of a message that is there at once.
            async with asyncio.timeout(None) as limit:
                arrival.begin(limit)
                # Not by iteration: grpc's iterator holds the bytes that it gave last for as long as the call is there.
                raw = await context.read()
        except TimeoutError:
            raise arrival.error() from None
        finally:
            arrival.end()
        if raw is grpc.aio.EOF:
            raise MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, "the call ended without a message: send one")
        return cast(bytes, raw)


class _Arrival:
    """The permit of a message while it arrives. One that is not quick exchanges it for a slow one, or is refused."""

    def __init__(self, peer: str, quick: FairSemaphore, slow: FairSemaphore, limits: UnaryLimits) -> None:
        """peer: it has a permit of `quick`."""
        self._peer = peer
        self._holds = quick
        self._slow = slow
        self._limits = limits
        self._refusal: MeshError | None = None

    def begin(self, limit: asyncio.Timeout) -> None:
        """limit: around the wait for the message."""
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        delay_s = min(self._limits.quick_s, self._limits.patience_s)
        self._timer = self._loop.call_later(delay_s, self._slow_down)

    def end(self) -> None:
        self._timer.cancel()
        self._holds.give_back(self._peer)

    def error(self) -> MeshError:
        """The reason why the limit's time came."""
        message = f"the message did not arrive within {self._limits.patience_s:g} s: send it without a pause"
        return self._refusal or MeshError(ErrorReason.ERROR_REASON_CLIENT_STALLED, message)

    def _slow_down(self) -> None:
        try:
            self._slow.take_now(self._peer)
        except MeshError as error:
            self._refusal = error
            self._limit.reschedule(self._loop.time())
            return
        self._holds.give_back(self._peer)
        self._holds = self._slow
        self._limit.reschedule(self._loop.time() + self._limits.patience_s)
