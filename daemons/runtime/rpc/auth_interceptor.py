"""API keys at gRPC servers: a call is refused before its handler, or any byte of its request, is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import NoReturn, TypeVar, cast

import grpc

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.caller import set_caller
from radixmesh.daemons.runtime.rpc.rpc_errors import FACTORIES
from radixmesh.daemons.runtime.security.key_guard import KeyGuard

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")

_AUTHORIZATION = "authorization"
# Supervisors and load balancers have no key, and learn nothing here but a state.
_OPEN = ("/grpc.health.v1.Health/",)
# Bytes that a client may still send of a refused stream before it is cut off.
_LINGER_S = 1.0
_LINGER_BYTES = 1 << 20
_ADMIN = ("/radixmesh.router.v1.RouterAdminService/",)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Asks the guard, once there is one. The ErrorInterceptor before it makes statuses of what it raises."""

    def __init__(self) -> None:
        self.guard: KeyGuard | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if self.guard is None or handler is None or method.startswith(_OPEN):
            return handler
        authorization = _header(handler_call_details.invocation_metadata)
        try:
            set_caller(self.guard.check(authorization, method, is_admin=method.startswith(_ADMIN)))
        except MeshError as error:
            return cast("grpc.RpcMethodHandler[_Req, _Resp]", _refusal(handler, error))
        return handler


def _refusal(handler: grpc.RpcMethodHandler[_Req, _Resp], error: MeshError) -> grpc.RpcMethodHandler[object, object]:
    """A handler of the same shape that only refuses. It takes any bytes for a request: they are not looked at."""

    async def refuse(request: object, context: object) -> NoReturn:
        if handler.request_streaming:
            await _let_finish(cast("AsyncIterator[object]", request))
        raise error

    return FACTORIES[handler.request_streaming, handler.response_streaming](refuse, None, None)


async def _let_finish(requests: AsyncIterator[object]) -> None:
    """Passes over what a client still sends, within a bound: a status that meets a client who writes is followed by a
    reset, which the client takes for an INTERNAL error before it has read why it was refused.
    """
    num_bytes = 0
    with suppress(TimeoutError, MeshError):
        async with asyncio.timeout(_LINGER_S):
            async for request in requests:
                num_bytes += len(cast(bytes, request))
                if num_bytes > _LINGER_BYTES:
                    return


def _header(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    for key, value in metadata or ():
        if key == _AUTHORIZATION and isinstance(value, str):
            return value
    return None
