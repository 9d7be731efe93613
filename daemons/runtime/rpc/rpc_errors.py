"""Errors at the border to gRPC: MeshError to status + ErrorInfo on servers, and back on clients.

The interceptor takes over deserialisation, so that bytes which are no message become a typed INVALID_ARGUMENT (grpc's
own answer is INTERNAL), and it closes a handler's generator when its call ends, so that `finally` blocks run at once.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError, reason_of
from radixmesh.daemons.runtime.rpc.wire_bounds import scan_of
from radixmesh.daemons.runtime.telemetry.logs import get_logger, set_request

log = get_logger(__name__)

DOMAIN = "radixmesh"
REQUEST_ID_KEY = "radixmesh-request-id"
_DETAILS_KEY = "grpc-status-details-bin"
# grpc refuses trailers beyond 8 KiB and the reason would be lost with them: an error may quote what a client sent.
_MAX_MESSAGE_CHARS = 300
_MAX_VALUE_CHARS = 200
_MAX_VALUES = 8

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_Context = grpc.aio.ServicerContext[object, object]
_Deserializer = Callable[[bytes], object]
_Handler = Callable[[object, _Context], object]

# Reasons for statuses that came without ErrorInfo: from grpc itself, a proxy, or a peer that died.
_STATUS_TO_REASON = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
    grpc.StatusCode.UNAVAILABLE: ErrorReason.ERROR_REASON_NO_REPLICA,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorReason.ERROR_REASON_ABORTED,
    grpc.StatusCode.UNIMPLEMENTED: ErrorReason.ERROR_REASON_UNSUPPORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorReason.ERROR_REASON_TOO_LARGE,
    grpc.StatusCode.UNAUTHENTICATED: ErrorReason.ERROR_REASON_UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorReason.ERROR_REASON_PERMISSION_DENIED,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into typed statuses. The daemon lives on, whatever a handler raises.

    on_error: told of every error that leaves, for counting.
    """

    def __init__(self, on_error: Callable[[MeshError], None] | None = None) -> None:
        self._on_error = on_error

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # grpc answers UNIMPLEMENTED.
        request_id = _request_id_in(handler_call_details.invocation_metadata)
        return cast("grpc.RpcMethodHandler[_Req, _Resp]", self._wrap(handler, handler_call_details.method, request_id))

    def _wrap(
        self, handler: grpc.RpcMethodHandler[_Req, _Resp], method: str, request_id: str
    ) -> grpc.RpcMethodHandler[object, object]:
        behaviour = cast(
            _Handler, handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        )
        deserialize = cast("_Deserializer", handler.request_deserializer or bytes)
        scan = None if handler.request_deserializer is None else scan_of(method)

        async def call(raw: object, context: _Context) -> object:
            if request_id:
                set_request(request_id)
            try:
                request = (
                    _TypedRequests(cast("AsyncIterator[bytes]", raw), deserialize, scan)
                    if handler.request_streaming
                    else deserialized(deserialize, cast(bytes, raw), scan)
                )
                if handler.response_streaming:
                    await drive(behaviour(request, context), context)
                    return None
                return await cast("Awaitable[object]", behaviour(request, context))
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                typed = _as_mesh_error(error, method)
                # grpc keeps the exception of an abort in a cycle. Through it frames, and what a client sent in them,
                # would wait for a full collection: 32 refused messages of 16 MiB were 600 MiB.
                for each in (error, typed):
                    each.__traceback__ = each.__context__ = each.__cause__ = None
                raw = request = None
            return await self._abort(context, typed)

        serialize = cast("Callable[[object], bytes] | None", handler.response_serializer)
        return FACTORIES[handler.request_streaming, handler.response_streaming](call, None, serialize)

    async def _abort(self, context: _Context, error: MeshError) -> object:
        if self._on_error is not None:
            self._on_error(error)
        code = grpc.StatusCode[error.status]
        message = _cut(error.message, _MAX_MESSAGE_CHARS)
        return await context.abort(code, message, ((_DETAILS_KEY, _details_of(error, code)),))


# In the words of grpc.aio: a message of a stream could not be written, as its peer went in that very moment.
_NOT_WRITTEN = "Internal error from Core"
# Of grpc's own module, which does not export it: a stream is read while this daemon's server stops.
_SERVER_STOPPED = "_ServerStoppedError"


class _TypedRequests:
    """The requests of a stream, deserialised one by one; broken bytes raise MeshError out of the iteration."""

    __slots__ = ("_deserialize", "_raw", "_scan")

    def __init__(
        self, raw: AsyncIterator[bytes], deserialize: _Deserializer, scan: Callable[[bytes], None] | None
    ) -> None:
        self._raw = raw
        self._deserialize = deserialize
        self._scan = scan

    def __aiter__(self) -> _TypedRequests:
        return self

    async def __anext__(self) -> object:
        return deserialized(self._deserialize, await self._raw.__anext__(), self._scan)


def mesh_error_from_rpc(error: grpc.RpcError) -> MeshError:
    """The MeshError that a failed call carries.

    Without ErrorInfo of our domain, or with a reason of a newer version (kept as metadata "reason"), the status counts.
    """
    if not isinstance(error, grpc.aio.AioRpcError):
        return MeshError(ErrorReason.ERROR_REASON_INTERNAL, f"the call failed: {error}")
    message = error.details() or f"the call failed with {error.code().name}"
    metadata: dict[str, str] = {}
    found = _info_in(error.trailing_metadata() or ())
    if found is not None:
        info, said = found
        metadata = dict(info.metadata)
        # grpc puts its own words ("Stream removed") in the place of details where the stream's reset overtakes them.
        message = said or message
        reason = reason_of(info.reason)
        if reason is not None:
            return MeshError(reason, message, metadata)
        metadata["reason"] = info.reason
    code = error.code()
    if found is None and code is grpc.StatusCode.INTERNAL and error.details() == _NOT_WRITTEN:
        code, message = grpc.StatusCode.UNAVAILABLE, "the connection broke while a message was written"
    return MeshError(_STATUS_TO_REASON.get(code, ErrorReason.ERROR_REASON_INTERNAL), message, metadata)


async def drive(responses: object, context: _Context) -> None:
    """Runs a streaming handler: an async generator is written out, closed with its call; a coroutine writes itself."""
    if inspect.isasyncgen(responses):
        async with aclosing(responses):
            async for response in responses:
                await context.write(response)
        return
    if inspect.isawaitable(responses):
        await responses
        return
    # Some other async iterator.
    async for response in cast("AsyncIterator[object]", responses):
        await context.write(response)


def _as_mesh_error(error: Exception, method: str) -> MeshError:
    if isinstance(error, MeshError):
        log.debug("call_refused", method=method, reason=error.reason_name, error=error.message, **error.metadata)
        return error
    if isinstance(error, NotImplementedError):
        return MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED, f"{method} is not offered by this daemon", {"feature": method}
        )
    if isinstance(error, grpc.aio.InternalError) or type(error).__name__ == _SERVER_STOPPED:
        # grpc could not write, or read: one of the two ends went in that very moment, and nobody hears what we answer.
        log.warning("call_broken", method=method, error=str(error))
        return MeshError(ErrorReason.ERROR_REASON_INTERNAL, f"{method} broke off", {})
    log.exception("handler_failed", method=method)
    return MeshError(
        ErrorReason.ERROR_REASON_INTERNAL, f"{method} failed ({type(error).__name__}): see the daemon's log", {}
    )


def deserialized(deserialize: _Deserializer, raw: bytes, scan: Callable[[bytes], None] | None = None) -> object:
    """A message, whose bytes scan looks at first. Raises what scan does, and MeshError MALFORMED_MESSAGE."""
    if scan is not None:
        scan(raw)
    try:
        return deserialize(raw)
    except DecodeError as error:
        message = f"{len(raw)} bytes are no message of the expected type ({error}): check the versions of both ends"
        raise MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, message) from error


def _details_of(error: MeshError, code: grpc.StatusCode) -> bytes:
    metadata = {key: _cut(value, _MAX_VALUE_CHARS) for key, value in list(error.metadata.items())[:_MAX_VALUES]}
    status = status_pb2.Status(code=code.value[0], message=_cut(error.message, _MAX_MESSAGE_CHARS))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason_name, domain=DOMAIN, metadata=metadata))
    return bytes(status.SerializeToString())


def _cut(text: str, max_chars: int) -> str:
    # Lone surrogates (a client's broken text, quoted) have no UTF-8.
    text = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


def _info_in(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[error_details_pb2.ErrorInfo, str] | None:
    """The ErrorInfo of our domain, and the message that came with it."""
    for key, value in metadata:
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return None
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info, status.message
    return None


def _request_id_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            return value
    return ""


FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
